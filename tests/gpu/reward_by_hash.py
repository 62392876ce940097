"""A reward for texts without a meaning: one bit of the text's checksum.

Every response of a model with random weights would get the same reward of any real grader, so that
no advantage, and with it no gradient, would be left. Loaded by upstream from its path.
"""

from __future__ import annotations

import zlib
from typing import Any


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    """1 or -1 for each query."""
    bits = [float(zlib.crc32(query.encode("utf-8", "replace")) & 1) for query in queries]
    (bit,) = bits
    return {
        "rewards": 2.0 * bit - 1.0,
        "scores": bit,
        "extra_logs": {"correct": bit, "format_ok": 1.0},
    }
