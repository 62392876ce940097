"""Linear layers of a model that only computes forward, by oneDNN on a CPU.

In float32, `torch.nn.functional.linear` goes to Intel's MKL, which leaves AVX-512 unused on other
makers' processors: with oneDNN a core of an EPYC multiplies about twice as fast. torch has it, but
takes it by itself for bf16 and compiled models alone. The weights are reordered once.
"""

from __future__ import annotations

import platform

import torch
from torch import nn


class Linear(nn.Module):
    """`nn.Linear` with weights in oneDNN's own order.

    Each row of the outcome is the same, bit for bit, whatever other rows are computed with it (a
    test holds it to that), from two rows on, and an encoder has four tokens at least: its vectors
    must not depend on their batch. A single row may differ in its last bits.

    Args:
        linear: in float32, on a CPU.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        with torch.no_grad():
            # An opaque layout: no other module can read it, only ask for its dtype.
            self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [..., in] -> [..., out]; no gradients."""
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, "none", [], ""
        )
        return y


def available() -> bool:
    """Whether this torch has the operators, on a processor for which they were tried.

    Without AVX2, rows depend on what is computed with them.
    """
    return (
        platform.machine() in {"x86_64", "AMD64"}
        and torch.backends.cpu.get_cpu_capability() in {"AVX2", "AVX512"}
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def convert(model: nn.Module) -> None:
    """Replace the float32 linear layers of a model on a CPU, in place; subclasses stay."""
    for name, module in model.named_children():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32:
            setattr(model, name, Linear(module))
        else:
            convert(module)
