"""The verdict on what the ranks found of each tensor in the first optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from sg_rlhf.overlay.learner.parameter_update_check import (
    NON_ZERO,
    OWNED,
    RAN,
    REACHED,
    TAKEN,
    UNLIKE,
    evaluate,
    of_optimizer,
)
from sg_rlhf.overlay.reporting.errors import FrozenError, RunStopped


def found(*columns: int) -> list[bool]:
    return [place in columns for place in range(6)]


SANE = found(RAN, REACHED, NON_ZERO, OWNED, TAKEN)


def test_a_sane_step_says_nothing() -> None:
    assert evaluate(["a", "b"], [SANE, SANE]) == []


@pytest.mark.parametrize(
    ("columns", "remark"),
    [
        ((RAN, REACHED, OWNED), "a gradient of exactly zero: b"),  # LoRA's A
        ((OWNED,), "its module did not run: b"),  # an expert without a token
    ],
)
def test_what_a_sane_run_may_have_is_a_remark(columns: tuple[int, ...], remark: str) -> None:
    assert evaluate(["a", "b"], [SANE, found(*columns)]) == [remark]


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ((RAN, OWNED), "no gradient comes back to b;"),
        ((RAN, OWNED, TAKEN), "no gradient comes back to b;"),  # decay moves it none the less
        ((RAN, REACHED, NON_ZERO), "the optimizer has no part of b;"),
        ((RAN, REACHED, NON_ZERO, OWNED), "lost before the optimizer's state of b;"),
        ((RAN, REACHED, NON_ZERO, OWNED, TAKEN, UNLIKE), "have the optimizer's numbers of b;"),
    ],
)
def test_a_fault_stops_the_run_with_the_name(columns: tuple[int, ...], line: str) -> None:
    with pytest.raises(FrozenError) as error:
        evaluate(["a", "b"], [SANE, found(*columns)])
    assert "did not train 1 of 2 tensors: " in str(error.value) and line in str(error.value)
    assert isinstance(error.value, RunStopped)


def test_hundreds_of_names_stay_one_line() -> None:
    names = [f"layer{i}" for i in range(417)]
    with pytest.raises(FrozenError) as error:
        evaluate(names, [SANE] * 27 + [found(RAN, OWNED)] * 390)
    assert "did not train 390 of 417 tensors" in str(error.value)
    assert "layer34 and 382 more;" in str(error.value) and "\n" not in str(error.value)


@pytest.fixture
def second_of_two_ranks() -> Iterator[None]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("numbers", "real"), [(5, 2), (4, 1), (3, 0)])
def test_the_padding_of_a_partition_is_not_looked_at(
    second_of_two_ranks: None, numbers: int, real: int
) -> None:
    """ZeRO-3 leaves in it what was in the memory."""
    master = torch.full((3,), torch.nan)
    master[:real] = 1.0
    moment = torch.full((3,), torch.nan)
    moment[:real] = 0.0
    parameter = SimpleNamespace(
        ds_id=0, ds_numel=numbers, ds_process_group=None, ds_tensor=master.bfloat16()
    )
    optimizer = SimpleNamespace(
        grad_position={0: [0, 0, 3]}, get_param_id=lambda _: 0,
        fp32_partitioned_groups_flat=[master],
        optimizer=SimpleNamespace(state={master: {"exp_avg": moment}}),
    )  # fmt: skip
    assert of_optimizer(parameter, optimizer) == (real > 0, False, False)
    if real:
        parameter.ds_tensor[0] += 1
        assert of_optimizer(parameter, optimizer) == (True, False, True)
