"""The example in ``sg_rlhf.algo`` runs as it stands and moves the policy."""

from __future__ import annotations

import textwrap
from typing import Any

import torch

import sg_rlhf.algo

PROMPTS, GROUP, LENGTH, VOCABULARY = 3, 4, 5, 11


def test_the_example_is_an_update() -> None:
    assert sg_rlhf.algo.__doc__ is not None
    after = sg_rlhf.algo.__doc__.split("::\n\n", 1)[1]
    block = after[: after.index("\n``log_probs")]
    torch.manual_seed(0)
    table = torch.nn.Embedding(VOCABULARY, VOCABULARY)
    sequences = torch.randint(0, VOCABULARY, (PROMPTS * GROUP, LENGTH + 1))

    def policy(sequences: torch.Tensor) -> torch.Tensor:
        log_p = table(sequences[:, :-1]).log_softmax(-1)
        return log_p.gather(-1, sequences[:, 1:, None])[..., 0]

    old_log_probs = policy(sequences).detach()
    response_mask = torch.ones_like(old_log_probs)
    response_mask[0, 2:] = 0
    scope: dict[str, Any] = {
        "policy": policy, "sequences": sequences, "old_log_probs": old_log_probs,
        "ref_log_probs": old_log_probs - 0.1, "response_mask": response_mask,
        "rewards_BG": torch.rand(PROMPTS, GROUP),
        "optimizer": torch.optim.SGD(table.parameters(), lr=0.1),
    }  # fmt: skip
    before = table.weight.detach().clone()
    exec(textwrap.dedent(block), scope)
    assert not torch.equal(table.weight, before) and torch.isfinite(table.weight).all()
    assert 1.0 <= scope["metrics"]["weight_mean"] <= 1.4
