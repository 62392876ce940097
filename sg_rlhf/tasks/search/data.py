"""Question answering data: Search-R1's files, FlashRAG's, and our own records."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sg_rlhf.common.text import truncate
from sg_rlhf.data_io.records import (
    DataError,
    ProgressCallback,
    json_objects,
    parquet_rows,
    read_each,
    split_held_out,
)
from sg_rlhf.tasks.labels import decode_golds, encode_golds
from sg_rlhf.tasks.search.prompt import Style, build_prompt

#: Hub id of the training set of the published runs: 79,168 questions of NQ, 90,447 of HotpotQA.
NQ_HOTPOTQA = "PeterJinGo/nq_hotpotqa_train"
EXPECTED = "Search-R1's columns (question, golden_answers or reward_model) or FlashRAG's"

_COLUMNS = frozenset(
    ("id", "question", "golden_answers", "reward_model", "answer", "data_source", "datasource")
)


@dataclass(frozen=True)
class Question:
    """A question of a data set (`source`), and its gold answers, any of which is right."""

    id: str
    text: str
    golds: tuple[str, ...]
    source: str

    @property
    def key(self) -> str:
        """Letters and digits in lower case: equal for equal questions."""
        return re.sub(r"[\W_]+", " ", self.text.lower()).strip()


def split(
    train: Sequence[Question], test: Sequence[Question] | None, test_fraction: float, seed: int
) -> tuple[list[Question], list[Question], dict[str, int]]:
    """Train and test questions without overlap or duplicates, and the numbers of dropped ones.

    `test=None` holds out `test_fraction` of each source, at random by `seed`.
    """
    unique, duplicates, conflicts = _drop_duplicates(train)
    overlap = 0
    if test is None:
        kept, held_out = split_held_out(
            unique,
            lambda question: question.source,
            test_fraction,
            lambda source: f"search split {source} seed={seed}",
        )
    else:
        held_out, test_duplicates, test_conflicts = _drop_duplicates(test)
        duplicates, conflicts = duplicates + test_duplicates, conflicts + test_conflicts
        keys = {question.key for question in held_out}
        kept = [question for question in unique if question.key not in keys]
        overlap = len(unique) - len(kept)
    dropped = {
        "duplicates_dropped": duplicates,
        "duplicates_with_other_golds": conflicts,
        "train_questions_found_in_test_dropped": overlap,
    }
    return kept, held_out, dropped


def to_records(questions: Iterable[Question], style: Style) -> Iterator[dict[str, Any]]:
    """The JSONL records that OpenRLHF's loader reads; `answer` is a JSON array of the golds."""
    for question in questions:
        yield {
            "input": build_prompt(question.text, style),
            "answer": encode_golds(question.golds),
            "datasource": question.source,
            "id": question.id,
            "question": question.text,
        }


def read_questions(
    path: str | Path, source: str | None = None, on_row: ProgressCallback | None = None
) -> list[Question]:
    """Read and check a parquet or JSONL file of Search-R1's shape, FlashRAG's, or our own.

    `source` is that of rows that name none.

    Raises:
        DataError: names the file, the row (counted from 1), the field and its value.
    """
    path = Path(path)

    def parse(row: Mapping[str, Any], number: int) -> Question:
        return _parse_row(row, f"{path.stem}_{number}", source or path.stem)

    return read_each(path, _rows(path), parse, "question", on_row)


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if not path.is_file():
        raise DataError(f"{path}: no such file, expected a parquet or jsonl file of questions")
    is_json = path.suffix in (".jsonl", ".json")
    return json_objects(path) if is_json else parquet_rows(path, _columns)


def _columns(present: list[str]) -> list[str]:
    if "question" not in present:
        raise DataError(
            f"column 'question' is missing, expected {EXPECTED}, found {', '.join(present)}"
        )
    return [name for name in present if name in _COLUMNS]


def _parse_row(row: Mapping[str, Any], default_id: str, default_source: str) -> Question:
    text = row.get("question")
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"question: {truncate(text)}, expected the question's text")
    field, value = _golds(row)
    golds = [value] if isinstance(value, str) else value
    if (
        not isinstance(golds, list)
        or not golds
        or not all(isinstance(gold, str) and gold.strip() for gold in golds)
    ):
        raise DataError(f"{field}: {truncate(value)}, expected one or more answers, none empty")
    source = row.get("data_source") or row.get("datasource") or default_source
    if not isinstance(source, str) or not re.fullmatch(r"[\w.-]+", source):
        raise DataError(f"data_source: {truncate(source)}, expected a name such as nq")
    distinct = tuple(dict.fromkeys(gold.strip() for gold in golds))
    return Question(str(row.get("id") or default_id), text.strip(), distinct, source)


def _golds(row: Mapping[str, Any]) -> tuple[str, Any]:
    """The field that holds the golds, and its value."""
    if row.get("golden_answers") is not None:
        return "golden_answers", row["golden_answers"]
    if row.get("reward_model") is not None:
        field = "reward_model.ground_truth.target"
        value: Any = row
        for name in field.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return field, value
    if row.get("answer") is not None:
        golds = decode_golds(row["answer"])
        return "answer", None if golds is None else list(golds)
    return "golden_answers", None


def _drop_duplicates(questions: Sequence[Question]) -> tuple[list[Question], int, int]:
    kept: dict[str, Question] = {}
    conflicts = 0
    for question in questions:
        first = kept.setdefault(question.key, question)
        conflicts += set(first.golds) != set(question.golds)
    return list(kept.values()), len(questions) - len(kept), conflicts
