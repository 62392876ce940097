"""The code in README.md does what README says of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from sg_rlhf.algo.policy_loss import sg_policy_loss
from sg_rlhf.algo.weightings import make_weighting

ROOT = Path(__file__).parents[3]
METHOD, OWN_TRAINER = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
)


def a_batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    old = -3 * torch.rand(4, 9, dtype=torch.float64)
    return {
        "log_probs": (old + 0.3 * torch.randn_like(old)).clamp(max=0.0).requires_grad_(),
        "old_log_probs": old,
        "advantages": torch.randn(4, 1, dtype=torch.float64).expand(4, 9),
        "response_mask": (torch.arange(9) < torch.tensor([[9], [4], [7], [1]])).double(),
    }


def test_the_method_in_a_few_lines_is_the_loss_that_trains() -> None:
    names: dict[str, Any] = {}
    exec(METHOD, names)
    shown, real = a_batch(), a_batch()
    loss = names["grpo_sg_loss"](**shown)
    expected, _ = sg_policy_loss(**real, cfg=make_weighting("grpo_sg"), eps_low=0.2, eps_high=0.24)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(shown["log_probs"].grad, real["log_probs"].grad)


def test_the_loss_in_ones_own_trainer_runs() -> None:
    names: dict[str, Any] = dict(a_batch())
    exec(OWN_TRAINER, names)
    assert names["log_probs"].grad.abs().sum() > 0
    assert "weight_mean" in names["metrics"]
