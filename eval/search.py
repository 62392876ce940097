"""What `--suite qa` needs beside the other suites: settings, prompts, a search engine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from eval import dialogues, qa, retriever
from eval.data import Source
from eval.engines.base import Engine
from eval.plan import Sample, Tokenize
from eval.questions import EvalError, Question
from eval.store import Store
from eval.suites import Benchmark
from sg_rlhf.tasks.search.codec import TokenizerCodec
from sg_rlhf.tasks.search.prompt import PROMPT_VERSION
from sg_rlhf.tasks.search.settings import SearchSettings

Loaded = tuple[Benchmark, list[Question], list[Source]]

#: What decides a dialogue, and so must be the same again when a run is resumed.
_DECISIVE = ("topk", "max_turns", "turn_tokens", "observation_tokens", "max_query_chars")
#: What `--search` may set: the rest belongs to training.
_ALLOWED = (*_DECISIVE, "timeout_s", "retries", "backoff_s", "max_connections")


@dataclass(frozen=True)
class Search:
    """How the questions of a run are answered.

    Attributes:
        enabled: False: one turn from the model's memory.
        corpus: stands for what the search engine finds (`retriever.probe`); None without one.
    """

    settings: SearchSettings
    prompt: qa.Prompt
    enabled: bool
    corpus: str | None
    codec: TokenizerCodec

    def describe(self) -> dict[str, Any]:
        """For JSON: what must be the same again when the run is resumed."""
        chosen = {name: getattr(self.settings, name) for name in _DECISIVE}
        return {
            "enabled": self.enabled,
            "prompt": self.prompt,
            "prompt_version": PROMPT_VERSION,
            **chosen,
            "probe_sha256": self.corpus,
        }

    def hold(
        self,
        samples: Sequence[Sample],
        engine: Engine | None,
        store: Store,
        already: int,
        replicas: int,
    ) -> None:
        """Hold, grade and store every dialogue (`dialogues.run`)."""
        in_flight = dialogues.IN_FLIGHT * replicas
        dialogues.run(samples, engine, store, already, self.settings, self.codec, in_flight)


def check(args: argparse.Namespace) -> None:
    """What can be wrong in the command line alone.

    Raises:
        EvalError: one line for the user.
    """
    ours = {
        "--retriever": args.retriever,
        "--index": args.index,
        "--no-search": args.no_search or None,
        "--prompt": args.prompt,
        "--search": args.search,
    }
    if args.suite != "qa":
        given = next((name for name, value in ours.items() if value is not None), None)
        if given:
            raise EvalError(f"{given}: only with --suite qa")
        return
    if args.engine == "openai":
        raise EvalError(
            "--engine openai: dialogues need the tokens that were sampled, which a completions "
            "server does not give; expected vllm or hf"
        )
    if args.data_dir is None:
        raise EvalError(
            "--suite qa needs --data-dir with FlashRAG's files (nq/test.jsonl and so on, "
            "https://huggingface.co/datasets/RUC-NLPIR/FlashRAG_datasets)"
        )
    engines = [name for name in ("--retriever", "--index", "--no-search") if ours[name] is not None]
    if len(engines) != 1:
        found = " and ".join(engines) or "none"
        raise EvalError(f"--suite qa: one of --retriever, --index, --no-search; found {found}")
    if args.index is not None and not args.index.is_dir():
        raise EvalError(f"--index {args.index}: no such folder")
    settings_of(args, retriever.address(args.retriever) if args.retriever else None)


def settings_of(args: argparse.Namespace, url: str | None) -> SearchSettings:
    """Search-R1's defaults with what `--search` changes.

    Raises:
        EvalError: an unknown key, or a value out of range.
    """
    values: dict[str, Any] = {"url": url} if url else {}
    for token in args.search or ():
        key, equals, value = token.partition("=")
        if not equals or key not in _ALLOWED:
            raise EvalError(f"--search {token}: expected KEY=VALUE, of {', '.join(_ALLOWED)}")
        values[key] = value
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
    for qa_set in qa.SETS:
        benchmark = next((b for b in benchmarks if b.name == qa_set.name), None)
        if benchmark is None:
            continue
        if qa.find_file(qa_set, folder) is None:
            print(f"notice: {qa_set.name}: skipped, no {qa.expected_names(qa_set)} in {folder}")
        else:
            found.append(benchmark)
    if not found:
        names = ", ".join(b.name for b in benchmarks)
        raise EvalError(f"--data-dir {folder}: no file of {names} there")
    return tuple(found)


def prepared(
    loaded: Sequence[Loaded], args: argparse.Namespace, tokenizer: Any
) -> tuple[list[Loaded], Tokenize]:
    """The questions with their prompts, and how these are tokenised: as in training.

    Raises:
        EvalError: the model has no chat template, which `--prompt chat` needs.
    """
    style: qa.Prompt = args.prompt or "chat"
    searches = not args.no_search
    budget = qa.DIALOGUE_TOKENS if searches else settings_of(args, None).turn_tokens
    made = []
    for benchmark, questions, sources in loaded:
        if sources[0].rows != benchmark.size:
            print(
                f"notice: {benchmark.name}: {sources[0].name} is a sample, "
                f"{sources[0].rows:,} of {benchmark.size:,} questions"
            )
        asked = [
            replace(q, prompt=qa.prompt_of(q.prompt, style, searches, tokenizer)) for q in questions
        ]
        limited = replace(benchmark, settings=replace(benchmark.settings, max_tokens=budget))
        made.append((limited, asked, sources))
    codec = TokenizerCodec(tokenizer)
    return made, lambda texts: [codec.encode(text) for text in texts]


def start(args: argparse.Namespace, tokenizer: Any, stack: contextlib.ExitStack) -> Search:
    """Start or find the search engine and ask it once; `stack` stops what was started.

    Raises:
        EvalError: it does not start, or does not answer.
    """
    url = None
    if args.index is not None:
        print(f"serving {args.index}", flush=True)
        url = stack.enter_context(retriever.serve(args.index))
    elif args.retriever is not None:
        url = retriever.address(args.retriever)
    settings = settings_of(args, url)
    corpus = None if args.no_search else asyncio.run(retriever.probe(settings))
    return Search(
        settings, args.prompt or "chat", not args.no_search, corpus, TokenizerCodec(tokenizer)
    )
