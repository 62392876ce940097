"""Evaluate a model: ``python -m eval.run --suite {math,kk,qa} --model M --out DIR``.

Writes `results.json`, `samples.jsonl` and `table.md` into DIR. Killed at any moment, the same
command with --resume goes on where it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eval import drive, plan, qa, results, search, tables
from eval.engines.base import ENGINES, EngineOptions
from eval.engines.start import set_environment, start
from eval.model import (
    Model,
    context_length,
    cpu_only,
    find_model,
    load_tokenizer,
    served_model,
)
from eval.questions import EvalError
from eval.store import RESULTS, TABLE, Key, Row, Store
from eval.suites import SUITES, Benchmark

EXAMPLES = """\
examples:
  what there is
    python -m eval.run --list
  a trained checkpoint on Knights & Knaves, all harnesses
    python -m eval.run --suite kk --model runs/kk/checkpoints/final --out out/kk
  the sampled mathematics sets alone, on 8 GPUs with one engine each
    python -m eval.run --suite math --only aime,amc --model M --out out/math --replicas 8
  a quick look at five questions of each set, from files that are here
    python -m eval.run --suite math --limit 5 --data-dir data/math --model M --out out/look
  search questions, with an index of our own that is served while the run lasts
    python -m eval.run --suite qa --index indexes/e5 --data-dir data/qa --model M --out out/qa
  a server
    python -m eval.run --suite kk --engine openai --base-url http://localhost:8000/v1 \\
      --model M --out out/served
"""


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, with the teaching help."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.run",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--suite", choices=SUITES, help="what to evaluate on")
    add("--model", metavar="M", help="a Hugging Face folder or hub id; a server's name for it")
    add("--out", metavar="DIR", type=Path, help="folder for the results")
    add("--only", metavar="A,B", default="", help="some benchmarks or harnesses of the suite")
    add("--engine", choices=ENGINES, default="vllm", help="[vllm], openai (a server), or hf")
    add("--base-url", metavar="U", help="of the server, such as http://localhost:8000/v1")
    add("--data-dir", metavar="D", type=Path, help="the original files; else they are downloaded")
    add("--limit", metavar="N", type=_positive, help="questions of each benchmark")
    add("--seed", metavar="S", type=int, default=0, help="of sampling and intervals [0]")
    add("--retriever", metavar="URL", help="qa: a search engine that runs, http://HOST:PORT")
    add("--index", metavar="DIR", type=Path, help="qa: an index to serve while the run lasts")
    add("--no-search", action="store_true", help="qa: one turn from the model's memory alone")
    add("--prompt", choices=qa.PROMPTS, help="qa: as trained, without template, bare [chat]")
    add("--search", metavar="K=V", nargs="+", help="qa: settings of a dialogue, such as topk=3")
    add("--resume", action="store_true", help="go on with the run in DIR")
    add("--tensor-parallel", metavar="N", type=_positive, default=1, help="GPUs per engine [1]")
    add("--replicas", metavar="N", type=_positive, default=1, help="engines, as Ray actors [1]")
    add("--revision", metavar="R", help="of a model on the hub [main]")
    add("--dtype", default="auto", help="[auto]: the model's own type, float32 without a GPU")
    add("--concurrency", metavar="N", type=_positive, default=128, help="of a server's requests")
    add("--list", action="store_true", help="print suites, sizes, settings and licences")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0; 2 for bad input; 1 when the run stopped; 130 when interrupted."""
    args = parse_arguments(sys.argv[1:] if argv is None else argv)
    # Tables are cut to 80 columns where no terminal says how wide it is.
    console = Console(width=None if sys.stdout.isatty() else 120)
    if args.list:
        _list(console)
        return 0
    try:
        benchmarks = _check(args)
        with Store(args.out, args.resume) as store:
            return _evaluate(args, benchmarks, store, console)
    except (EvalError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; go on with --resume --out {args.out}", file=sys.stderr)
        return 130


def _evaluate(
    args: argparse.Namespace, benchmarks: tuple[Benchmark, ...], store: Store, console: Console
) -> int:
    if args.suite == "qa":
        benchmarks = search.present(benchmarks, args.data_dir)
    loaded = plan.load_questions(benchmarks, args.data_dir, args.limit, args.seed)
    cpu = args.engine != "openai" and cpu_only()
    model, context, tokenize, tokenizer = _model(args, cpu)
    with contextlib.ExitStack() as stack:
        dialogues = None
        if args.suite == "qa":
            loaded, tokenize = search.prepared(loaded, args, tokenizer)
            dialogues = search.start(args, tokenizer, stack)
        tasks = plan.make_tasks(loaded, tokenize, context)
        request = {
            "suite": args.suite,
            "model": model.as_dict(),
            "engine": args.engine,
            "dtype": ("float32" if cpu and args.dtype == "auto" else args.dtype),
            "context": context,
            "seed": args.seed,
            "limit": args.limit,
            **({"search": dialogues.describe()} if dialogues else {}),
            "benchmarks": {task.benchmark.name: task.describe() for task in tasks},
        }
        stored = store.begin(request)
        samples = plan.samples(tasks, args.seed, known_ids=args.engine != "openai")
        left = _left(samples, stored, args.out)
        print(
            f"{len(samples)} samples, {len(stored)} there already; model {model.name}", flush=True
        )
        _announce_cuts(tasks, context)
        options = EngineOptions(
            name=args.engine,
            model=model,
            context=plan.context_needed(tasks) if context is not None else 0,
            dtype=request["dtype"],
            cpu=cpu,
            tensor_parallel=args.tensor_parallel,
            replicas=args.replicas,
            base_url=args.base_url,
            concurrency=args.concurrency,
        )
        engine = None
        if any(sample.request.max_tokens for sample in left):
            engine = start(options)
            stack.callback(engine.close)
        begun = store.write_request(request, results.environment())
        try:
            if left and dialogues is not None:
                dialogues.hold(left, engine, store, len(stored), args.replicas)
            elif left:
                drive.run(left, engine, store, already=len(stored))
        except (EvalError, OSError) as error:
            print(f"error: {error}; go on with --resume", file=sys.stderr)
            return 1
    rows = list(store.begin(request).values())
    suite = SUITES[args.suite]
    report = results.build(suite, benchmarks, request, rows, begun, store.failures())
    store.write_text(RESULTS, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    store.write_text(TABLE, tables.markdown(report, suite))
    tables.show(report, suite, args.out, console)
    return 0


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


def _check(args: argparse.Namespace) -> tuple[Benchmark, ...]:
    """What can be wrong in the command line alone."""
    for name in ("suite", "model", "out"):
        if getattr(args, name) is None:
            raise EvalError(f"--{name} is missing; python -m eval.run --help shows examples")
    if args.engine == "openai" and args.base_url is None:
        raise EvalError("--engine openai needs --base-url, such as http://localhost:8000/v1")
    if args.engine != "openai" and args.base_url is not None:
        raise EvalError(f"--base-url {args.base_url}: only with --engine openai")
    if args.engine != "vllm" and args.tensor_parallel > 1:
        raise EvalError(f"--tensor-parallel {args.tensor_parallel}: only with --engine vllm")
    if args.engine == "openai" and args.replicas > 1:
        raise EvalError("--replicas: a server is one engine; start more behind its own router")
    if args.data_dir is not None and not args.data_dir.is_dir():
        raise EvalError(f"--data-dir {args.data_dir}: no such folder")
    search.check(args)
    only = [name.strip() for name in args.only.split(",") if name.strip()]
    return SUITES[args.suite].select(only)


def _model(args: argparse.Namespace, cpu: bool) -> tuple[Model, int | None, plan.Tokenize, Any]:
    """The model, its context, how its prompts are tokenised, and its tokenizer if it is here."""
    if args.engine != "openai":
        model = find_model(args.model, args.revision)
        set_environment(args.engine, cpu, args.replicas)
        tokenizer = load_tokenizer(model)
        ids: plan.Tokenize = lambda prompts: tokenizer(list(prompts))["input_ids"]  # noqa: E731
        return model, context_length(model), ids, tokenizer
    from eval.engines.openai import Server

    # A server does not show its weights: a local folder is fingerprinted, a name stands for itself.
    local = (Path(args.model) / "config.json").is_file()
    model = find_model(args.model, None) if local else served_model(args.model)
    server = Server(args.base_url, model.name, model.location)
    if server.context is None:
        print("notice: the server does not tell its context; nothing is cut", flush=True)
    return model, server.context, server.tokenize, None


def _left(samples: list[plan.Sample], stored: dict[Key, Row], out: Path) -> list[plan.Sample]:
    keys = {sample.key for sample in samples}
    foreign = next((key for key in stored if key not in keys), None)
    if foreign is not None:
        raise EvalError(f"--resume: {out} holds sample {foreign}, which this run does not have")
    return [sample for sample in samples if sample.key not in stored]


def _list(console: Console) -> None:
    for suite in SUITES.values():
        table = Table(title=f"--suite {suite.name}: {suite.title}", title_justify="left")
        for title in ("--only", "benchmark", "questions", "settings", "scores", "licence"):
            table.add_column(title)
        for b in suite.benchmarks:
            s = b.settings
            how = "greedy" if s.temperature == 0 else f"T={s.temperature:g}, top_p={s.top_p:g}"
            names = [b.mean_name, *(f"pass@{k}" for k in b.pass_at)]
            if b.headline_groups:
                names.append("by number of people")
            only = b.name if b.family == b.name else f"{b.name} ({b.family})"
            table.add_row(
                only, b.title, str(b.size), f"{how}, {s.max_tokens} tokens, n={s.n}",
                ", ".join(names), b.licence,
            )  # fmt: skip
        console.print(table)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
