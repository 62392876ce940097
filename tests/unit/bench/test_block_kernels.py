"""The other kernels of the log-prob head compute what PyTorch's operations do."""

from __future__ import annotations

import os

import pytest
import torch

from bench.gpu import block_kernels
from sg_rlhf.algo.log_probs.online_softmax import BlockKernel
from tests.unit.algo.log_probs.test_online_softmax import (  # noqa: F401
    _block_by_block,
    test_no_rows,
    test_ruled_out_and_nan_and_no_target,
    test_values_and_gradients,
)


@pytest.fixture(params=["pure", "compile", "triton"])
def kernel(request: pytest.FixtureRequest) -> BlockKernel:
    """``pure`` is what ``compile`` compiles, which takes half a minute on a CPU."""
    if request.param == "pure":
        return block_kernels.from_pure(block_kernels.pure_fold, block_kernels.pure_gradient)
    if request.param == "compile" and not torch.cuda.is_available():
        pytest.skip("torch.compile is tested on a GPU")
    if request.param == "triton":
        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")
        pytest.importorskip("triton", reason="triton is not installed")
    return block_kernels.KERNELS[request.param]()
