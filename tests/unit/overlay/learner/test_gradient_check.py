"""Which parameters a message about a gradient names, whatever DeepSpeed has of the gradient."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sg_rlhf.overlay.learner.gradient_checks import GradientFaults


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 1)


def model() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(2, 1, bias=False) for _ in range(6)))


def test_gradients_of_a_group() -> None:
    net = model()
    params = list(net.parameters())
    gradients = [torch.ones(2) for _ in params]
    gradients[3][1], gradients[1][0] = torch.nan, torch.inf
    faults = GradientFaults(None, net.named_parameters)
    faults.record_nonfinite(gradients, params)
    line = str(faults.error(7))
    assert "entries (1.weight, 3.weight), though" in line and "optimizer step 7:" in line
    assert "weight" not in str(faults.error(8)), "they are the next step's to say again"


def test_many_are_a_number() -> None:
    net = model()
    params = list(net.parameters())
    faults = GradientFaults(None, net.named_parameters)
    faults.record_nonfinite([torch.full((2,), torch.nan) for _ in params], params)
    assert "(0.weight, 1.weight, 2.weight and 3 more)" in str(faults.error(1))


def test_norms_of_an_offloaded_group() -> None:
    net = model()
    params = list(net.parameters())
    ids = {p: i for i, p in enumerate(params)}
    norms: dict[int, Any] = {0: 1.0, 1: torch.tensor(float("nan")), 4: float("inf")}
    optimizer = SimpleNamespace(norm_for_param_grads=norms, get_param_id=ids.__getitem__)
    faults = GradientFaults(optimizer, net.named_parameters)
    faults.record_nonfinite(params)
    assert "(1.weight, 4.weight)" in str(faults.error(1))


class Skips:
    """As ZeRO 1 and 2: a step that is not finite is skipped before any norm is computed."""

    cpu_offload = False

    def __init__(self, params: list[Any], gradients: list[Any]) -> None:
        self.params_in_partition = [params]
        self.averaged_gradients = {0: gradients}

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        return any(not g.isfinite().all() for g in self.averaged_gradients[0] if g is not None)


def test_a_step_that_deepspeed_skips_by_itself() -> None:
    net = model()
    optimizer: Any = Skips(list(net.parameters()), [None, *(torch.ones(2) for _ in range(5))])
    faults = GradientFaults(optimizer, net.named_parameters)
    assert not optimizer.has_overflow(partition_gradients=True)
    assert "weight" not in str(faults.error(1))
    optimizer.averaged_gradients[0][5][0] = torch.nan
    assert optimizer.has_overflow()
    assert "(5.weight)" in str(faults.error(1))
