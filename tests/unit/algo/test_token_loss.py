"""The loss for a training loop of your own, and the example that uses it."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor

import sg_rlhf.algo
from sg_rlhf.algo.aggregation import aggregate, prompt_token_counts
from sg_rlhf.algo.policy_loss import policy_loss_terms, sg_policy_loss, token_loss
from sg_rlhf.algo.weightings import WEIGHTINGS, Weighting, make_weighting
from tests.unit.algo.batches import PUBLISHED, WIDE, Batch, random_batch

# -- ``token_loss`` is the loss of ``policy_loss_terms``; the mean over prompts is Eq. 5's -------


EPS = (0.2, 0.24)
# Two prompts of three responses and one of two; a prompt's responses need not be neighbours.
PROMPTS = torch.tensor([7, 3, 7, 3, 3, 9, 7, 9])


def value_and_gradient(loss: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    (gradient,) = torch.autograd.grad(loss, batch.log_probs, retain_graph=True)
    return loss.detach(), gradient


def assert_same_bits(loss: Tensor, expected: Tensor, batch: Batch) -> None:
    ours, theirs = value_and_gradient(loss, batch), value_and_gradient(expected, batch)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean"])
@pytest.mark.parametrize("weighting", [PUBLISHED, WIDE])
def test_it_is_the_loss_of_policy_loss_terms_bit_for_bit(
    weighting: Weighting, aggregation: str, dtype: torch.dtype
) -> None:
    batch = random_batch(1, dtype=dtype)
    expected, _ = sg_policy_loss(
        *batch.tensors, weighting, *EPS, 10.0, token_level_loss=aggregation == "token-mean"
    )
    loss = token_loss(*batch.tensors, weighting, dual_clip=10.0, aggregation=aggregation)
    assert_same_bits(loss, expected, batch)


@pytest.mark.parametrize("objective", ["ppo", "cispo", "aspo", "sapo", "dppo_tv", "dppo_kl", "ipo"])
def test_names_stand_for_default_parameters(objective: str) -> None:
    batch = random_batch(2)
    placement = {} if objective == "ppo" else {"placement": "outside"}
    weighting = make_weighting("grpo_sg", placement)
    expected = policy_loss_terms(*batch.tensors, weighting, *EPS, objective=objective).loss
    assert_same_bits(token_loss(*batch.tensors, weighting, objective=objective), expected, batch)
    if objective == "ppo":
        assert_same_bits(token_loss(*batch.tensors), expected, batch)


@pytest.mark.parametrize("name", sorted(WEIGHTINGS))
def test_every_weighting_that_reads_nothing_more_goes_by_its_name(name: str) -> None:
    batch = random_batch(3)
    known = {"old_log_probs", "advantages", "eps"}
    if not set(make_weighting(name).reads) <= known:
        with pytest.raises(ValueError, match=name):
            token_loss(*batch.tensors, name)
        return
    assert torch.isfinite(token_loss(*batch.tensors, name))


def test_one_advantage_per_response_is_that_of_each_of_its_tokens() -> None:
    batch = random_batch(4)
    per_response = batch.advantages[:, 0]
    spread = batch.with_(advantages=per_response[:, None].expand_as(batch.mask).contiguous())
    one = token_loss(batch.log_probs, batch.old_log_probs, per_response, batch.mask)
    assert_same_bits(one, token_loss(*spread.tensors), batch)


def test_prompt_mean_is_the_mean_of_the_prompts_token_means() -> None:
    batch = random_batch(5)
    loss = token_loss(*batch.tensors, PUBLISHED, aggregation="prompt-mean", prompts=PROMPTS)
    alone = [
        policy_loss_terms(
            *(x[prompt == PROMPTS] for x in batch.tensors), PUBLISHED, *EPS
        ).loss
        for prompt in (3, 7, 9)
    ]  # fmt: skip
    ours, expected = value_and_gradient(loss, batch), value_and_gradient(sum(alone) / 3, batch)  # type: ignore[arg-type]
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-15)
    assert (ours[0] - value_and_gradient(token_loss(*batch.tensors), batch)[0]).abs() > 1e-3


def test_prompt_mean_of_one_prompt_is_the_token_mean() -> None:
    batch = random_batch(6, empty_row=False)
    prompts = torch.zeros(8, dtype=torch.long)
    loss = token_loss(*batch.tensors, aggregation="prompt-mean", prompts=prompts)
    torch.testing.assert_close(loss, token_loss(*batch.tensors), rtol=1e-12, atol=0)


def test_a_prompt_without_tokens_is_no_prompt() -> None:
    batch = random_batch(7)
    mask = batch.mask.clone()
    mask[PROMPTS == 9] = False
    tensors = batch.with_(mask=mask).tensors
    kept = PROMPTS != 9
    loss = token_loss(*tensors, aggregation="prompt-mean", prompts=PROMPTS)
    alone = token_loss(
        *(x[kept] for x in tensors), aggregation="prompt-mean", prompts=PROMPTS[kept]
    )
    torch.testing.assert_close(loss, alone, rtol=1e-12, atol=0)
    nothing = aggregate(
        torch.ones(2, 3), torch.zeros(2, 3), prompt_tokens_B=torch.zeros(2, dtype=torch.long)
    )
    assert nothing.item() == 0.0


@pytest.mark.parametrize(
    ("aggregation", "total"), [("token-mean", None), ("seq-mean", None), ("prompt-mean", 3)]
)
def test_micro_batches_add_up_to_the_batch(aggregation: str, total: int | None) -> None:
    batch = random_batch(8, empty_row=False)
    options: dict[str, Any] = {"aggregation": aggregation}
    if aggregation == "prompt-mean":
        whole = token_loss(*batch.tensors, prompts=PROMPTS, **options)
        parts = [PROMPTS == 7, PROMPTS != 7]
    else:
        whole = token_loss(*batch.tensors, **options)
        parts = [torch.arange(8) < 3, torch.arange(8) >= 3]
        total = int(batch.mask.sum()) if aggregation == "token-mean" else 8
    losses = [
        token_loss(*(x[part] for x in batch.tensors), total=total, prompts=PROMPTS[part], **options)
        for part in parts
    ]
    ours, expected = value_and_gradient(sum(losses), batch), value_and_gradient(whole, batch)  # type: ignore[arg-type]
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-15)


def test_shards_that_split_a_prompt_add_up_too() -> None:
    batch = random_batch(9)
    counts = prompt_token_counts(batch.mask, PROMPTS)
    whole = aggregate(batch.advantages, batch.mask, prompt_tokens_B=counts)
    parts = [
        aggregate(
            batch.advantages[rows], batch.mask[rows], prompt_tokens_B=counts[rows],
            global_batch_size=3, dp_size=2,
        )
        for rows in (slice(0, 3), slice(3, 8))
    ]  # fmt: skip
    torch.testing.assert_close(torch.stack(parts).mean(), whole, rtol=1e-12, atol=0)


def test_loss_before_the_aggregation_is_what_is_aggregated() -> None:
    batch = random_batch(10)
    terms = policy_loss_terms(*batch.tensors, PUBLISHED, *EPS)
    assert torch.equal(aggregate(terms.loss_BT, batch.mask), terms.loss)
    assert (terms.loss_BT[~batch.mask] == 0).all()
    spoiled = batch.with_(advantages=batch.advantages.masked_fill(~batch.mask, torch.nan))
    assert torch.equal(policy_loss_terms(*spoiled.tensors, PUBLISHED, *EPS).loss_BT, terms.loss_BT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregation": "mean"}, "aggregation='mean': expected one of token-mean, seq-mean"),
        ({"aggregation": "prompt-mean"}, "expected prompts, got None"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_loss(*random_batch(11).tensors, **options)


def test_the_package_offers_it() -> None:
    assert sg_rlhf.algo.token_loss is token_loss
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        sg_rlhf.algo.other  # type: ignore[attr-defined]  # noqa: B018


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
