"""A hash per token that does not depend on padding, batches or ranks."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def token_keys(sequences_BS: Tensor, attention_mask_BS: Tensor) -> Tensor:
    """Int64 [..., S - 1]: keys of the tokens after the first, for the weighting ``random``.

    A key is a hash of the whole sequence without its padding, and of the position in it. It does
    not depend on the padding, the order of the batch or the rank. Equal sequences have equal keys.
    """
    valid_BS = attention_mask_BS != 0
    position_BS = valid_BS.long().cumsum(-1)
    tokens_BS = splitmix64(sequences_BS.long() + splitmix64(position_BS))
    sequence_B1 = tokens_BS.masked_fill(~valid_BS, 0).sum(-1, keepdim=True)
    return splitmix64(splitmix64(sequence_B1) + position_BS)[..., 1:]


def uniform_draws(keys_BT: Tensor, seed: int) -> Tensor:
    """Float64 [B, T]: uniform numbers in [0, 1), a function of key and seed."""
    # 53 bits make a double in [0, 1).
    return _logical_shift(splitmix64(keys_BT + _splitmix64_of_seed(seed)), 11).double() * 2.0**-53


@functools.lru_cache(maxsize=64)
def _splitmix64_of_seed(seed: int) -> int:
    """:func:`splitmix64` of one number, computed on the CPU, so that nothing waits for a device."""
    import torch

    return int(splitmix64(torch.tensor(seed, dtype=torch.int64, device="cpu")))


def splitmix64(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (doi 10.1145/2714064.2660195), in wrapping int64."""
    x = x + _INCREMENT
    x = (x ^ _logical_shift(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _logical_shift(x, 27)) * _MULTIPLIERS[1]
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    """A logical right shift; torch's keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _int64(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


_INCREMENT = _int64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (_int64(0xBF58476D1CE4E5B9), _int64(0x94D049BB133111EB))
