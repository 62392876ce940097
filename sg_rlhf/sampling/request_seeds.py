"""Seeds of sampling that depend on what is sampled, not on who samples it or when.

An engine with one generator for all its requests gives a prompt other responses after every restart
and with every other number of engines.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

#: Seeds are below this: vLLM keeps them as signed 64-bit integers.
LIMIT = 2**63


class SeedKey(NamedTuple):
    """What identifies a prompt's responses in a run.

    Attributes:
        seed: of the run (``train.seed``).
        purpose: what they are sampled for: ``rollout``, or ``eval/NAME`` of a held-out set.
        step: rollouts that the run has trained on before.
        prompt: the prompt's place among those drawn for it.
    """

    seed: int
    purpose: str
    step: int
    prompt: int


def request_seed(draw: SeedKey, response: int, turn: int = 0) -> int:
    """The seed of one request to an engine: SHA-256 of its names, so that no two are alike.

    Args:
        draw: the prompt's.
        response: the response's place among the prompt's.
        turn: requests that the response has made before; a dialogue makes several.
    """
    names = "/".join(map(str, (*draw, response, turn)))
    return int.from_bytes(hashlib.sha256(names.encode()).digest()[:8], "big") % LIMIT
