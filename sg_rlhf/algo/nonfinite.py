"""Which samples of a batch have a number that is not finite."""

from __future__ import annotations

import torch
from torch import Tensor


def rows_not_finite(values: Tensor, mask_BT: Tensor | None = None) -> Tensor:
    """Samples with a NaN or an infinity where it counts.

    Args:
        values: [B, T] with a mask, [B] or [B, 1] without.
        mask_BT: not 0 where a value counts; None where all do.

    Returns:
        bool [B].
    """
    bad = ~torch.isfinite(values)
    if mask_BT is not None:
        bad = bad & (mask_BT != 0)
    return bad.flatten(1).any(1) if bad.dim() > 1 else bad


def mean_of_finite(values: Tensor) -> float:
    """The mean of the finite numbers of a tensor of any shape; 0 where there is none."""
    finite = values[torch.isfinite(values)].double()
    return float(finite.mean()) if len(finite) else 0.0
