"""The interface of engines, and the sample that passes through an evaluation.

A sample begins as a question of a benchmark. The engine adds the response, the grader the verdict,
and `Sample.row` is its line in the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from sg_rlhf.eval.store import Key, Row
from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.questions import Question
from sg_rlhf.tasks.suite import Benchmark, FinishReason

#: Types of the weights; auto: the model's own.
DTYPES = ("auto", "bfloat16", "float16", "float32")
ENGINES = ("vllm", "openai")


@dataclass(frozen=True)
class Model:
    """A model as given on the command line.

    Attributes:
        name: as given.
        location: what the engines load: a folder, or a hub id.
        revision: commit of the hub; None for a folder.
        fingerprint: SHA-256 over the contents of the files that decide a response, independent of
            names and times of the folder; for a hub id over id and commit.
    """

    name: str
    location: str
    revision: str | None
    fingerprint: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"name": self.name, "revision": self.revision, "fingerprint": self.fingerprint}


@dataclass(frozen=True)
class Sample:
    """One of the n responses to a question: first its request, then also the response.

    Attributes:
        index: its number among the n.
        prompt_ids: the prompt's token ids; empty if only the server knows them.
        max_tokens: of the response; 0 if the prompt fills the context.
        seed: of this sample, so that its response does not depend on the other samples.
        stop: the response ends with, and includes, the token that completes one of these.
        stop_ids: token ids that end it, besides the model's own.
        tokens: length of the response in tokens.
        token_ids: the sampled tokens; empty if a server does not return them.
    """

    benchmark: Benchmark
    question: Question
    index: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    seed: int
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    response: str = ""
    finish_reason: FinishReason = "prompt_too_long"
    tokens: int = 0
    token_ids: tuple[int, ...] = ()

    @property
    def key(self) -> Key:
        return (self.benchmark.name, self.question.id, self.index)

    def row(self, grade: Grade) -> Row:
        """Its line in `samples.jsonl`."""
        return {
            "benchmark": self.benchmark.name,
            "id": self.question.id,
            "group": self.question.group,
            "sample": self.index,
            "prompt": self.question.prompt,
            "response": self.response,
            "gold": self.question.gold,
            "finish_reason": self.finish_reason,
            "tokens": self.tokens,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            **verdict(grade),
        }


def verdict(grade: Grade) -> Row:
    """The part of a line in `samples.jsonl` that the grader decides."""
    return {
        "correct": grade.correct,
        "reward": grade.reward,
        "extracted": grade.extracted,
        "reason": str(grade.reason),
        **({"graders": dict(grade.others)} if grade.others else {}),
    }


class Engine(Protocol):
    """An engine. It gets samples as they come and batches them itself."""

    #: Samples that `generate` may work on at a time.
    in_flight: int

    async def generate(self, sample: Sample) -> Sample:
        """The sample with its response."""

    def close(self) -> None:
        """Free everything. Called once, also after an error."""
