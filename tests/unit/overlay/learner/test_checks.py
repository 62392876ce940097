"""The checks of a run: one policy, and what the ranks saw of each tensor."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from sg_rlhf.config import ConfigError, load_config
from sg_rlhf.overlay.driver.arguments import (
    UsageError,
    upstream_arguments,
)
from sg_rlhf.overlay.learner.gradient_checks import (
    TensorReport,
    evaluate,
    is_in_optimizer,
)
from sg_rlhf.overlay.reporting.errors import FrozenError, RunStopped

# -- Settings that would make two policies of one, engine's and trainer's, are refused by name ---


RECIPE = "configs/kk/grpo_sg_tiny_cpu.yaml"


def parsed(*overrides: str) -> object:
    return upstream_arguments(load_config([RECIPE], list(overrides)))


def test_a_nucleus_is_refused() -> None:
    with pytest.raises(UsageError) as error:
        parsed("rollout.top_p=0.9")
    assert str(error.value) == (
        "rollout.top_p=0.9: the engine would renormalise, and the trainer's log-probs would not "
        "match; set it to 1"
    )
    assert parsed("rollout.top_p=1")


def test_an_evaluation_set_is_as_cold_as_it_says() -> None:
    sets = 'sg.eval_sets=[{{"name": "a", "dataset": "b", "temperature": {}}}]'
    for given in (0, 0.01, 1):
        load_config([RECIPE], ["eval.dataset=null", sets.format(given)])
    with pytest.raises(ConfigError, match=r"set it to 0, or to 0\.01 or more"):
        load_config([RECIPE], ["eval.dataset=null", sets.format(0.001)])


# -- The check of what the ranks saw of each tensor in the first optimizer step ------------------


SANE = TensorReport(True, True, True, True)


def test_a_sane_step_says_nothing() -> None:
    assert evaluate(["a", "b"], [SANE, SANE]) == []


@pytest.mark.parametrize(
    ("report", "remark"),
    [
        (SANE._replace(non_zero_grad=False), "a gradient of exactly zero: b"),  # LoRA's A
        (TensorReport(in_optimizer=True), "its module did not run: b"),  # an expert without a token
    ],
)
def test_what_a_sane_run_may_have_is_a_remark(report: TensorReport, remark: str) -> None:
    assert evaluate(["a", "b"], [SANE, report]) == [remark]


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (TensorReport(forward_ran=True, in_optimizer=True), "no gradient comes back to b;"),
        (SANE._replace(in_optimizer=False), "the optimizer has no part of b;"),
    ],
)
def test_a_fault_stops_the_run_with_the_name(report: TensorReport, line: str) -> None:
    with pytest.raises(FrozenError) as error:
        evaluate(["a", "b"], [SANE, report])
    assert "did not train 1 of 2 tensors: " in str(error.value) and line in str(error.value)
    assert isinstance(error.value, RunStopped)


def test_hundreds_of_names_stay_one_line() -> None:
    names = [f"layer{i}" for i in range(417)]
    cut_off = TensorReport(forward_ran=True, in_optimizer=True)
    with pytest.raises(FrozenError) as error:
        evaluate(names, [SANE] * 27 + [cut_off] * 390)
    assert "did not train 390 of 417 tensors" in str(error.value)
    assert "layer34 and 382 more;" in str(error.value) and "\n" not in str(error.value)


@pytest.fixture
def second_of_two_ranks() -> Iterator[None]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("numbers", "owned"), [(5, True), (4, True), (3, False)])
def test_the_padding_of_a_partition_is_no_part_of_a_tensor(
    second_of_two_ranks: None, numbers: int, owned: bool
) -> None:
    parameter = SimpleNamespace(ds_id=0, ds_numel=numbers, ds_process_group=None)
    optimizer = SimpleNamespace(grad_position={0: [0, 0, 3]}, get_param_id=lambda _: 0)
    assert is_in_optimizer(parameter, optimizer) is owned
    optimizer.grad_position = {}
    assert not is_in_optimizer(parameter, optimizer)
