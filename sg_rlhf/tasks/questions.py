"""Questions of an evaluation: the types, and choosing some of them."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sg_rlhf.common.text import single_line


class EvalError(ValueError):
    """An evaluation that cannot run as asked; the message is one line for the user."""


class Missing(EvalError):
    """Things that a run needs and nobody gave: a phrase for each, with the remedy."""

    def __init__(self, parts: Sequence[str]) -> None:
        super().__init__("; ".join(parts))
        self.parts = list(parts)


def one_line(error: BaseException, limit: int = 300) -> str:
    """A library's message for the user: its words on one line, the class if it has none."""
    text = single_line(error) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


@dataclass(frozen=True)
class Question:
    """One prompt with its gold answer.

    Attributes:
        prompt: raw text; no chat template is applied to it.
        gold: what the grader needs, as JSON can hold it.
        group: questions are also scored by group (number of people of a puzzle); "" for none.
        bare: the question without what every prompt says, to compare with training data, or "".
        messages: a conversation in place of the text, for the model's chat template.
    """

    id: str
    prompt: str
    gold: Any
    group: str = ""
    bare: str = ""
    messages: Sequence[Mapping[str, Any]] = ()

    @property
    def problem(self) -> str:
        """What is asked, without what every prompt says (`overlap.Problem`)."""
        return self.bare or (last_message(self.messages) if self.messages else self.prompt)


def last_message(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of a conversation's last message: what is asked."""
    return str(messages[-1]["content"])


@dataclass(frozen=True)
class Source:
    """Where questions came from: a file or a generator, its sha256, and how many were taken."""

    name: str
    sha256: str
    rows: int


def generated_source(name: str, questions: Sequence[Question]) -> Source:
    """The source of questions that are made and not read."""
    return Source(name, questions_hash(questions), len(questions))


def questions_hash(questions: Iterable[Question]) -> str:
    """SHA-256 over ids, prompts and golds: equal iff the same is asked and graded."""
    digest = hashlib.sha256()
    for question in questions:
        row = [question.id, question.prompt, question.gold, question.group]
        if question.messages:
            row.append(question.messages)
        digest.update(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()


def first_per_group(questions: list[Question], limit: int | None) -> list[Question]:
    """The first `limit` questions, taken from each group in turn so that all groups are there."""
    if limit is None or limit >= len(questions):
        return questions
    rank: dict[str, int] = {}
    turns = []
    for position, question in enumerate(questions):
        turn = rank.get(question.group, 0)
        rank[question.group] = turn + 1
        turns.append((turn, position))
    kept = sorted(position for _, position in sorted(turns)[:limit])
    return [questions[position] for position in kept]


def random_subset(questions: list[Question], limit: int | None, seed: int) -> list[Question]:
    """`limit` questions at random, in their order; a larger limit keeps those of a smaller one."""
    order = list(range(len(questions)))
    random.Random(seed).shuffle(order)
    return [questions[position] for position in sorted(order[:limit])]


def sample_seed(seed: int, benchmark: str, question: str, sample: int) -> int:
    """The seed of one sample: the same in every run, whatever was done before. Below 2^31."""
    text = f"{seed}/{benchmark}/{question}/{sample}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def cache_folder() -> Path:
    """Where downloaded files stay."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sg_rlhf" / "eval"


def check_online(path: Path, option: str = "--data-dir") -> None:
    """Refuse a download (`EvalError`) if `HF_HUB_OFFLINE` forbids it; `option` names a folder."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        raise EvalError(
            f"{path}: no such file, and HF_HUB_OFFLINE is set, so that it is not downloaded; give "
            f"{option} with the files (docs/evaluation.md says which), or run the command once "
            "where there is a network"
        )
