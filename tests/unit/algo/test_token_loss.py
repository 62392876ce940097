"""The loss for a training loop of your own, and the example that uses it."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor

import sg_rlhf.algo
from sg_rlhf.algo.aggregation import aggregate, prompt_token_counts
from sg_rlhf.algo.objectives import make_objective
from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.weightings import WEIGHTINGS, make_weighting
from tests.unit.algo.batches import PUBLISHED, Batch, random_batch

# -- The settings; the mean over prompts is Eq. 5's ---------------------------------------------


EPS = (0.2, 0.24)
# Two prompts of three responses and one of two; a prompt's responses need not be neighbours.
PROMPTS = torch.tensor([7, 3, 7, 3, 3, 9, 7, 9])


def value_and_gradient(loss: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    (gradient,) = torch.autograd.grad(loss, batch.log_probs, retain_graph=True)
    return loss.detach(), gradient


def prompt_mean(batch: Batch, prompts: Tensor) -> Tensor:
    counts = prompt_token_counts(batch.mask, prompts)
    settings = LossSettings(PUBLISHED, aggregation="prompt-mean")
    return policy_loss(*batch.tensors, settings, prompt_tokens=counts).loss


def assert_same_bits(loss: Tensor, expected: Tensor, batch: Batch) -> None:
    ours, theirs = value_and_gradient(loss, batch), value_and_gradient(expected, batch)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("objective", ["ppo", "cispo", "aspo", "sapo", "dppo_tv", "dppo_kl", "ipo"])
def test_names_stand_for_default_parameters(objective: str) -> None:
    batch = random_batch(2)
    placement = {} if objective == "ppo" else {"placement": "outside"}
    weighting = make_weighting("grpo_sg", placement)
    expected = policy_loss(*batch.tensors, LossSettings(weighting, *EPS, objective=objective)).loss
    built = LossSettings(weighting, objective=make_objective(objective))
    assert_same_bits(policy_loss(*batch.tensors, built).loss, expected, batch)
    if objective == "ppo":
        assert_same_bits(policy_loss(*batch.tensors).loss, expected, batch)


@pytest.mark.parametrize("name", sorted(WEIGHTINGS))
def test_every_weighting_that_reads_nothing_more_goes_by_its_name(name: str) -> None:
    batch = random_batch(3)
    known = {"old_log_probs", "advantages", "eps"}
    if not set(make_weighting(name).reads) <= known:
        with pytest.raises(ValueError, match=name):
            policy_loss(*batch.tensors, LossSettings(name))
        return
    assert torch.isfinite(policy_loss(*batch.tensors, LossSettings(name)).loss)


def test_one_advantage_per_response_is_that_of_each_of_its_tokens() -> None:
    batch = random_batch(4)
    per_response = batch.advantages[:, 0]
    spread = batch.with_(advantages=per_response[:, None].expand_as(batch.mask).contiguous())
    one = policy_loss(batch.log_probs, batch.old_log_probs, per_response, batch.mask).loss
    assert_same_bits(one, policy_loss(*spread.tensors).loss, batch)


def test_prompt_mean_is_the_mean_of_the_prompts_token_means() -> None:
    batch = random_batch(5)
    loss = prompt_mean(batch, PROMPTS)
    alone = [
        policy_loss(*(x[prompt == PROMPTS] for x in batch.tensors)).loss
        for prompt in (3, 7, 9)
    ]  # fmt: skip
    ours, expected = value_and_gradient(loss, batch), value_and_gradient(sum(alone) / 3, batch)  # type: ignore[arg-type]
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-15)
    assert (ours[0] - value_and_gradient(policy_loss(*batch.tensors).loss, batch)[0]).abs() > 1e-3


def test_prompt_mean_of_one_prompt_is_the_token_mean() -> None:
    batch = random_batch(6, empty_row=False)
    prompts = torch.zeros(8, dtype=torch.long)
    loss = prompt_mean(batch, prompts)
    torch.testing.assert_close(loss, policy_loss(*batch.tensors).loss, rtol=1e-12, atol=0)


def test_a_prompt_without_tokens_is_no_prompt() -> None:
    batch = random_batch(7)
    mask = batch.mask.clone()
    mask[PROMPTS == 9] = False
    batch, kept = batch.with_(mask=mask), PROMPTS != 9
    loss = prompt_mean(batch, PROMPTS)
    alone = prompt_mean(Batch(*(x[kept] for x in batch.tensors)), PROMPTS[kept])
    torch.testing.assert_close(loss, alone, rtol=1e-12, atol=0)
    nothing = aggregate(
        torch.ones(2, 3),
        torch.zeros(2, 3),
        "prompt-mean",
        prompt_tokens=torch.zeros(2, dtype=torch.long),
    )
    assert nothing.item() == 0.0


def test_shards_that_split_a_prompt_add_up() -> None:
    batch = random_batch(9)
    counts = prompt_token_counts(batch.mask, PROMPTS)
    whole = aggregate(batch.advantages, batch.mask, "prompt-mean", prompt_tokens=counts)
    parts = [
        aggregate(
            batch.advantages[rows], batch.mask[rows], "prompt-mean",
            total=3, prompt_tokens=counts[rows],
        )
        for rows in (slice(0, 3), slice(3, 8))
    ]  # fmt: skip
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=0)


def test_loss_before_the_aggregation_is_what_is_aggregated() -> None:
    batch = random_batch(10)
    terms = policy_loss(*batch.tensors, LossSettings(PUBLISHED, *EPS))
    assert torch.equal(aggregate(terms.loss_BT, batch.mask), terms.loss)
    assert (terms.loss_BT[~batch.mask] == 0).all()
    spoiled = batch.with_(advantages=batch.advantages.masked_fill(~batch.mask, torch.nan))
    assert torch.equal(
        policy_loss(*spoiled.tensors, LossSettings(PUBLISHED, *EPS)).loss_BT, terms.loss_BT
    )


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="aggregation='mean': expected one of token-mean"):
        LossSettings(aggregation="mean")
    with pytest.raises(ValueError, match="expected prompt_tokens, got None"):
        policy_loss(*random_batch(11).tensors, LossSettings(aggregation="prompt-mean"))
    with pytest.raises(ValueError, match="'outside' with cispo"):
        LossSettings(objective="cispo")


# -- The example in ``sg_rlhf.algo`` runs as it stands and moves the policy ----------------------


EXAMPLE_PROMPTS, GROUP, LENGTH, VOCABULARY = 3, 4, 5, 11


def test_the_example_is_an_update() -> None:
    assert sg_rlhf.algo.__doc__ is not None
    after = sg_rlhf.algo.__doc__.split("::\n\n", 1)[1]
    block = after[: after.index("\n``log_probs")]
    torch.manual_seed(0)
    table = torch.nn.Embedding(VOCABULARY, VOCABULARY)
    sequences = torch.randint(0, VOCABULARY, (EXAMPLE_PROMPTS * GROUP, LENGTH + 1))

    def policy(sequences: torch.Tensor) -> torch.Tensor:
        log_p = table(sequences[:, :-1]).log_softmax(-1)
        return log_p.gather(-1, sequences[:, 1:, None])[..., 0]

    old_log_probs = policy(sequences).detach()
    response_mask = torch.ones_like(old_log_probs)
    response_mask[0, 2:] = 0
    scope: dict[str, Any] = {
        "policy": policy, "sequences": sequences, "old_log_probs": old_log_probs,
        "ref_log_probs": old_log_probs - 0.1, "response_mask": response_mask,
        "rewards_BG": torch.rand(EXAMPLE_PROMPTS, GROUP),
        "optimizer": torch.optim.SGD(table.parameters(), lr=0.1),
    }  # fmt: skip
    before = table.weight.detach().clone()
    exec(textwrap.dedent(block), scope)
    assert not torch.equal(table.weight, before) and torch.isfinite(table.weight).all()
    assert 1.0 <= scope["metrics"]["weight_mean"] <= 1.4
