"""PyTorch's operations whose CPU kernels do not take the dtypes that CUDA's take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def softmax(*, self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return torch.softmax(self.float() if half_to_float else self, dim)


def log_softmax(*, self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return torch.log_softmax(self.float() if half_to_float else self, dim)


def mm(*, self: Tensor, mat2: Tensor, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    product = self.to(out_dtype) @ mat2.to(out_dtype)
    return product if out is None else out.copy_(product)


def addmm(
    *, self: Tensor, mat1: Tensor, mat2: Tensor, out_dtype: torch.dtype, beta: float,
    alpha: float, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    added = torch.addmm(
        self.to(out_dtype), mat1.to(out_dtype), mat2.to(out_dtype), beta=beta, alpha=alpha
    )
    return added if out is None else out.copy_(added)


FORMULAS: dict[str, Callable[..., Any]] = {
    "aten::_softmax": softmax,
    "aten::_log_softmax": log_softmax,
    "aten::mm.dtype": mm,
    "aten::mm.dtype_out": mm,
    "aten::addmm.dtype": addmm,
    "aten::addmm.dtype_out": addmm,
}
