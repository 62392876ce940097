"""DeepSpeed's ``torch_adam`` switch: Adam by ``torch.optim``, so that nothing is compiled.

By default DeepSpeed compiles its Adam at first use, with nvcc or g++ against a CUDA toolkit of
torch's version. Its ``cpu_adam`` also multiplies up the powers b^t in float32, so that the next
step of a resumed process is rounded differently. ``AdamW(fused=True)`` has neither problem.

To move ``exp_avg`` and ``exp_avg_sq`` to host memory (``ds.enable_sleep``), DeepSpeed asserts that
the class is its ``FusedAdam``. That name therefore stands for torch's class, which has both.
"""

from __future__ import annotations

from typing import Any

import torch

from sg_rlhf.common import resources
from sg_rlhf.overlay.cpu import platform

FusedAdam = torch.optim.AdamW
#: Parameters from which a rank without CUDA computes with more than one thread.
THREADED = 50e6


def by_torch(optimizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """The optimizer of DeepSpeed's settings as torch's fused Adam; None without an optimizer."""
    if optimizer is None:
        return None
    return {**optimizer, "params": {**optimizer["params"], "torch_adam": True, "fused": True}}


def use_host_threads(ranks: int, parameters: int) -> None:
    """Let this rank compute on its share of the machine's cores, where it computes on the host.

    Ray exports ``OMP_NUM_THREADS=1`` to upstream's workers: one core would compute the host Adam of
    a 3B model. Without CUDA a model below :data:`THREADED` keeps one thread: its small products
    gain nothing, and the number of threads decides how sums are rounded. So does a run for which
    the user exported more.
    """
    if platform.is_cpu() and (parameters < THREADED or torch.get_num_threads() > 1):
        return
    torch.set_num_threads(max(1, resources.cores() // ranks))
