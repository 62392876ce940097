"""docs/other_trainers.md: other trainers' keys, and a torch loop that is one optimizer step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from sg_rlhf.algo.advantages import group_advantages
from sg_rlhf.algo.policy_loss import policy_loss
from sg_rlhf.config.old_names import ours

PAGE = Path(__file__).parents[3] / "docs" / "other_trainers.md"


def test_the_loop_gives_the_gradient_of_the_whole_batch() -> None:
    block = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    torch.manual_seed(0)
    table = torch.nn.Embedding(11, 11)
    sequences, rewards = torch.randint(0, 11, (12, 6)), torch.rand(3, 4)
    mask = torch.ones(12, 5)
    mask[0, 2:] = 0

    def policy(sequences: torch.Tensor) -> torch.Tensor:
        log_p = table(sequences[:, :-1]).log_softmax(-1)
        return log_p.gather(-1, sequences[:, 1:, None])[..., 0]

    old_log_probs = policy(sequences).detach()
    advantages = group_advantages(rewards).flatten()
    loss = policy_loss(policy(sequences), old_log_probs, advantages, mask).loss
    (expected,) = torch.autograd.grad(loss, table.weight)
    scope: dict[str, Any] = {
        "rewards": rewards, "sequences": sequences, "old_log_probs": old_log_probs, "mask": mask,
        "policy": policy, "micro_batches": torch.arange(12).split(5),
        "optimizer": torch.optim.SGD(table.parameters(), lr=0.1),
    }  # fmt: skip
    exec(block, scope)
    assert table.weight.grad is not None
    torch.testing.assert_close(table.weight.grad, expected)


def test_the_keys_of_other_trainers_are_answered_with_ours() -> None:
    """The table agrees with the hint for an unknown key."""
    table = PAGE.read_text().partition("| setting | verl | TRL | here |")[2].partition("\n\n")[0]
    rows = [line.split("|")[2:5] for line in table.splitlines() if line.startswith("| ")]
    checked = 0
    for *theirs, here in rows[1:]:
        (key,) = re.findall(r"`([\w.]+)`", here)
        for name in re.findall(r"`([\w.]+)`", "".join(theirs)):
            assert key in ours(name), name
            checked += 1
    assert checked > 15
