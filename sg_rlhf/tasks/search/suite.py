"""`--suite qa`: questions answered with a search engine, dialogue by dialogue (Table 2)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sg_rlhf.common.argument_types import key_values
from sg_rlhf.tasks.contamination import ContaminationRecord
from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.questions import EvalError, Missing
from sg_rlhf.tasks.search import dialogue_metrics
from sg_rlhf.tasks.search.environment import SearchEnvironment
from sg_rlhf.tasks.search.grading import score
from sg_rlhf.tasks.search.limits import LIMITS
from sg_rlhf.tasks.search.paper import beside_the_paper
from sg_rlhf.tasks.search.prompt import PROMPT_VERSION
from sg_rlhf.tasks.search.protocol import answer_of
from sg_rlhf.tasks.search.retriever import retriever_process
from sg_rlhf.tasks.search.sets import published
from sg_rlhf.tasks.search.sets.published import QaSet
from sg_rlhf.tasks.search.settings import SearchSettings
from sg_rlhf.tasks.suite import (
    NEEDS_TOKENS,
    Benchmark,
    Prepared,
    Report,
    Sampling,
    Setup,
    Suite,
    load_questions,
)

#: What `--search` may set: it decides a dialogue, and so must be the same when a run is resumed.
_DECISIVE = ("topk", "max_turns", "turn_tokens", "observation_tokens", "invalid")

#: Looked at for the files of questions, where no folder is given.
DATA = Path("data/qa")


OPTIONS: dict[str, dict[str, Any]] = {
    "--retriever": {
        "metavar": "URL",
        "help": "address of a running retriever, http://HOST:PORT (default: that of the model's "
        "training run, else port 8000 of this machine)",
    },
    "--index": {
        "metavar": "DIR",
        "type": Path,
        "help": "index to serve for the length of the evaluation, instead of --retriever",
    },
    "--no-search": {
        "action": "store_true",
        "help": "closed book: one turn, with a prompt that offers no search",
    },
    "--prompt": {
        "choices": published.PROMPTS,
        "help": "chat: the recipes' prompt in the model's chat template; raw: without template; "
        "short: the question alone (default: chat)",
    },
    "--search": {
        "metavar": "K=V",
        "nargs": "+",
        "help": "settings of a dialogue, keys of sg.search, such as topk=3 (default: Search-R1's)",
    },
}


def prepare(setup: Setup) -> Prepared:
    """The questions of the files that are there, with prompts as in training.

    Starts or finds the search engine and asks it once.
    """
    if setup.regrade:
        return Prepared(setup.benchmarks)
    options = setup.options
    index, searches = options["index"], not options["no_search"]
    given = ("retriever", options["retriever"]), ("index", index), ("no-search", not searches)
    named = [f"--{name}" for name, value in given if value]
    if len(named) > 1:
        raise EvalError(f"{' and '.join(named)}: expected one of them")
    if index is not None and not index.is_dir():
        raise EvalError(f"--index {index}: no such folder")
    url = retriever_process.address(options["retriever"]) if options["retriever"] else None
    settings = settings_of(options, url)
    if setup.tokenizer is None:
        raise EvalError(NEEDS_TOKENS)
    missing = []
    folder = setup.data_dir
    if folder is None and DATA.is_dir():
        print(f"--data-dir {DATA}, which exists")
        folder = DATA
    try:
        loaded = load_questions(present(setup.benchmarks, folder), folder, setup.limit, setup.seed)
    except EvalError as error:
        missing.append(f"questions: {error}")
    if searches and url is None and index is None:
        section = (setup.run_settings.get("sg") or {}).get("search") or {}
        settings = settings_of(options, section.get("url") or SearchSettings().url)
        try:
            asyncio.run(retriever_process.probe(settings, replace(LIMITS, retries=0)))
            print(f"--retriever {settings.url}, which answers")
        except EvalError as error:
            missing.append(f"a search engine: {error}")
    if missing:
        raise Missing(missing)
    tokenizer = setup.tokenizer()
    style: published.Prompt = options["prompt"] or "chat"
    budget = published.DIALOGUE_TOKENS if searches else settings.turn_tokens
    asked = [_asked(each, style, searches, tokenizer, budget) for each in loaded]
    if index is not None:
        print(f"serving {index}", flush=True)
        settings = settings_of(
            options, setup.resources.enter_context(retriever_process.serve(index))
        )
    described = {
        "enabled": searches,
        "prompt": style,
        "prompt_version": PROMPT_VERSION,
        **{name: getattr(settings, name) for name in _DECISIVE},
        "max_query_chars": LIMITS.max_query_chars,
        # Stands for what the search engine finds.
        "probe_sha256": asyncio.run(retriever_process.probe(settings)) if searches else None,
    }
    return Prepared(asked, {"search": described}, lambda: SearchEnvironment(settings, strict=True))


def report(rows: Mapping[str, Sequence[Mapping[str, Any]]], failures: Mapping[str, int]) -> Report:
    """Metrics of the dialogues."""
    found = {
        name: dialogue_metrics.of_benchmark(part, failures.get(name, 0))
        for name, part in rows.items()
        if any("dialogue" in row for row in part)
    }
    figures = {name: {"search": metrics} for name, metrics in found.items()}
    return Report(figures, [dialogue_metrics.table(found)] if found else [])


def settings_of(options: Mapping[str, Any], url: str | None) -> SearchSettings:
    """Search-R1's defaults with what `--search` changes."""
    values: dict[str, Any] = {"url": url} if url else {}
    try:
        values |= key_values("--search", options["search"] or (), _DECISIVE)
    except ValueError as error:
        raise EvalError(str(error)) from None
    if options["no_search"]:
        values["max_turns"] = 0
    try:
        return SearchSettings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "search"
        raise EvalError(f"--search {key}={first['input']}: {first['msg']}") from None


def present(benchmarks: Sequence[Benchmark], folder: Path | None) -> tuple[Benchmark, ...]:
    """The benchmarks whose file is there; says which are not."""
    if folder is None:
        wanted = {b.name for b in benchmarks}
        files = " ".join(f"{s.name}/{s.split}.jsonl" for s in published.SETS if s.name in wanted)
        raise EvalError(
            f"no {DATA} here; get them with `hf download RUC-NLPIR/FlashRAG_datasets {files} "
            f"--repo-type dataset --local-dir {DATA}`, or give --data-dir DIR"
        )
    found = []
    for qa_set in published.SETS:
        benchmark = next((b for b in benchmarks if b.name == qa_set.name), None)
        if benchmark is None:
            continue
        if published.find_file(qa_set, folder) is None:
            expected = published.expected_names(qa_set)
            print(f"notice: {qa_set.name}: skipped, no {expected} in {folder}")
        else:
            found.append(benchmark)
    if not found:
        names = ", ".join(b.name for b in benchmarks)
        raise EvalError(f"--data-dir {folder}: no file of {names} there")
    return tuple(found)


def _asked(
    benchmark: Benchmark, style: published.Prompt, searches: bool, tokenizer: Any, budget: int
) -> Benchmark:
    """The questions with their prompts, and the tokens that a dialogue may take."""
    source = benchmark.sources[0]
    if source.rows != benchmark.size:
        print(
            f"notice: {benchmark.name}: {source.name} is a sample, "
            f"{source.rows:,} of {benchmark.size:,} questions"
        )
    asked = [
        replace(q, prompt=published.prompt_of(q.prompt, style, searches, tokenizer))
        for q in benchmark.questions
    ]
    settings = replace(benchmark.settings, max_tokens=budget)
    return replace(benchmark, questions=asked, settings=settings)


def grade_responses(pairs: Sequence[tuple[str, Any]]) -> list[Grade]:
    """Exact match of responses that are the model's own text alone, as without a search engine."""
    return [score(answer_of(response), golds) for response, golds in pairs]


_TRAINED = "the search recipes train on the training split of this set"


def _benchmark(qa_set: QaSet) -> Benchmark:
    return Benchmark(
        name=qa_set.name,
        family=qa_set.family,
        title=qa_set.title,
        size=qa_set.size,
        settings=Sampling(temperature=0.0, max_tokens=published.DIALOGUE_TOKENS),
        load=lambda folder: published.questions(qa_set, folder),
        grade=grade_responses,
        licence=qa_set.licence,
        metric="exact match",
        samples=True,
        exposure=ContaminationRecord(qa_set.published, note=_TRAINED if qa_set.trained else ""),
    )


def _exact_matches(*families: str) -> tuple[tuple[str, str], ...]:
    return tuple((s.name, "exact match") for s in published.SETS if s.family in families)


SUITE = Suite(
    "qa",
    "Search question answering (Table 2)",
    tuple(_benchmark(qa_set) for qa_set in published.SETS),
    average=_exact_matches(published.GENERAL, published.MULTI_HOP),
    average_title="average of Table 2",
    groups={
        "General": _exact_matches(published.GENERAL),
        "Multi-hop": _exact_matches(published.MULTI_HOP),
    },
    options=OPTIONS,
    refused={
        "--chat-template": "only for raw prompts; --suite qa has --prompt chat",
        "--max-tokens": "a dialogue has limits of its own: --search turn_tokens=N max_turns=N",
    },
    prepare=prepare,
    report=report,
    training_field="question",
    beside_the_paper=beside_the_paper,
)
