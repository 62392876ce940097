"""Evaluate a model: ``python -m eval.run --suite {math,kk,qa} [--model M] [--out DIR]``.

Writes `results.json`, `samples.jsonl` and `table.md` into DIR. Killed at any moment, the same
command with --resume goes on where it stopped. ``--compare A B`` compares two such folders.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from sg_rlhf.common.argument_types import OneLineParser, int_list, non_negative_int, positive_int
from sg_rlhf.common.atomic_io import best_effort_output
from sg_rlhf.common.environment import as_typed
from sg_rlhf.common.redaction import redact_text
from sg_rlhf.data_io import strict_json
from sg_rlhf.eval import (
    contamination,
    defaults,
    dialogues,
    drive,
    listing,
    plan,
    results,
    suites,
    tables,
)
from sg_rlhf.eval.engines.base import DTYPES, ENGINES, Engine, EngineName, EngineOptions
from sg_rlhf.eval.engines.start import set_environment, start
from sg_rlhf.eval.model import (
    Model,
    context_length,
    cpu_only,
    find_model,
    load_tokenizer,
    served_model,
)
from sg_rlhf.eval.sampling import sampled
from sg_rlhf.eval.store import RESULTS, TABLE, Key, Row, Store
from sg_rlhf.tasks import chat
from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.suite import Benchmark, Host, Prepared, Suite, Tokenize

EXAMPLES = """\
examples:
  what there is
    python -m eval.run --list
  the newest finished run on Knights & Knaves, all harnesses
    python -m eval.run --suite kk
  another checkpoint, and a folder for its results
    python -m eval.run --suite kk --model runs/kk/checkpoints/final --out out/kk
  the sampled mathematics sets alone, on 8 GPUs with one engine each
    python -m eval.run --suite math --only aime,amc --model M --out out/math --replicas 8
  AIME 2025 with 64 responses to each problem: avg@64, and pass@k from the same responses
    python -m eval.run --suite math --only aime25 --samples 64 --k 1,8,64 --model M --out out/aime25
  a quick look at five questions of each set, from files that are here
    python -m eval.run --suite math --limit 5 --data-dir data/math --model M --out out/look
  search questions, with an index of our own that is served while the run lasts
    python -m eval.run --suite qa --index indexes/e5 --data-dir data/qa --model M --out out/qa
  two finished runs, question by question
    python -m eval.run --compare out/grpo out/grpo_sg --out out/compared
  a server
    python -m eval.run --suite kk --engine openai --base-url http://localhost:8000/v1 \\
      --model M --out out/served
"""


#: A checkout has the command under this short name; an installed package has `sg-rlhf eval`.
_IN_CHECKOUT = "python -m eval.run"


def _with_command(text: str) -> str:
    """The text with the command's name as it works here."""
    in_checkout = (Path(__file__).parents[2] / "eval" / "run.py").is_file()
    return text if in_checkout else text.replace(_IN_CHECKOUT, "sg-rlhf eval")


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line.

    Attributes:
        suites: all that there are, by name.
        own_options: suite -> the options that it alone has.
        common_options: those of every suite.
    """

    args: argparse.Namespace
    suites: Mapping[str, Suite]
    own_options: Mapping[str, Sequence[argparse.Action]]
    common_options: Sequence[argparse.Action]


def parse_arguments(argv: Sequence[str]) -> CommandLine:
    """The command line, with the teaching help; options of the suites included.

    Raises:
        EvalError: `--suite` or `SG_DOMAINS` names a place where no domain is.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--suite", nargs="?")
    asked = first.parse_known_args(argv)[0].suite or ""
    known = suites.available()
    if ":" in asked:
        known[asked] = suites.at(asked)
    parser = OneLineParser(
        prog=_with_command(_IN_CHECKOUT),
        description=_with_command(__doc__ or ""),
        epilog=_with_command(EXAMPLES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    names = ", ".join(known)
    add("--suite", metavar="NAME", help=f"what to evaluate on: {names}, or package.module:DOMAIN")
    add(
        "--model", metavar="M",
        help="a Hugging Face folder, hub id or module:NAME, or a server's name for it; [the newest "
        "finished run of the suite's domain in runs/]",
    )  # fmt: skip
    add("--out", metavar="DIR", type=Path, help="folder for the results [out/SUITE_DATE_TIME]")
    add("--only", metavar="A,B", default="", help="some benchmarks or harnesses of the suite")
    add("--engine", choices=ENGINES, default="vllm", help="[vllm], openai (a server), or hf")
    add("--base-url", metavar="U", help="of the server, such as http://localhost:8000/v1")
    add("--data-dir", metavar="D", type=Path, help="the original files; else they are downloaded")
    add("--limit", metavar="N", type=positive_int, help="questions of each benchmark")
    add(
        "--samples",
        metavar="N",
        type=positive_int,
        help="responses to each question that is sampled",
    )
    add("--k", metavar="K,K", type=int_list, help="the k of pass@k, of at most the samples: 1,8,64")
    add(
        "--train-data", metavar="F", type=Path, nargs="+",
        help="files that the model was trained on; [those of its run, for a run's checkpoint]",
    )  # fmt: skip
    add(
        "--seed",
        metavar="S",
        type=non_negative_int,
        default=0,
        help="of sampling and intervals [0]",
    )
    add("--resume", action="store_true", help="go on with the run in DIR")
    add("--tensor-parallel", metavar="N", type=positive_int, default=1, help="GPUs per engine [1]")
    add("--replicas", metavar="N", type=positive_int, default=1, help="engines, as Ray actors [1]")
    add("--revision", metavar="R", help="of a model on the hub [main]")
    add("--dtype", choices=DTYPES, default="auto", help="[auto]: the model's, float32 on a CPU")
    add(
        "--concurrency",
        metavar="N",
        type=positive_int,
        default=128,
        help="requests that a server gets at once [128]",
    )
    add("--list", action="store_true", help="print suites, sizes, settings and licences")
    add(
        "--compare", metavar=("A", "B"), type=Path, nargs=2,
        help="compare two finished runs question by question; --out gets compare.json and .md",
    )  # fmt: skip
    own = {}
    for name, suite in known.items():
        group = parser.add_argument_group(f"with --suite {name} alone")
        suite.add_options(group)
        own[name] = list(group._group_actions)
    common = [a for a in parser._actions if not any(a in options for options in own.values())]
    return CommandLine(parser.parse_args(argv), known, own, common)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0; 2 for bad input; 1 when the run stopped; 130 when interrupted."""
    # Tables are cut to 80 columns where no terminal says how wide it is.
    console = Console(width=None if sys.stdout.isatty() else 120)
    line = None
    try:
        line = parse_arguments(sys.argv[1:] if argv is None else argv)
        if line.args.list:
            listing.show(line.suites, console)
            return 0
        if line.args.compare is not None:
            return compare_folders(line, console)
        suite, benchmarks = check(line)
        with best_effort_output():
            return evaluate(line.args, suite, benchmarks, console)
    except (EvalError, OSError) as error:
        said = as_typed(_with_command(redact_text(" ".join(str(error).split()))))
        print(f"error: {said}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        out = None if line is None else line.args.out
        resume = f"; go on with --resume --out {out}" if out is not None else ""
        print(f"interrupted{resume}", file=sys.stderr)
        return 130


#: What `--compare` takes beside the two folders.
_OF_COMPARE = {"compare", "suite", "out", "only", "k", "seed", "help"}


def compare_folders(line: CommandLine, console: Console) -> int:
    """Compare two finished runs; the exit status.

    Raises:
        EvalError: an option that says nothing here, or folders that cannot be compared.
    """
    # A run needs none of it.
    from sg_rlhf.eval import compare_report
    from sg_rlhf.eval.compare import compare

    args = line.args
    own = [option for options in line.own_options.values() for option in options]
    for option in [*line.common_options, *own]:
        if option.dest not in _OF_COMPARE and getattr(args, option.dest) != option.default:
            raise EvalError(f"{option.option_strings[0]}: says nothing about two finished runs")
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        raise EvalError(f"--out {args.out}: is a file, expected a folder")
    found = compare(line.suites, tuple(args.compare), names_in(args.only), args.k, args.seed)
    compare_report.show(found, console)
    for path in compare_report.write(found, args.out) if args.out is not None else ():
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)
    return 0


def names_in(only: str) -> list[str]:
    """The names of `--only`.

    Raises:
        EvalError: it is given and has none.
    """
    names = [name.strip() for name in only.split(",") if name.strip()]
    if only and not names:
        raise EvalError(f"--only {only}: names no benchmark; --list shows what there is")
    return names


#: Engines that an option says something to, where not all of them do.
_ENGINES_OF: Mapping[str, Sequence[EngineName]] = {
    "base_url": ("openai",),
    "concurrency": ("openai",),
    "tensor_parallel": ("vllm",),
    "revision": ("vllm", "hf"),
    "dtype": ("vllm", "hf"),
}


def check(line: CommandLine) -> tuple[Suite, tuple[Benchmark, ...]]:
    """What can be wrong in the command line alone.

    Returns:
        The suite, and those of its benchmarks that are selected.

    Raises:
        EvalError: one line for the user.
    """
    args = line.args
    if args.suite is None:
        raise EvalError("--suite is missing; python -m eval.run --help shows examples")
    suite = line.suites.get(args.suite)
    if suite is None:
        raise EvalError(
            f"--suite {args.suite}: expected one of {', '.join(line.suites)}, or "
            "package.module:NAME of a domain"
        )
    if args.engine == "openai" and args.base_url is None:
        raise EvalError("--engine openai needs --base-url, such as http://localhost:8000/v1")
    for option in line.common_options:
        engines = _ENGINES_OF.get(option.dest)
        value = getattr(args, option.dest, option.default)
        if engines is not None and args.engine not in engines and value != option.default:
            name = option.option_strings[0]
            raise EvalError(f"{name} {value}: only with --engine {' or '.join(engines)}")
    if args.engine == "openai" and args.replicas > 1:
        raise EvalError("--replicas: a server is one engine; start more behind its own router")
    if args.data_dir is not None and not args.data_dir.is_dir():
        raise EvalError(f"--data-dir {args.data_dir}: no such folder")
    for path in args.train_data or ():
        if not path.is_file():
            raise EvalError(f"--train-data {path}: no such file")
    for name, options in line.own_options.items():
        for option in options:
            if name != args.suite and getattr(args, option.dest) != option.default:
                raise EvalError(f"{option.option_strings[0]}: only with --suite {name}")
    suite.check(args)
    benchmarks = sampled(suite.select(names_in(args.only)), args.samples, args.k)
    defaults.complete(args, suite, benchmarks)
    return suite, benchmarks


def evaluate(
    args: argparse.Namespace, suite: Suite, benchmarks: Sequence[Benchmark], console: Console
) -> int:
    """Prepare, run and report; the exit status."""
    with Store(args.out, args.resume) as store:
        with contextlib.ExitStack() as resources:
            target = functools.cache(lambda: find_target(args))
            prepared = suite.prepare(benchmarks, args, lambda: target().tokenizer, resources)
            seen = contamination.look(suite, prepared.loaded, target().model, args.train_data)
            run = plan_run(args, suite, prepared, target(), store)
            engine = start_engine(args, run, resources)
            begun = store.write_request(run.request, results.environment())
            try:
                suite.run(prepared, Answers(run, engine, store, args.replicas))
            except (EvalError, OSError) as error:
                said = as_typed(redact_text(str(error)))
                print(f"error: {said}; go on with --resume --out {args.out}", file=sys.stderr)
                return 1
        rows = list(store.begin(run.request).values())
        asked = [loaded.benchmark for loaded in prepared.loaded]
        failures = store.failures()
        report = results.build(suite, asked, run.request, rows, begun, failures, seen)
        store.write_text(RESULTS, strict_json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        store.write_text(TABLE, tables.markdown(report, suite))
        tables.show(report, suite, args.out, console)
    return 0


@dataclass(frozen=True)
class Target:
    """The model, and what its prompts have to fit.

    Attributes:
        context: most tokens of prompt and response; None: a server does not tell.
        tokenizer: None for a model behind a server.
    """

    model: Model
    context: int | None
    tokenize: Tokenize
    tokenizer: Any
    cpu: bool


def find_target(args: argparse.Namespace) -> Target:
    """Look the model up.

    Raises:
        EvalError: it is not there, or cannot be read.
    """
    if args.engine != "openai":
        cpu = cpu_only()
        model = find_model(args.model, args.revision)
        set_environment(args.engine, cpu, args.replicas)
        tokenizer = load_tokenizer(model)
        ids: Tokenize = lambda prompts: chat.encode(prompts, tokenizer)  # noqa: E731
        return Target(model, context_length(model), ids, tokenizer, cpu)
    from sg_rlhf.eval.engines.openai import Server

    # A server does not show its weights: a local folder is fingerprinted, a name stands for itself.
    local = (Path(args.model) / "config.json").is_file()
    model = find_model(args.model, None) if local else served_model(args.model)
    server = Server(args.base_url, model.name, model.location)
    if server.context is None:
        print("notice: the server does not tell its context; nothing is cut", flush=True)
    return Target(model, server.context, server.tokenize, None, cpu=False)


@dataclass(frozen=True)
class Run:
    """Every sample of a run: those that are stored, and those that are left.

    Attributes:
        request: what must be the same again when it is resumed.
        context: that the engine needs; 0: unknown.
    """

    target: Target
    request: dict[str, Any]
    stored: Mapping[Key, Row]
    left: Sequence[plan.Sample]
    context: int


def plan_run(
    args: argparse.Namespace, suite: Suite, prepared: Prepared, target: Target, store: Store
) -> Run:
    """Fit the questions to the model, and see what is there already.

    Raises:
        EvalError: the folder holds a run that was begun with another request.
    """
    tasks = plan.make_tasks(prepared.loaded, prepared.tokenize or target.tokenize, target.context)
    request = {
        "suite": suite.name,
        "model": target.model.as_dict(),
        "engine": args.engine,
        "dtype": ("float32" if target.cpu and args.dtype == "auto" else args.dtype),
        "context": target.context,
        "seed": args.seed,
        "limit": args.limit,
        **prepared.request,
        "benchmarks": {task.benchmark.name: task.describe() for task in tasks},
    }
    stored = store.begin(request)
    samples = plan.samples(
        tasks, args.seed, known_ids=args.engine != "openai", tokenizer=target.tokenizer
    )
    left = _left(samples, stored, args.out)
    name = target.model.name
    print(f"{len(samples)} samples, {len(stored)} there already; model {name}", flush=True)
    _announce_cuts(tasks, target.context)
    context = plan.context_needed(tasks) if target.context is not None else 0
    return Run(target, request, stored, left, context)


def start_engine(
    args: argparse.Namespace, run: Run, resources: contextlib.ExitStack
) -> Engine | None:
    """Start what was asked for, unless nothing is left for it.

    Raises:
        EvalError: it does not start.
    """
    if not any(sample.request.max_tokens for sample in run.left):
        return None
    engine = start(
        EngineOptions(
            name=args.engine,
            model=run.target.model,
            context=run.context,
            dtype=run.request["dtype"],
            cpu=run.target.cpu,
            tensor_parallel=args.tensor_parallel,
            replicas=args.replicas,
            base_url=args.base_url,
            concurrency=args.concurrency,
        )
    )
    resources.callback(engine.close)
    return engine


@dataclass(frozen=True)
class Answers:
    """Has every sample that is left answered and stored (`tasks.suite.Answering`)."""

    run: Run
    engine: Engine | None
    store: Store
    replicas: int

    def respond(self) -> None:
        """One response to each prompt."""
        if self.run.left:
            drive.run(self.run.left, self.engine, self.store, already=len(self.run.stored))

    def converse(self, host: Callable[[], Host]) -> None:
        """One dialogue from each prompt."""
        if self.run.left:
            in_flight = dialogues.IN_FLIGHT * self.replicas
            stored = len(self.run.stored)
            dialogues.run(self.run.left, self.engine, self.store, stored, host, in_flight)


def _announce_cuts(tasks: Sequence[plan.Task], context: int | None) -> None:
    for task in tasks:
        cuts = task.describe()["context_cuts"]
        if cuts["questions"]:
            print(
                f"notice: {task.benchmark.name}: the model's context of {context} tokens cuts "
                f"{cuts['questions']} of {len(task.questions)} questions' responses, to "
                f"{cuts['shortest_max_tokens']} tokens at the least",
                flush=True,
            )


def _left(samples: list[plan.Sample], stored: Mapping[Key, Row], out: Path) -> list[plan.Sample]:
    keys = {sample.key for sample in samples}
    foreign = next((key for key in stored if key not in keys), None)
    if foreign is not None:
        raise EvalError(f"--resume: {out} holds sample {foreign}, which this run does not have")
    return [sample for sample in samples if sample.key not in stored]


if __name__ == "__main__":
    raise SystemExit(main())
