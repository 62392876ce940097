"""The requests of a run: every sample of every question, fitted to the model's context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sg_rlhf.eval.engines.base import Request
from sg_rlhf.eval.store import Key, Row
from sg_rlhf.tasks import chat
from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.questions import Question, Source, questions_hash, sample_seed
from sg_rlhf.tasks.suite import Benchmark, FinishReason, LoadedBenchmark, Tokenize


@dataclass(frozen=True)
class PreparedBenchmark:
    """A benchmark's questions, with their prompts' tokens and most response tokens.

    Attributes:
        sources: the files of the questions.
        prompt_ids: token ids per question, as `Request.prompt_ids`.
        max_tokens: most response tokens per question; 0 if the prompt fills the context.
    """

    benchmark: Benchmark
    questions: list[Question]
    sources: list[Source]
    prompt_ids: list[list[int]]
    max_tokens: list[int]

    def describe(self) -> dict[str, Any]:
        """The part of `run.json` that a resumed run must repeat."""
        wanted = self.benchmark.settings.max_tokens
        cut = [limit for limit in self.max_tokens if limit < wanted]
        return {
            "title": self.benchmark.title,
            "settings": self.benchmark.settings.as_dict(),
            "licence": self.benchmark.licence,
            "n_questions": len(self.questions),
            "full_size": self.benchmark.size,
            "questions_sha256": questions_hash(self.questions),
            "sources": [vars(source) for source in self.sources],
            "context_cuts": {
                "questions": len(cut),
                "shortest_max_tokens": min(cut) if cut else None,
                "prompts_too_long": sum(limit == 0 for limit in self.max_tokens),
            },
        }


@dataclass(frozen=True)
class PendingSample:
    """A response that is not generated yet: its question, its index among n, and its request."""

    task: PreparedBenchmark
    question: Question
    index: int
    request: Request

    @property
    def key(self) -> Key:
        return (self.task.benchmark.name, self.question.id, self.index)

    def row(self, response: str, finish_reason: FinishReason, tokens: int, grade: Grade) -> Row:
        """Its line in `samples.jsonl`."""
        return {
            "benchmark": self.task.benchmark.name,
            "id": self.question.id,
            "group": self.question.group,
            "sample": self.index,
            "prompt": self.question.prompt,
            "response": response,
            "gold": self.question.gold,
            "finish_reason": finish_reason,
            "tokens": tokens,
            "max_tokens": self.request.max_tokens,
            "seed": self.request.seed,
            **grade_fields(grade),
        }


def grade_fields(grade: Grade) -> Row:
    """The part of a stored sample that grading decides."""
    return {
        "correct": grade.correct,
        "reward": grade.reward,
        "extracted": grade.extracted,
        "reason": str(grade.reason),
        **({"graders": dict(grade.others)} if grade.others else {}),
    }


def prepare_benchmarks(
    loaded: Sequence[LoadedBenchmark], tokenize: Tokenize, context: int | None
) -> list[PreparedBenchmark]:
    """Fit every benchmark's responses to the model's context (None: unknown, nothing is cut)."""
    tasks = []
    for benchmark, questions, sources in loaded:
        ids = tokenize([question.prompt for question in questions])
        wanted = benchmark.settings.max_tokens
        room = [wanted if context is None else max(0, context - len(row)) for row in ids]
        fitted = [min(wanted, left) for left in room]
        tasks.append(PreparedBenchmark(benchmark, questions, sources, ids, fitted))
    return tasks


def context_needed(tasks: Sequence[PreparedBenchmark]) -> int:
    """Most tokens of prompt and response that any request needs."""
    needs = (
        len(ids) + limit
        for task in tasks
        for ids, limit in zip(task.prompt_ids, task.max_tokens, strict=True)
        if limit > 0
    )
    return max(needs, default=0)


def pending_samples(
    tasks: Sequence[PreparedBenchmark], seed: int, *, known_ids: bool, tokenizer: Any = None
) -> list[PendingSample]:
    """Every sample of every question, longest prompts first.

    Long prompts at the end would leave the engine with a few slow responses; at the beginning
    they also show soonest whether they fit into memory.

    Args:
        known_ids: the tasks hold real tokens, which the requests then carry.
        tokenizer: the model's; None for one behind a server.
    """
    found = []
    for task in tasks:
        name, settings = task.benchmark.name, task.benchmark.settings
        for question, ids, limit in zip(
            task.questions, task.prompt_ids, task.max_tokens, strict=True
        ):
            ends = () if tokenizer is None else chat.stop_token_ids(question.prompt, tokenizer)
            for index in range(settings.n):
                request = Request(
                    key=f"{name}/{question.id}/{index}",
                    prompt=question.prompt,
                    prompt_ids=tuple(ids) if known_ids else (),
                    temperature=settings.temperature,
                    top_p=settings.top_p,
                    max_tokens=limit,
                    seed=sample_seed(seed, name, question.id, index),
                    stop_ids=ends,
                )
                length = len(ids) or len(question.prompt)
                found.append((length, PendingSample(task, question, index, request)))
    # Python's sort is stable: samples of a question stay side by side and share cached prefixes.
    return [sample for _, sample in sorted(found, key=lambda pair: -pair[0])]
