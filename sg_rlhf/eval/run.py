"""Evaluate a model: ``sg-rlhf eval --suite NAME [--model M] [--out DIR]``.

`evaluate` is the whole run: load the questions and the model, start the engine, generate and grade
the responses that are not stored yet, and write the report.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sg_rlhf.common import home
from sg_rlhf.common.atomic_io import best_effort_output
from sg_rlhf.common.environment import as_typed
from sg_rlhf.common.redaction import redact_text
from sg_rlhf.eval import chat_prompts, contamination, defaults, suites
from sg_rlhf.eval.command_line import (
    CommandLine,
    check,
    names_in,
    parse_arguments,
    sampling_options,
)
from sg_rlhf.eval.engines.base import Engine, EngineOptions
from sg_rlhf.eval.engines.start import set_environment, start
from sg_rlhf.eval.generation import generate, multi_turn, requests
from sg_rlhf.eval.model import (
    Model,
    context_length,
    cpu_only,
    find_model,
    load_tokenizer,
    served_model,
    with_merged_adapters,
)
from sg_rlhf.eval.rescore import rescore
from sg_rlhf.eval.scores import results, tables
from sg_rlhf.eval.store import Key, Row, Store
from sg_rlhf.tasks import chat
from sg_rlhf.tasks.codec import TokenizerCodec
from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.rollout import Environment
from sg_rlhf.tasks.suite import Benchmark, EvalPlan, Suite, Tokenize


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0, 1 if the run stopped, 2 for bad input, 130 if interrupted."""
    home.ensure()
    # Without a terminal, rich would cut tables to 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 120)
    line = None
    try:
        line = parse_arguments(sys.argv[1:] if argv is None else argv)
        if line.args.list:
            line.refuse_all_but(_LIST_OPTIONS, "has no effect on --list")
            list_suites(line.suites, console)
            return 0
        if line.args.compare is not None:
            return compare_folders(line, console)
        if line.args.rescore is not None:
            with best_effort_output():
                return rescore(line, console)
        suite, benchmarks = check(line)
        defaults.fill_in(line.args, suite, benchmarks)
        with best_effort_output():
            return evaluate(line.args, suite, benchmarks, console)
    except (EvalError, OSError) as error:
        said = as_typed(redact_text(" ".join(str(error).split())))
        print(f"error: {said}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        out = None if line is None else line.args.out
        resume = f"; go on with --resume --out {out}" if out is not None else ""
        print(f"interrupted{resume}", file=sys.stderr)
        return 130


#: Options that `--compare` and `--list` have a use for.
_COMPARE_OPTIONS = {"compare", "suite", "out", "only", "k", "seed"}
_LIST_OPTIONS = {"list", "suite"}


def list_suites(suites: Mapping[str, Suite], console: Console) -> None:
    """Print one table per suite: its benchmarks, with sizes, settings and licences."""
    for name, suite in suites.items():
        if not suite.benchmarks:  # --data FILE
            continue
        caption = f"without --only: {', '.join(suite.by_default)}" if suite.by_default else None
        table = Table(
            title=f"--suite {name}: {suite.title}", title_justify="left",
            caption=caption, caption_justify="left",
        )  # fmt: skip
        for title in ("--only", "benchmark", "questions", "settings", "scores", "licence"):
            table.add_column(title)
        for b in suite.benchmarks:
            s = b.settings
            how = "greedy" if s.temperature == 0 else f"T={s.temperature:g}, top_p={s.top_p:g}"
            names = [b.mean_name, *(f"pass@{k}" for k in b.pass_at)]
            if s.n > 1:
                names.append(f"bayes@{s.n}")
            if b.headline_groups:
                names.append("by number of people")
            only = b.name if b.family == b.name else f"{b.name} ({b.family})"
            table.add_row(
                only, b.title, str(b.size), f"{how}, {s.max_tokens} tokens, n={s.n}",
                ", ".join(names), b.licence,
            )  # fmt: skip
        console.print(table)


def compare_folders(line: CommandLine, console: Console) -> int:
    """Compare two finished runs; the exit status.

    Raises:
        EvalError: an option has no effect, or the folders cannot be compared.
    """
    # An evaluation does not need the paired tests.
    from sg_rlhf.eval.scores import compare_report
    from sg_rlhf.eval.scores.compare import compare

    args = line.args
    line.refuse_all_but(_COMPARE_OPTIONS, "says nothing about two finished runs")
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        raise EvalError(f"--out {args.out}: is a file, expected a folder")
    found = compare(line.suites, tuple(args.compare), names_in(args.only), args.k, args.seed)
    compare_report.show(found, console)
    for path in compare_report.write(found, args.out) if args.out is not None else ():
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)
    return 0


def evaluate(
    args: argparse.Namespace, suite: Suite, benchmarks: Sequence[Benchmark], console: Console
) -> int:
    """Run an evaluation and write its report; the exit status."""
    with Store(args.out, args.resume) as store:
        with contextlib.ExitStack() as resources:
            target = functools.cache(lambda: open_model(args))
            benchmarks, graders = suite.with_graders(benchmarks, args, resources)
            prepared = suite.prepare(benchmarks, args, lambda: target().tokenizer, resources)
            prepared = replace(prepared, request={**prepared.request, **graders})
            if prepared.environment is None:
                domain = suites.domain_of(suite, args.suite)
                environment = suites.environment_of(domain, args.run_settings)
                prepared = replace(prepared, environment=environment)
            if prepared.environment is not None and args.engine == "openai":
                raise EvalError(
                    "--engine openai: dialogues need the tokens that were sampled, which this "
                    "engine does not ask a server for; expected vllm"
                )
            if args.chat_template:
                prepared = as_chats(args, prepared, target().tokenizer)
            seen = contamination.find_training_overlap(
                suite, prepared.loaded, target().model, args.train_data
            )
            run = prepare_run(args, suite, prepared, target(), store)
            engine = start_engine(args, run, resources)
            begun = store.write_request(run.request, results.environment())
            try:
                answer(args, run, engine, store, prepared.environment)
            except (EvalError, OSError) as error:
                said = as_typed(redact_text(str(error)))
                print(f"error: {said}; go on with --resume --out {args.out}", file=sys.stderr)
                return 1
        rows = list(store.begin(run.request).values())
        asked = [loaded.benchmark for loaded in prepared.loaded]
        failures = store.failures()
        report = results.build(suite, asked, run.request, rows, begun, failures, seen)
        tables.write(report, suite, args.out, console)
    return 0


def as_chats(args: argparse.Namespace, prepared: EvalPlan, tokenizer: Any) -> EvalPlan:
    """The questions as conversations.

    Args:
        tokenizer: of the model; None for a model behind a server, which applies its own template.

    Raises:
        EvalError: the prompts are conversations already, or the model has no chat template.
    """
    chat_prompts.refuse_chats(prepared.loaded)
    loaded = prepared.loaded
    if tokenizer is not None:
        loaded = chat_prompts.with_template(loaded, tokenizer, args.system_prompt)
    request = {**prepared.request, "chat": {"system_prompt": args.system_prompt}}
    return replace(prepared, loaded=loaded, request=request)


@dataclass(frozen=True)
class ModelHandle:
    """The model with its tokenizer and context.

    Attributes:
        context: most tokens of prompt and response; None if a server does not tell.
        tokenizer: None for a model behind a server.
        cpu: there is no CUDA device.
    """

    model: Model
    context: int | None
    tokenize: Tokenize
    tokenizer: Any
    cpu: bool


def open_model(args: argparse.Namespace) -> ModelHandle:
    """Find the model and load its tokenizer, or ask the server for it.

    Raises:
        EvalError: it does not exist, or cannot be read.
    """
    if args.engine != "openai":
        cpu = cpu_only()
        dtype = args.dtype if args.dtype != "auto" else "float32" if cpu else None
        loaded = with_merged_adapters(args.model, dtype)
        model = replace(find_model(loaded, args.revision), name=args.model)
        set_environment(args.engine, cpu, args.replicas)
        tokenizer = load_tokenizer(model)
        if args.chat_template_kwargs:
            try:
                apply = chat.template_with(tokenizer, args.chat_template_kwargs)
            except ValueError as error:
                raise EvalError(f"--chat-template-kwargs: {error}") from None
            tokenizer.apply_chat_template = apply
        ids: Tokenize = lambda prompts: chat.encode(prompts, tokenizer)  # noqa: E731
        return ModelHandle(model, context_length(model), ids, tokenizer, cpu)
    from sg_rlhf.eval.engines.openai import Server

    # A server does not show its weights: a local folder is fingerprinted, a name stands for itself.
    local = (Path(args.model) / "config.json").is_file()
    model = find_model(args.model, None) if local else served_model(args.model)
    server = Server(
        args.base_url,
        model.name,
        model.location,
        chat=args.chat_template,
        system_prompt=args.system_prompt,
        chat_template_kwargs=args.chat_template_kwargs,
    )
    if server.context is None:
        print("notice: the server does not tell its context; nothing is cut", flush=True)
    return ModelHandle(model, server.context, server.tokenize, None, cpu=False)


@dataclass(frozen=True)
class RunState:
    """Every sample of a run.

    Attributes:
        request: the content of `run.json`, which a resumed run must repeat.
        stored: the samples that are stored already.
        left: the samples that are not generated yet.
        context: most tokens of prompt and response that the engine needs; 0 if unknown.
    """

    target: ModelHandle
    request: dict[str, Any]
    stored: Mapping[Key, Row]
    left: Sequence[requests.PendingSample]
    context: int


def prepare_run(
    args: argparse.Namespace, suite: Suite, prepared: EvalPlan, target: ModelHandle, store: Store
) -> RunState:
    """Fit the questions to the model's context, and read the stored samples.

    Raises:
        EvalError: the folder holds a run with another request.
    """
    tasks = requests.prepare_benchmarks(
        prepared.loaded, prepared.tokenize or target.tokenize, target.context
    )
    overrides = sampling_options(args).overrides()
    request = {
        "suite": suite.name,
        "model": target.model.as_dict(),
        "engine": args.engine,
        "dtype": ("float32" if target.cpu and args.dtype == "auto" else args.dtype),
        "context": target.context,
        "seed": args.seed,
        "limit": args.limit,
        **prepared.request,
        **({"chat_template_kwargs": kwargs} if (kwargs := args.chat_template_kwargs) else {}),
        **({"overrides": overrides} if overrides else {}),
        "benchmarks": {task.benchmark.name: task.describe() for task in tasks},
    }
    stored = store.begin(request)
    samples = requests.pending_samples(
        tasks, args.seed, known_ids=args.engine != "openai", tokenizer=target.tokenizer
    )
    left = _left(samples, stored, args.out)
    name = target.model.name
    print(f"{len(samples)} samples, {len(stored)} there already; model {name}", flush=True)
    _announce_cuts(tasks, target.context)
    context = requests.context_needed(tasks) if target.context is not None else 0
    return RunState(target, request, stored, left, context)


def start_engine(
    args: argparse.Namespace, run: RunState, resources: contextlib.ExitStack
) -> Engine | None:
    """Start the engine, unless no sample needs one.

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
            chat=args.chat_template,
            system_prompt=args.system_prompt,
            chat_template_kwargs=args.chat_template_kwargs,
        )
    )
    resources.callback(engine.close)
    return engine


def answer(
    args: argparse.Namespace,
    run: RunState,
    engine: Engine | None,
    store: Store,
    environment: Callable[[], Environment] | None,
) -> None:
    """Generate, grade and store the samples that are left.

    Raises:
        EvalError: the run stopped; what ended before is stored.
    """
    stored = len(run.stored)
    if not run.left:
        return
    if environment is None:
        generate.generate_all(run.left, engine, store, already=stored)
    else:
        codec = TokenizerCodec(run.target.tokenizer)
        in_flight = multi_turn.IN_FLIGHT * args.replicas
        dialogues = multi_turn.run_dialogues(
            run.left, engine, store, stored, environment, codec, in_flight
        )
        asyncio.run(dialogues)


def _announce_cuts(tasks: Sequence[requests.PreparedBenchmark], context: int | None) -> None:
    for task in tasks:
        cuts = task.describe()["context_cuts"]
        if cuts["questions"]:
            print(
                f"notice: {task.benchmark.name}: the model's context of {context} tokens cuts "
                f"{cuts['questions']} of {len(task.questions)} questions' responses, to "
                f"{cuts['shortest_max_tokens']} tokens at the least",
                flush=True,
            )


def _left(
    samples: list[requests.PendingSample], stored: Mapping[Key, Row], out: Path
) -> list[requests.PendingSample]:
    keys = {sample.key for sample in samples}
    foreign = next((key for key in stored if key not in keys), None)
    if foreign is not None:
        raise EvalError(f"--resume: {out} holds sample {foreign}, which this run does not have")
    return [sample for sample in samples if sample.key not in stored]


if __name__ == "__main__":
    raise SystemExit(main())
