"""`--suite qa`: questions answered with a search engine, dialogue by dialogue (Table 2)."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sg_rlhf.common.argument_types import key_values
from sg_rlhf.tasks.codec import TokenizerCodec
from sg_rlhf.tasks.contamination import ContaminationRecord
from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.questions import EvalError
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
    Benchmark,
    EvalPlan,
    ExtraTable,
    LoadedBenchmark,
    Results,
    Sampling,
    Suite,
    load_questions,
)

#: What `--search` may set: it decides a dialogue, and so must be the same when a run is resumed.
_DECISIVE = ("topk", "max_turns", "turn_tokens", "observation_tokens", "invalid")

#: Looked at for the files of questions, where no folder is given.
DATA = Path("data/qa")


@dataclass(frozen=True)
class SearchSuite(Suite):
    """Dialogues instead of single responses, with a search engine that runs or is started."""

    def add_options(self, parser: argparse._ActionsContainer) -> None:
        add = parser.add_argument
        add(
            "--retriever", metavar="URL",
            help="address of a running retriever, http://HOST:PORT (default: that of the model's "
            "training run, else port 8000 of this machine)",
        )  # fmt: skip
        add(
            "--index", metavar="DIR", type=Path,
            help="index to serve for the length of the evaluation, instead of --retriever",
        )  # fmt: skip
        add(
            "--no-search", action="store_true",
            help="closed book: one turn, with a prompt that offers no search",
        )  # fmt: skip
        add(
            "--prompt", choices=published.PROMPTS,
            help="chat: the recipes' prompt in the model's chat template; raw: without template; "
            "short: the question alone (default: chat)",
        )  # fmt: skip
        add(
            "--search", metavar="K=V", nargs="+",
            help="settings of a dialogue, keys of sg.search, such as topk=3 (default: Search-R1's)",
        )  # fmt: skip

    def check(self, args: argparse.Namespace) -> None:
        if args.engine == "openai":
            raise EvalError(
                "--engine openai: dialogues need the tokens that were sampled, which this engine "
                "does not ask a server for; expected vllm"
            )
        if args.chat_template:
            raise EvalError("--chat-template: only for raw prompts; --suite qa has --prompt chat")
        if args.max_tokens is not None:
            raise EvalError(
                f"--max-tokens {args.max_tokens}: a dialogue has limits of its own: "
                "--search turn_tokens=N max_turns=N"
            )
        given = {
            "--retriever": args.retriever is not None,
            "--index": args.index is not None,
            "--no-search": args.no_search,
        }
        engines = [option for option, value in given.items() if value]
        if len(engines) > 1:
            raise EvalError(f"{' and '.join(engines)}: expected one of them")
        if args.index is not None and not args.index.is_dir():
            raise EvalError(f"--index {args.index}: no such folder")
        settings_of(args, retriever_process.address(args.retriever) if args.retriever else None)

    def applies_template(self, args: argparse.Namespace) -> bool:
        """As `--prompt chat` says, the default."""
        return args.prompt in (None, "chat")

    def missing(self, benchmarks: Sequence[Benchmark], args: argparse.Namespace) -> list[str]:
        """Files of questions (default: `data/qa`) and a search engine (default: the run's)."""
        found = []
        if args.data_dir is None and DATA.is_dir():
            print(f"--data-dir {DATA}, which exists")
            args.data_dir = DATA
        sets = [s for s in published.SETS if s.name in {b.name for b in benchmarks}]
        if args.data_dir is None:
            files = " ".join(f"{each.name}/{each.split}.jsonl" for each in sets)
            found.append(
                f"questions: no {DATA} here; get them with `hf download "
                f"RUC-NLPIR/FlashRAG_datasets {files} --repo-type dataset --local-dir {DATA}`, or "
                "give --data-dir DIR"
            )
        elif not any(published.find_file(each, args.data_dir) for each in sets):
            names = ", ".join(each.name for each in sets)
            found.append(f"questions: --data-dir {args.data_dir}: no file of {names} there")
        if args.retriever is None and args.index is None and not args.no_search:
            section = (args.run_settings.get("sg") or {}).get("search") or {}
            url = section.get("url") or SearchSettings().url
            try:
                once = replace(LIMITS, retries=0)
                asyncio.run(retriever_process.probe(settings_of(args, url), once))
            except EvalError as error:
                found.append(f"a search engine: {error}")
            else:
                print(f"--retriever {url}, which answers")
                args.retriever = url
        return found

    def prepare(
        self,
        benchmarks: Sequence[Benchmark],
        args: argparse.Namespace,
        tokenizer: Callable[[], Any],
        resources: ExitStack,
    ) -> EvalPlan:
        """The questions of the files that are there, with prompts as in training.

        Starts or finds the search engine and asks it once.
        """
        there = present(benchmarks, args.data_dir)
        loaded = load_questions(there, args.data_dir, args.limit, args.seed)
        loaded_tokenizer = tokenizer()
        style: published.Prompt = args.prompt or "chat"
        asked = [_asked(each, args, style, loaded_tokenizer) for each in loaded]
        url = None
        if args.index is not None:
            print(f"serving {args.index}", flush=True)
            url = resources.enter_context(retriever_process.serve(args.index))
        elif args.retriever is not None:
            url = retriever_process.address(args.retriever)
        settings = settings_of(args, url)
        corpus = None if args.no_search else asyncio.run(retriever_process.probe(settings))
        codec = TokenizerCodec(loaded_tokenizer)
        described = {
            "enabled": not args.no_search,
            "prompt": style,
            "prompt_version": PROMPT_VERSION,
            **{name: getattr(settings, name) for name in _DECISIVE},
            "max_query_chars": LIMITS.max_query_chars,
            # Stands for what the search engine finds.
            "probe_sha256": corpus,
        }
        return EvalPlan(
            loaded=asked,
            request={"search": described},
            tokenize=lambda texts: [codec.encode(text) for text in texts],
            environment=lambda: SearchEnvironment(settings, strict=True),
        )

    def statistics(self, rows: Sequence[Mapping[str, Any]], failures: int) -> dict[str, Any]:
        if not any("dialogue" in row for row in rows):
            return {}
        return {"search": dialogue_metrics.of_benchmark(rows, failures)}

    def tables(self, results: Results) -> Sequence[ExtraTable]:
        table = dialogue_metrics.table(results)
        return () if table is None else (table,)


def settings_of(args: argparse.Namespace, url: str | None) -> SearchSettings:
    """Search-R1's defaults with what `--search` changes.

    Raises:
        EvalError: an unknown key, or a value out of range.
    """
    values: dict[str, Any] = {"url": url} if url else {}
    try:
        values |= key_values("--search", args.search or (), _DECISIVE)
    except ValueError as error:
        raise EvalError(str(error)) from None
    if args.no_search:
        values["max_turns"] = 0
    try:
        return SearchSettings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "search"
        raise EvalError(f"--search {key}={first['input']}: {first['msg']}") from None


def present(benchmarks: Sequence[Benchmark], folder: Path) -> tuple[Benchmark, ...]:
    """The benchmarks whose file is there; says which are not.

    Raises:
        EvalError: none is.
    """
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
    loaded: LoadedBenchmark, args: argparse.Namespace, style: published.Prompt, tokenizer: Any
) -> LoadedBenchmark:
    """The same questions with their prompts, and the tokens that a dialogue may take."""
    benchmark, questions, sources = loaded
    if sources[0].rows != benchmark.size:
        print(
            f"notice: {benchmark.name}: {sources[0].name} is a sample, "
            f"{sources[0].rows:,} of {benchmark.size:,} questions"
        )
    searches = not args.no_search
    asked = [
        replace(q, prompt=published.prompt_of(q.prompt, style, searches, tokenizer))
        for q in questions
    ]
    budget = published.DIALOGUE_TOKENS if searches else settings_of(args, None).turn_tokens
    limited = replace(benchmark, settings=replace(benchmark.settings, max_tokens=budget))
    return LoadedBenchmark(limited, asked, sources)


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


SUITE = SearchSuite(
    "qa",
    "Search question answering (Table 2)",
    tuple(_benchmark(qa_set) for qa_set in published.SETS),
    average=_exact_matches(published.GENERAL, published.MULTI_HOP),
    average_title="average of Table 2",
    groups={
        "General": _exact_matches(published.GENERAL),
        "Multi-hop": _exact_matches(published.MULTI_HOP),
    },
    training_field="question",
    beside_the_paper=beside_the_paper,
)
