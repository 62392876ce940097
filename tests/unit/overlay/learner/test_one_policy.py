"""Settings that would make two policies of one, engine's and trainer's, are refused by name."""

from __future__ import annotations

import pytest

from sg_rlhf.config import ConfigError, load_config
from sg_rlhf.overlay.cpu import platform
from sg_rlhf.overlay.driver.arguments import (
    UnsupportedHere,
    UsageError,
    check_platform,
    upstream_arguments,
)

RECIPE = "configs/kk/grpo_sg_tiny_cpu.yaml"


def parsed(*overrides: str) -> object:
    return upstream_arguments(load_config([RECIPE], list(overrides)))


def test_a_nucleus_is_refused_unless_it_is_asked_for() -> None:
    with pytest.raises(UsageError) as error:
        parsed("rollout.top_p=0.9")
    assert str(error.value) == (
        "rollout.top_p=0.9: the engine would renormalise, and the trainer's log-probs would not "
        "match; set it to 1, or sg.truncated_sampling=keep"
    )
    assert parsed("rollout.top_p=0.9", "sg.truncated_sampling=keep")
    assert parsed("rollout.top_p=1")


def test_an_evaluation_set_is_as_cold_as_it_says() -> None:
    sets = 'sg.eval_sets=[{{"name": "a", "dataset": "b", "temperature": {}}}]'
    for given in (0, 0.01, 1):
        load_config([RECIPE], ["eval.dataset=null", sets.format(given)])
    with pytest.raises(ConfigError, match=r"set it to 0, or to 0\.01 or more"):
        load_config([RECIPE], ["eval.dataset=null", sets.format(0.001)])


def test_batch_invariant_kernels_need_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    args = parsed("sg.batch_invariant=true")
    monkeypatch.setenv(platform.PLATFORM_VARIABLE, "cpu")
    with pytest.raises(UnsupportedHere, match=r"sg\.batch_invariant=true: vLLM has such kern"):
        check_platform(args)
