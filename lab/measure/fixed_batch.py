"""The fixed batch that checkpoints are measured on: token ids and advantages, read or saved.

Numbers of two checkpoints compare only if they come from the same tokens. So a batch is made once,
from a run's ``samples.jsonl``, from given responses or by sampling, and can be kept in a file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lab.measure.checkpoint import MeasureError, TokenRow, vocabulary
from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.common.text import truncate
from sg_rlhf.data_io.records import DataError, json_objects

KIND = "sg_rlhf.measure batch"


@dataclass(frozen=True)
class BatchRow(TokenRow):
    """A response with its group advantage, where there is one; every token of it has the same."""

    advantage: float | None = None
    reward: float | None = None


@dataclass(frozen=True)
class FixedBatch:
    """The batch that is measured on.

    temperature: of the policy, softmax(logits / temperature). vocabulary: whose ids these are.
    source: where the rows come from, for people. left_out: rows of the source that are not here.
    """

    rows: tuple[BatchRow, ...]
    temperature: float
    vocabulary: str
    source: str
    left_out: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the responses."""
        return sum(len(row.response) for row in self.rows)

    def describe(self) -> dict[str, Any]:
        """The batch in a JSON result; ``about`` is one line for people."""
        left_out = f", {self.left_out} rows left out" if self.left_out else ""
        return {
            "responses": len(self.rows),
            "tokens": self.tokens,
            "left_out": self.left_out,
            "temperature": self.temperature,
            "source": self.source,
            "about": f"{len(self.rows)} responses, {self.tokens} tokens, temperature "
            f"{self.temperature:g}: {self.source}{left_out}",
        }

    def advantages(self) -> list[float]:
        """One for each row.

        Raises:
            MeasureError: one is missing, or all are 0, which leaves no loss.
        """
        values = [row.advantage for row in self.rows if row.advantage is not None]
        if len(values) < len(self.rows):
            raise MeasureError(
                f"{self.source}: rows without advantage; expected one in each with --loss grpo, "
                "or --loss nll"
            )
        if not any(values):
            raise MeasureError(
                f"{self.source}: every advantage is 0, so the loss is 0 everywhere; expected "
                "prompts that are answered right and wrong (more rows, more --prompts or --group)"
            )
        return values

    def check_tokenizer(self, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuse a model with another vocabulary."""
        if vocabulary(tokenizer) != self.vocabulary:
            raise MeasureError(
                f"--model {name}: its tokenizer differs from the one the batch was made with "
                f"({self.source}); expected models of one family"
            )


def save(batch: FixedBatch, path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a batch atomically, with its texts next to the ids."""
    rows = [
        {
            "prompt": tokenizer.decode(row.prompt),
            "response": tokenizer.decode(row.response),
            "reward": row.reward,
            "advantage": row.advantage,
            "prompt_ids": row.prompt,
            "response_ids": row.response,
        }
        for row in batch.rows
    ]
    head = {
        "kind": KIND,
        "source": batch.source,
        "temperature": batch.temperature,
        "vocabulary": batch.vocabulary,
        "left_out": batch.left_out,
    }
    write_whole(path, json.dumps({**head, "rows": rows}, ensure_ascii=False) + "\n")


def load(path: Path) -> FixedBatch:
    """A batch that ``save`` wrote."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["kind"] != KIND:
            raise ValueError(found["kind"])
        rows = tuple(
            BatchRow(
                tuple(map(int, row["prompt_ids"])),
                tuple(map(int, row["response_ids"])),
                row["advantage"],
                row["reward"],
            )
            for row in found["rows"]
        )
        if not rows or not all(row.prompt and row.response for row in rows):
            raise ValueError("no rows, or an empty one")
        return FixedBatch(
            rows,
            float(found["temperature"]),
            str(found["vocabulary"]),
            str(found["source"]),
            int(found["left_out"]),
        )
    except (ValueError, KeyError, TypeError):
        raise MeasureError(
            f"--batch {path}: not a batch that this command wrote; expected one, or a file that "
            "does not exist yet"
        ) from None


def read_data(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    if not path.is_file():
        raise DataError(f"--data {path}: no such file, expected a JSONL file")
    rows = list(json_objects(path))
    if not rows:
        raise DataError(f"--data {path}: no rows, expected at least one")
    return rows


def has_responses(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the rows have responses; otherwise they are prompts to sample from."""
    return "response" in rows[0]


def from_responses(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    temperature: float,
    global_step: int | None = None,
) -> FixedBatch:
    """Rows of a run's ``samples.jsonl``, or any with ``prompt``, ``response`` and ``advantage``.

    The text is encoded again. Where a row holds the ``tokens`` that were sampled, as pieces of
    text, and the encoding is another one, the row is left out and counted: a policy may write a
    word in unusual pieces. So is a row with a ``dialogue``, whose response has text of others in
    between.

    Raises:
        DataError: a row without a text prompt and response, or none that is left.
    """
    kept: list[BatchRow] = []
    left_out = 0
    for number, row in enumerate(rows, start=1):
        if global_step is not None and row.get("global_step") != global_step:
            continue
        where = f"--data {path}: row {number}"
        prompt, response = (
            tuple(tokenizer(text_of(where, row, key), add_special_tokens=False)["input_ids"])
            for key in ("prompt", "response")
        )
        pieces = row.get("tokens")
        if row.get("dialogue") or (
            pieces is not None and [tokenizer.decode([t]) for t in response] != pieces
        ):
            left_out += 1
            continue
        advantage, reward = (_number(row, key, where) for key in ("advantage", "reward"))
        kept.append(BatchRow(prompt, response, advantage, reward))
    if not kept:
        asked = "" if global_step is None else f" with global_step {global_step}"
        why = f" ({left_out} left out: a dialogue, or tokens that differ)" if left_out else ""
        raise DataError(f"--data {path}: no rows{asked} that can be used{why}")
    step = "" if global_step is None else f", global_step {global_step}"
    return FixedBatch(tuple(kept), temperature, vocabulary(tokenizer), f"{path}{step}", left_out)


def text_of(where: str, row: Mapping[str, Any], key: str) -> str:
    """The text ``row[key]``."""
    value = row.get(key)
    if not isinstance(value, str) or not value:
        raise DataError(
            f"{where}: {key}={truncate(value)}: expected a text (rows have prompt and response, or "
            "input and answer as sg_rlhf.data writes them)"
        )
    return value


def _number(row: Mapping[str, Any], key: str, where: str) -> float | None:
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise DataError(f"{where}: {key}={truncate(value)}: expected a finite number")
    return float(value)
