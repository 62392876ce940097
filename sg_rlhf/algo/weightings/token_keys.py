"""A number for each token that neither padding, batches nor ranks can change."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def token_keys(sequences_BS: Tensor, attention_mask_BS: Tensor) -> Tensor:
    """int64 keys [..., S - 1] of the tokens after the first: what ``random`` draws by.

    A key is a hash of the whole sequence without its padding and of the position in it, so it
    does not change with the padding, the order of a batch or the rank that holds it. Equal
    sequences have equal keys.
    """
    valid_BS = attention_mask_BS != 0
    position_BS = valid_BS.long().cumsum(-1)
    tokens_BS = mixed(sequences_BS.long() + mixed(position_BS))
    sequence_B1 = tokens_BS.masked_fill(~valid_BS, 0).sum(-1, keepdim=True)
    return mixed(mixed(sequence_B1) + position_BS)[..., 1:]


def uniform_draws(keys_BT: Tensor, seed: int) -> Tensor:
    """float64 draws in [0, 1), one per key, decided by the key and the seed alone."""
    # 53 bits make a double in [0, 1).
    return _shifted(mixed(keys_BT + _mixed_seed(seed)), 11).double() * 2.0**-53


@functools.lru_cache(maxsize=64)
def _mixed_seed(seed: int) -> int:
    """``mixed`` of one number, on the host: a tensor made there would wait for the device."""
    import torch

    return int(mixed(torch.tensor(seed, dtype=torch.int64, device="cpu")))


def mixed(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (doi 10.1145/2714064.2660195), in wrapping int64."""
    x = x + _INCREMENT
    x = (x ^ _shifted(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shifted(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A logical right shift; torch's keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _int64(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


_INCREMENT = _int64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (_int64(0xBF58476D1CE4E5B9), _int64(0x94D049BB133111EB))
