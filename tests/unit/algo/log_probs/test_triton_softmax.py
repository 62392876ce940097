"""The Triton kernels of the log-prob head compute what PyTorch's operations do."""

from __future__ import annotations

import os

import pytest
import torch

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
