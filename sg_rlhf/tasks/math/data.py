"""Mathematics data: the rows of every kind of file that is read, in one row type."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sg_rlhf.common.text import truncate
from sg_rlhf.data_io.records import (
    DataError,
    ProgressCallback,
    check_fraction,
    json_lines,
    parquet_rows,
    read_each,
)
from sg_rlhf.tasks.labels import decode_golds, encode_golds
from sg_rlhf.tasks.math.prompt import problem_of, prompt_of
from sg_rlhf.tasks.overlap import normalise

KINDS = "a .parquet, .json, .jsonl or .csv file"

#: What LLMEval's prompts end in, Qwen2.5-Math's sentence.
_ASKED_FOR = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class MathRow:
    """One problem with its accepted answers.

    Attributes:
        id: of the problem in its source, such as `amc-7`. Sampled files repeat it.
        problem: the bare text, without the prompt's last sentence, white space kept.
        golds: any of which is right; empty only where the source has no answer (`read_rows`).
        source: name of the data set, OpenRLHF's `datasource`.
    """

    id: str
    problem: str
    golds: tuple[str, ...]
    source: str


def read_rows(
    path: str | Path,
    *,
    source: str | None = None,
    allow_empty: bool = False,
    on_row: ProgressCallback | None = None,
) -> list[MathRow]:
    """Read and validate a local file: `.parquet`, `.json`, `.jsonl` or `.csv` of any known shape.

    Args:
        source: name of the data set; by default the row's own, else the file's name.
        allow_empty: a row whose answer is empty comes back with `golds == ()`; else an error.

    Raises:
        DataError: one line with the file, the row (counted from 1), the field and its value.
    """
    path = Path(path)

    def parse(item: Any, number: int) -> MathRow:
        row = _parse(item, number, source, path.stem)
        if not row.golds and not allow_empty:
            raise DataError("the answer is empty, expected at least one reference answer")
        return row

    return read_each(path, _items(path), parse, "problem", on_row)


def to_records(rows: Iterable[MathRow]) -> Iterator[dict[str, Any]]:
    """The JSONL records that OpenRLHF's loader reads; `answer` is a JSON array of gold answers."""
    for row in rows:
        yield {
            "input": prompt_of(row.problem),
            "answer": encode_golds(row.golds),
            "datasource": row.source,
            "id": row.id,
            "problem": row.problem,
        }


def golds_of(label: str) -> tuple[str, ...]:
    """The gold answers of a label, a JSON array of text; else a `ValueError`."""
    golds = decode_golds(label)
    if golds is None:
        raise ValueError(f"{truncate(label)}, expected a JSON array of reference answers as text")
    return golds


def hold_out(
    rows: Sequence[MathRow], test_fraction: float, seed: int
) -> tuple[list[MathRow], list[MathRow]]:
    """Train and test rows: a fraction of the different problems is held out, at random by `seed`.

    All rows of a problem (`overlap.normalise`) go to the same side, and it is tested once.
    """
    check_fraction(test_fraction)
    first: dict[str, MathRow] = {}
    for row in rows:
        first.setdefault(normalise(row.problem), row)
    keys = list(first)
    random.Random(f"math split seed={seed}").shuffle(keys)
    held_out = set(keys[: round(test_fraction * len(keys))])
    train = [row for row in rows if normalise(row.problem) not in held_out]
    return train, [row for same, row in first.items() if same in held_out]


def _items(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise DataError(f"{path}: no such file, expected {KINDS}")
    if path.suffix == ".parquet":
        yield from parquet_rows(path)
    elif path.suffix in (".json", ".jsonl"):
        yield from _json_items(path)
    elif path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file)
    else:
        raise DataError(f"{path}: unknown kind of file {path.suffix!r}, expected {KINDS}")


def _json_items(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        if path.suffix == ".json" and file.read(64).lstrip()[:1] == b"[":
            file.seek(0)
            try:
                yield from json.load(file)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}: not JSON: {error}") from None
            return
    yield from json_lines(path)


def _parse(item: Any, number: int, source: str | None, stem: str) -> MathRow:
    if isinstance(item, list):
        return _parse_conversation(item, f"{source or stem}-{number}", source or stem)
    if not isinstance(item, Mapping):
        raise DataError(f"{truncate(item)}, expected a JSON object or Open-Reasoner-Zero's list")
    if "reward_model" in item:
        return _parse_reference(item, number, source)
    if "input" in item:
        return _parse_record(item, source)
    name = source or stem
    problem, golds = _parse_pair(item)
    return MathRow(f"{name}-{number}", problem, golds, name)


def _parse_pair(item: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Problem and golds of a row that has little else."""
    if "problem" in item:
        return _text(item["problem"], "problem"), _golds(item.get("answer"), "answer")
    if "prompt" in item and "answer" in item:
        problem = _without_asking(_text(item["prompt"], "prompt"))
        return problem, _golds(item["answer"], "answer")
    if "Problem" in item and "Short Answer" in item:
        problem, answer = _imo_answer_bench(item)
        return _text(problem, "Problem").strip(), _golds(answer, "Short Answer")
    raise DataError(
        f"fields {truncate(list(item))}, expected prompt and reward_model, or problem and answer, "
        "or prompt and answer, or input, answer, datasource, id and problem"
    )


def _imo_answer_bench(item: Mapping[str, Any]) -> tuple[Any, Any]:
    """Problem and answer of a row of IMO-AnswerBench; row 36 has the answer in the problem."""
    problem, answer = item["Problem"], item["Short Answer"]
    if item.get("Source") is None and isinstance(problem, str) and problem.endswith('$"'):
        problem, _, answer = problem.removesuffix('"').rpartition("\n,")
    return problem, answer


def _without_asking(prompt: str) -> str:
    if not prompt.endswith(_ASKED_FOR):
        raise DataError(
            f"prompt: {truncate(prompt[-80:])}, expected a prompt that ends in {_ASKED_FOR!r}"
        )
    return _text(prompt.removesuffix(_ASKED_FOR), "prompt")


def _parse_reference(item: Mapping[str, Any], number: int, source: str | None) -> MathRow:
    name = source or _text(item.get("data_source"), "data_source")
    messages = item.get("prompt")
    if (
        not isinstance(messages, list)
        or len(messages) != 1
        or not isinstance(messages[0], Mapping)
        or messages[0].get("role") != "user"
    ):
        raise DataError(f"prompt: {truncate(messages)}, expected a list of one message of the user")
    try:
        problem = problem_of(_text(messages[0].get("content"), "prompt[0].content"))
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"prompt[0].content: {error}") from None
    reward = item["reward_model"]
    if not isinstance(reward, Mapping) or "ground_truth" not in reward:
        raise DataError(f"reward_model: {truncate(reward)}, expected an object with ground_truth")
    extra = item.get("extra_info")
    index = extra.get("index") if isinstance(extra, Mapping) else None
    if not isinstance(index, int):
        index = number
    golds = _golds(reward["ground_truth"], "reward_model.ground_truth")
    return MathRow(f"{name}-{index}", _text(problem, "prompt[0].content"), golds, name)


def _parse_conversation(item: list[Any], row_id: str, name: str) -> MathRow:
    speakers = [turn.get("from") if isinstance(turn, Mapping) else None for turn in item]
    if speakers != ["human", "assistant"]:
        raise DataError(
            f"from: {truncate(speakers)}, expected a turn of human and one of assistant"
        )
    problem = _text(item[0].get("value"), "value of the human")
    truth = item[1].get("ground_truth")
    if not isinstance(truth, Mapping) or "value" not in truth:
        raise DataError(f"ground_truth: {truncate(truth)}, expected an object with value")
    return MathRow(row_id, problem, _golds(truth["value"], "ground_truth.value"), name)


def _parse_record(item: Mapping[str, Any], source: str | None) -> MathRow:
    name = source or _text(item.get("datasource"), "datasource")
    problem = _text(item.get("problem"), "problem")
    if item["input"] != prompt_of(problem):
        raise DataError(f"input: {truncate(item['input'])}, expected the prompt of the problem")
    label = _text(item.get("answer"), "answer")
    try:
        golds = golds_of(label)
    except ValueError as error:
        raise DataError(f"answer: {error}") from None
    return MathRow(_text(item.get("id"), "id"), problem, golds, name)


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{field}: {truncate(value)}, expected text that is not empty")
    # JSON can hold half a surrogate pair, which cannot be written as UTF-8 again.
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise DataError(f"{field}: {truncate(value)}, expected valid Unicode text")
    return value


def _golds(value: Any, field: str) -> tuple[str, ...]:
    """Answers without surrounding white space; empty ones are left out."""
    values = value if isinstance(value, list) else [value]
    golds = (_gold(one, field).strip() for one in values)
    return tuple(gold for gold in golds if gold)


def _gold(value: Any, field: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return _text(value, field) if value.strip() else ""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{field}: {truncate(value)}, expected text, a finite number or a list")
    # AMC's golds are integers stored as floats. Above 2^53 the digits would be made up.
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value)
