"""Finds the samples of a batch that have a NaN or an infinity."""

from __future__ import annotations

import torch
from torch import Tensor


def rows_not_finite(values: Tensor, mask_BT: Tensor | None = None) -> Tensor:
    """Bool [B]: whether values [B, T] (mask not 0), [B] or [B, 1] have a NaN or infinity."""
    bad = ~torch.isfinite(values)
    if mask_BT is not None:
        bad = bad & (mask_BT != 0)
    return bad.flatten(1).any(1) if bad.dim() > 1 else bad


def mean_of_finite(values: Tensor) -> float:
    """Mean of the finite values of a tensor of any shape; 0 if there are none."""
    finite = values[torch.isfinite(values)].double()
    return float(finite.mean()) if len(finite) else 0.0
