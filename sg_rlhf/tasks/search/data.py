"""Question answering data: Search-R1's files, FlashRAG's, and our own records."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sg_rlhf.tasks.search.grading import parse_golds
from sg_rlhf.tasks.search.prompt import Style, build_prompt

#: Hub id of the training set of the published runs (NQ 79,168 + HotpotQA 90,447 questions).
NQ_HOTPOTQA = "PeterJinGo/nq_hotpotqa_train"
EXPECTED = "Search-R1's columns (question, golden_answers or reward_model) or FlashRAG's"

_COLUMNS = frozenset(
    ("id", "question", "golden_answers", "reward_model", "answer", "data_source", "datasource")
)

Tick = Callable[[], object]


class DataError(ValueError):
    """A data set that cannot be used; the message is one line for the user."""


@dataclass(frozen=True)
class Question:
    """A question and its gold answers, any of which is right.

    `source` names the data set (nq, hotpotqa, ...): accuracies are reported by it.
    """

    id: str
    text: str
    golds: tuple[str, ...]
    source: str

    @property
    def key(self) -> str:
        """What makes two questions the same: letters and digits, without case."""
        return re.sub(r"[\W_]+", " ", self.text.lower()).strip()


@dataclass(frozen=True)
class Splits:
    """Train and test questions without overlap.

    `duplicates` counts questions dropped because they came twice, `conflicts` those of them whose
    golds differed, `overlap` the train questions dropped because they are in the test set.
    """

    train: list[Question]
    test: list[Question]
    duplicates: int = 0
    conflicts: int = 0
    overlap: int = 0


def split(questions: Sequence[Question], test_fraction: float, seed: int) -> Splits:
    """Hold out a fraction of each source, at random by `seed`, after dropping duplicates.

    Raises:
        DataError: the fraction is outside [0, 1).
    """
    if not 0.0 <= test_fraction < 1.0:
        raise DataError(f"test fraction must be at least 0 and below 1, got {test_fraction}")
    unique, duplicates, conflicts = _drop_duplicates(questions)
    held_out: set[int] = set()
    for source in sorted({question.source for question in unique}):
        rows = [i for i, question in enumerate(unique) if question.source == source]
        random.Random(f"search split {source} seed={seed}").shuffle(rows)
        held_out.update(rows[: round(test_fraction * len(rows))])
    train = [question for i, question in enumerate(unique) if i not in held_out]
    test = [question for i, question in enumerate(unique) if i in held_out]
    return Splits(train, test, duplicates, conflicts)


def join_splits(train: Sequence[Question], test: Sequence[Question]) -> Splits:
    """Given splits without duplicates; a train question that is also in test is dropped."""
    unique_train, duplicates, conflicts = _drop_duplicates(train)
    unique_test, test_duplicates, test_conflicts = _drop_duplicates(test)
    held_out = {question.key for question in unique_test}
    kept = [question for question in unique_train if question.key not in held_out]
    return Splits(
        kept,
        unique_test,
        duplicates + test_duplicates,
        conflicts + test_conflicts,
        len(unique_train) - len(kept),
    )


def shuffled(questions: Sequence[Question]) -> list[Question]:
    """The same questions with the sources mixed, always in the same order.

    A run that takes the first rows of a file (`data.max_samples`) then gets every source.
    """
    mixed = list(questions)
    random.Random("search order").shuffle(mixed)
    return mixed


def to_records(questions: Iterable[Question], style: Style) -> Iterator[dict[str, Any]]:
    """The JSONL records that OpenRLHF's loader reads: `input`, `answer`, `datasource`, our own.

    `answer` is a JSON array of the golds, as `grading.parse_golds` reads it.
    """
    for question in questions:
        yield {
            "input": build_prompt(question.text, style),
            "answer": json.dumps(list(question.golds), ensure_ascii=False),
            "datasource": question.source,
            "id": question.id,
            "question": question.text,
        }


def read_questions(path: str | Path, on_row: Tick | None = None) -> list[Question]:
    """Read and check a file: parquet or JSONL, of Search-R1's shape, FlashRAG's, or our own.

    A row needs `question` (not empty) and its golds: `golden_answers`,
    `reward_model.ground_truth.target`, or our `answer`. `id` and `data_source` (or `datasource`)
    are taken where they are; the file's name stands in for the source.

    Args:
        on_row: called after each row, for a progress bar.

    Raises:
        DataError: one line with the file, the row (counted from 1), the field, its value and what
            was expected.
    """
    path = Path(path)
    questions = []
    for number, row in enumerate(_rows(path), start=1):
        try:
            questions.append(_parse_row(row, f"{path.stem}_{number}", path.stem))
        except DataError as error:
            raise DataError(f"{path}: row {number}: {error}") from None
        if on_row is not None:
            on_row()
    if not questions:
        raise DataError(f"{path}: no rows, expected at least one question")
    return questions


def download(repository: str, file: str, revision: str) -> Path:
    """A file of a data set on the Hugging Face hub at one commit, from the hub's cache if there.

    Raises:
        DataError: `revision` is no full commit hash (a branch can move), or the hub does not give
            the file.
    """
    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise DataError(
            f"--revision {revision}: expected the 40 hex digits of a commit "
            f"(https://huggingface.co/datasets/{repository}/commits/main)"
        )
    # Takes a second to import, and only this source needs it.
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, file, repo_type="dataset", revision=revision))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{repository}/{file} at {revision}: {_short(error)}; "
            "or get the file by hand and give its path as --source"
        ) from None


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if not path.is_file():
        raise DataError(f"{path}: no such file, expected a parquet or jsonl file of questions")
    if path.suffix in (".jsonl", ".json"):
        yield from _json_rows(path)
        return
    # pyarrow takes a while to load, and training does not need it.
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            present = file.schema_arrow.names
            if "question" not in present:
                raise DataError(
                    f"{path}: column 'question' is missing, expected {EXPECTED}, "
                    f"found {', '.join(present)}"
                )
            wanted = [name for name in present if name in _COLUMNS]
            for batch in file.iter_batches(columns=wanted):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file: {_short(error)}") from None


def _json_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}: row {number}: not JSON: {_short(error)}") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}: row {number}: {_short(row)}, expected a JSON object")
            yield row


def _parse_row(row: Mapping[str, Any], default_id: str, default_source: str) -> Question:
    text = row.get("question")
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"question: {_short(text)}, expected the question's text")
    field, value = _golds(row)
    golds = [value] if isinstance(value, str) else value
    if (
        not isinstance(golds, list)
        or not golds
        or not all(isinstance(gold, str) and gold.strip() for gold in golds)
    ):
        raise DataError(f"{field}: {_short(value)}, expected one or more answers, none empty")
    source = row.get("data_source") or row.get("datasource") or default_source
    if not isinstance(source, str) or not re.fullmatch(r"[\w.-]+", source):
        raise DataError(f"data_source: {_short(source)}, expected a name such as nq")
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
        try:
            return "answer", list(parse_golds(row["answer"]))
        except (ValueError, TypeError):
            return "answer", None
    return "golden_answers", None


def _drop_duplicates(questions: Sequence[Question]) -> tuple[list[Question], int, int]:
    kept: dict[str, Question] = {}
    conflicts = 0
    for question in questions:
        first = kept.setdefault(question.key, question)
        conflicts += set(first.golds) != set(question.golds)
    return list(kept.values()), len(questions) - len(kept), conflicts


def _short(value: Any) -> str:
    text = " ".join((str if isinstance(value, BaseException) else repr)(value).split())
    return text if len(text) <= 120 else f"{text[:120]}..."
