"""What a run logs of its memory."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch

from sg_rlhf.overlay.learner import memory


class Largest:
    """A strategy of two ranks, the other of which took 1 GiB."""

    def all_reduce(self, data: dict[str, float], op: str) -> dict[str, float]:
        assert op == "max"
        return {key: max(value, 1.0) for key, value in data.items()}


def test_without_cuda_it_is_the_process() -> None:
    memory.reset_peak()
    held = torch.ones(2**28)  # 1 GiB
    ((name, used),) = memory.max_over_ranks(Largest()).items()
    assert name == "memory/peak_rss_gib"
    assert used >= held.nbytes / memory.GIB
    assert used == pytest.approx(
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, rel=0.1
    )


def test_with_cuda_it_is_the_allocators_peak_and_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA's own numbers are stated here; what is checked is which of them are logged."""
    forgotten: list[Any] = []
    for name, answer in {
        "is_initialized": lambda: True,
        "reset_peak_memory_stats": lambda: forgotten.append(True),
        "max_memory_allocated": lambda: 3 * 2**30,
        "mem_get_info": lambda: (10 * 2**30, 80 * 2**30),
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    memory.reset_peak()
    assert forgotten
    assert memory.current_usage() == {
        "memory/peak_allocated_gib": 3.0,
        "memory/device_used_gib": 70.0,
    }
