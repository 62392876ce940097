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
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from sg_rlhf.common import home
from sg_rlhf.common.atomic_io import best_effort_output
from sg_rlhf.common.environment import as_typed
from sg_rlhf.common.redaction import redact_text
from sg_rlhf.common.text import single_line
from sg_rlhf.data_io.run_config import run_of
from sg_rlhf.eval import chat_prompts, contamination, suites, training_runs
from sg_rlhf.eval.answer import answer, describe, samples_of
from sg_rlhf.eval.command_line import (
    CommandLine,
    check,
    dated_folder,
    names_in,
    parse_arguments,
    sampling_options,
)
from sg_rlhf.eval.engines import vllm
from sg_rlhf.eval.engines.base import Engine, Sample
from sg_rlhf.eval.model import ModelHandle, open_model
from sg_rlhf.eval.rescore import rescore
from sg_rlhf.eval.scores import compare_report, results, tables
from sg_rlhf.eval.scores.compare import compare
from sg_rlhf.eval.store import Store, check_folder, model_of
from sg_rlhf.tasks import registry
from sg_rlhf.tasks.codec import TokenizerCodec
from sg_rlhf.tasks.domain import Domain
from sg_rlhf.tasks.questions import EvalError, Missing
from sg_rlhf.tasks.suite import NEEDS_TOKENS, Benchmark, Prepared, Setup, Suite


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
            suites.show(line.suites, console)
            return 0
        if line.args.compare is not None:
            return compare_folders(line, console)
        if line.args.rescore is not None:
            with best_effort_output():
                return rescore(line, console)
        with best_effort_output():
            return evaluate(line, console)
    except (EvalError, OSError) as error:
        said = as_typed(redact_text(single_line(error)))
        print(f"error: {said}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        out = None if line is None else line.args.out
        resume = f"; go on with --resume --out {out}" if out is not None else ""
        print(f"interrupted{resume}", file=sys.stderr)
        return 130


#: Options that `--compare` and `--list` have a use for.
_COMPARE_OPTIONS = {"--compare", "--suite", "--out", "--only", "--k", "--seed"}
_LIST_OPTIONS = {"--list", "--suite"}


def compare_folders(line: CommandLine, console: Console) -> int:
    """Compare two finished runs; the exit status."""
    args = line.args
    line.refuse_all_but(_COMPARE_OPTIONS, "says nothing about two finished runs")
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        raise EvalError(f"--out {args.out}: is a file, expected a folder")
    suite, found = compare(line.suites, tuple(args.compare), names_in(args.only), args.k, args.seed)
    compare_report.write(suite, found, args.out, console)
    return 0


def evaluate(line: CommandLine, console: Console) -> int:
    """Run an evaluation and write its report; the exit status."""
    args = line.args
    suite, benchmarks = check(line)
    domain = suites.domain_of(suite, args.suite)
    name, chosen = choose_model(args, domain)
    if args.out is None:
        args.out = dated_folder(suite.name)
        chosen = [*chosen, f"--out {args.out}"]
    check_folder(args.out, args.resume)
    run = None if name is None else run_of(name)
    run_settings = {} if run is None else run.settings
    with contextlib.ExitStack() as resources:

        @functools.cache
        def target() -> ModelHandle:
            if name is None:
                raise Missing([no_model(args, domain)])
            return open_model(args, name)

        knows_tokens = args.engine != "openai" or (name and target().tokenizer is not None)
        setup = Setup(
            benchmarks=benchmarks,
            options=line.suite_values,
            resources=resources,
            data_dir=args.data_dir,
            limit=args.limit,
            seed=args.seed,
            tokenizer=(lambda: target().tokenizer) if knows_tokens else None,
            run_settings=run_settings,
        )
        prepared = prepare(suite, setup, no_model(args, domain) if name is None else None)
        if chosen:
            print("; ".join(chosen), flush=True)
        asked, request = as_chats(args, prepared, target().tokenizer)
        environment = prepared.environment or suites.environment_of(domain, run_settings)
        if environment is not None and target().tokenizer is None:
            raise EvalError(NEEDS_TOKENS)
        model = target().model
        seen = contamination.find_training_overlap(suite, asked, model.name, run, args.train_data)
        samples, request = fit(args, suite, asked, request, target())
        store = resources.enter_context(Store(args.out, args.resume))
        stored = store.begin(request)
        left = [sample for sample in samples if sample.key not in stored]
        print(
            f"{len(samples)} samples, {len(stored)} there already; model {model.name}", flush=True
        )
        for cut in tables.context_notices(request["benchmarks"], target().context):
            print(f"notice: {cut}", flush=True)
        engine = start_engine(args, target(), samples, left)
        if engine is not None:
            resources.callback(engine.close)
        begun = store.write_request(request, results.environment())
        codec = None if environment is None else TokenizerCodec(target().tokenizer)
        try:
            if left:
                asyncio.run(answer(left, engine, store, len(stored), environment, codec))
        except (EvalError, OSError) as error:
            said = as_typed(redact_text(str(error)))
            print(f"error: {said}; go on with --resume --out {args.out}", file=sys.stderr)
            return 1
        rows = list(store.begin(request).values())
        report, extra = results.build(suite, asked, request, rows, begun, store.failures(), seen)
        tables.write(report, extra, suite, args.out, console)
    return 0


def choose_model(args: argparse.Namespace, domain: Domain | None) -> tuple[str | None, list[str]]:
    """The model: as given, of the run to resume, or of the newest run; and what to say of it."""
    if args.model is not None:
        return args.model, []
    if args.resume:
        name = model_of(args.out)
        if name is not None:
            return name, [f"--model {name}"]
    if args.engine == "openai" or domain is None:
        return None, []
    newest = training_runs.newest_checkpoint(domain.name)
    if newest is None:
        return None, []
    about = f"the newest finished run of {domain.name} under {training_runs.RUNS}/"
    return str(newest), [f"--model {newest}, {about}"]


def no_model(args: argparse.Namespace, domain: Domain | None) -> str:
    """The phrase for a model that is missing."""
    if args.engine == "openai":
        return "--model, the server's name of it"
    if domain is None:
        return "--model"
    command = "sg-rlhf train --config RECIPE"
    if domain.name in registry.DOMAINS:
        command = f"sg-rlhf run {domain.name}"
    return (
        f"a model: no finished run of {domain.name} under {training_runs.RUNS}/; train one first "
        f"(`{command}`), or give --model M"
    )


def prepare(suite: Suite, setup: Setup, missing_model: str | None) -> Prepared:
    """The suite's `prepare`, with one line for all that is missing."""
    missing = [] if missing_model is None else [missing_model]
    try:
        prepared = suite.prepare(setup)
    except Missing as error:
        missing += [part for part in error.parts if part not in missing]
    except EvalError as error:
        if not missing:
            raise
        missing.append(f"questions: {error}")
    if not missing:
        return prepared
    numbered = missing if len(missing) == 1 else [f"({n}) {m}" for n, m in enumerate(missing, 1)]
    raise EvalError(f"--suite {suite.name}: missing: {'; '.join(numbered)}")


def as_chats(
    args: argparse.Namespace, prepared: Prepared, tokenizer: Any
) -> tuple[Sequence[Benchmark], dict[str, Any]]:
    """The questions, with `--chat-template` as conversations; and the suite's part of the request.

    Without a tokenizer the server applies its own template.
    """
    benchmarks, request = prepared.benchmarks, dict(prepared.request)
    if not args.chat_template:
        written = any(q.messages for b in benchmarks for q in b.questions)
        if args.chat_template_kwargs and not written:
            raise EvalError("--chat-template-kwargs: needs --chat-template; no template is applied")
        return benchmarks, request
    chat_prompts.refuse_chats(benchmarks)
    if tokenizer is not None:
        benchmarks = chat_prompts.with_template(benchmarks, tokenizer, args.system_prompt)
    return benchmarks, {**request, "chat": {"system_prompt": args.system_prompt}}


def fit(
    args: argparse.Namespace,
    suite: Suite,
    benchmarks: Sequence[Benchmark],
    request: Mapping[str, Any],
    target: ModelHandle,
) -> tuple[list[Sample], dict[str, Any]]:
    """All samples, fitted to the model's context, and the content of `run.json`."""
    samples = samples_of(benchmarks, target.tokenize, target.context, args.seed, target.tokenizer)
    overrides = sampling_options(args).overrides()
    kwargs = args.chat_template_kwargs
    return samples, {
        "suite": suite.name,
        "model": target.model.as_dict(),
        "engine": args.engine,
        "dtype": target.dtype,
        "context": target.context,
        "seed": args.seed,
        "limit": args.limit,
        **request,
        **({"chat_template_kwargs": kwargs} if kwargs else {}),
        **({"overrides": overrides} if overrides else {}),
        "benchmarks": {each.name: describe(each, samples) for each in benchmarks},
    }


def start_engine(
    args: argparse.Namespace,
    target: ModelHandle,
    samples: Sequence[Sample],
    left: Sequence[Sample],
) -> Engine | None:
    """Start the engine, unless no sample needs one."""
    if target.server is not None:
        engine: Engine = target.server
        return engine
    if not any(sample.max_tokens for sample in left):
        return None
    needs = (len(s.prompt_ids) + s.max_tokens for s in samples if s.max_tokens)
    context = max(needs, default=0)
    return vllm.VllmEngine(target.model, context, target.dtype, target.cpu, args.tensor_parallel)


if __name__ == "__main__":
    raise SystemExit(main())
