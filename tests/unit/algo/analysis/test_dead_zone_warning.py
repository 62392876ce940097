"""The library warns of a dead zone in the words that a run prints, once."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest

from sg_rlhf.algo.analysis.gradient_dead_zones import DeadZoneWarning, warn_once
from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.weightings import make_weighting
from sg_rlhf.config import load_config
from sg_rlhf.weights.describe import describe_loss
from tests.unit.algo.batches import random_batch

EPS = (0.2, 0.24)


@pytest.fixture(autouse=True)
def fresh() -> None:
    warn_once.cache_clear()


def told(*options: Any, times: int = 2, eps: tuple[float, float] = EPS) -> list[str]:
    """What is warned of by so many losses."""
    weighting = make_weighting(*options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(times):
            policy_loss(*random_batch(seed).tensors, LossSettings(weighting, *eps))
    assert all(warning.category is DeadZoneWarning for warning in caught)
    return [str(warning.message) for warning in caught]


def test_the_default_warns_once_in_the_words_of_a_run() -> None:
    (message,) = told("grpo_sg")
    assert "positive advantage and p > 0.211 has no policy gradient even on-policy" in message
    of_run = describe_loss(load_config(None, [])).split("DEAD ZONE: ")[1].split(" (docs")[0]
    assert of_run in message
    assert "placement='outside'" in message


def test_where_there_is_none_nothing_is_said() -> None:
    assert told("uniform") == []
    assert told("grpo_sg", {"placement": "outside"}) == []
    assert told("grpo_sg", {"upper": 1.2}) == []
    assert told("grpo_sg", eps=(0.2, 0.5)) == []


def test_each_sign_and_each_clip_is_said_once() -> None:
    wide = {"lower": 0.5, "upper": 1.5}
    assert len(told("grpo_sg", wide)) == 2
    assert told("grpo_sg", wide) == []
    assert len(told("grpo_sg", wide, eps=(0.2, 0.28))) == 2


def test_a_plain_script_shows_it() -> None:
    code = (
        "import torch; from sg_rlhf.algo.policy_loss import policy_loss;"
        "x = torch.full((1, 2), -0.1);"
        "[policy_loss(x, x, x, torch.ones(1, 2)) for _ in range(3)]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("DeadZoneWarning: dead zone of the weighting grpo_sg: ") == 1
