"""Seeds of requests, derived from what is sampled and not from which engine samples it or when.

With one generator for all requests of an engine, a prompt's responses would change with every
restart and with the number of engines.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

#: Seeds are below this: vLLM keeps them as signed 64-bit integers.
LIMIT = 2**63


class SeedKey(NamedTuple):
    """Identifies a prompt's responses in a run.

    Attributes:
        seed: the run's seed (``train.seed``).
        purpose: namespace of the seed: ``rollout``, or ``eval/NAME`` for a held-out set.
        step: number of rollouts that the run was trained on before.
        prompt: index of the prompt in its batch.
    """

    seed: int
    purpose: str
    step: int
    prompt: int


def request_seed(draw: SeedKey, response: int, turn: int = 0) -> int:
    """Seed of one request to an engine: SHA-256 over the fields below, so that no two are equal.

    Args:
        draw: of the prompt.
        response: index of the response among the prompt's.
        turn: number of earlier requests of this response; a dialogue makes several.

    Returns:
        0 to 2**63 - 1.
    """
    names = "/".join(map(str, (*draw, response, turn)))
    return int.from_bytes(hashlib.sha256(names.encode()).digest()[:8], "big") % LIMIT
