"""The Triton kernels of the log-prob head compute what PyTorch's operations do."""

from __future__ import annotations

import os
import sys
import types

import pytest
import torch

from sg_rlhf.algo import log_probs
from sg_rlhf.algo.log_probs import fused_log_probs, online_softmax
from sg_rlhf.algo.log_probs.online_softmax import BlockKernel
from tests.unit.algo.log_probs.test_online_softmax import (  # noqa: F401
    _block_by_block,
    test_no_rows,
    test_ruled_out_and_nan_and_no_target,
    test_values_and_gradients,
)


@pytest.fixture
def kernel() -> BlockKernel:
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    pytest.importorskip("triton", reason="triton is not installed")
    from sg_rlhf.algo.log_probs import triton_softmax

    return triton_softmax.KERNEL


def test_a_kernel_runs(kernel: BlockKernel) -> None:
    """The check before the first use; it raises where Triton cannot compile."""
    from sg_rlhf.algo.log_probs import triton_softmax

    triton_softmax.check("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("compiles", [True, False])
def test_without_a_c_compiler_the_default_are_pytorchs_operations(
    compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(_device: str) -> None:
        if not compiles:
            raise RuntimeError("Failed to find C compiler.")

    own = BlockKernel(online_softmax.fold, online_softmax.logit_gradient)
    module = types.ModuleType("triton_softmax")
    module.__dict__.update(check=check, KERNEL=own)
    monkeypatch.setitem(sys.modules, "sg_rlhf.algo.log_probs.triton_softmax", module)
    monkeypatch.setattr(log_probs, "triton_softmax", module, raising=False)
    monkeypatch.setattr(fused_log_probs.importlib.util, "find_spec", lambda _name: True)
    default = fused_log_probs._default_kernel.__wrapped__  # without its cache
    if compiles:
        assert default("cuda") is own
        return
    with pytest.warns(UserWarning, match=r"Failed to find C compiler.*install a C compiler"):
        assert default("cuda") is fused_log_probs.TORCH_KERNEL
