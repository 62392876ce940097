"""Several gold answers as one label: to OpenRLHF a label is one string."""

from __future__ import annotations

import json
from collections.abc import Sequence


def encode_golds(golds: Sequence[str]) -> str:
    """Gold answers as one label: a JSON array of strings."""
    return json.dumps(list(golds), ensure_ascii=False)


def decode_golds(label: object) -> tuple[str, ...] | None:
    """The gold answers of a label; None if it is no JSON array of strings that are not empty."""
    try:
        golds = json.loads(label)  # type: ignore[arg-type]  # anything may stand in a file
    except (ValueError, RecursionError, TypeError):
        return None
    if (
        not isinstance(golds, list)
        or not golds
        or not all(isinstance(gold, str) and gold.strip() for gold in golds)
    ):
        return None
    return tuple(golds)
