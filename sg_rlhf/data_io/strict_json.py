"""Standard JSON. Python's own writer emits NaN and Infinity, which other readers refuse."""

from __future__ import annotations

import json
import math
from typing import Any


def dumps(value: Any, **options: Any) -> str:
    """``value`` as JSON, with null for numbers that are not finite."""
    return json.dumps(plain(value), allow_nan=False, **options)


def plain(value: Any) -> Any:
    """``value`` in JSON's types: null for NaN and infinities, lists for arrays and tensors."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
