"""Nothing in the loss waits for the device: each wait would stall every micro-batch of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sg_rlhf.algo.kl import ESTIMATORS, kl_estimate
from sg_rlhf.algo.lopti import PASSES, in_pass
from sg_rlhf.algo.objectives import OBJECTIVES
from sg_rlhf.algo.parameters import ParameterError
from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.rollout_correction import RolloutCorrectionConfig, rollout_correction
from sg_rlhf.algo.token_weights import token_weights, weight_sum_and_count
from sg_rlhf.algo.weightings import WEIGHTINGS, TokenContext, Weighting, make_weighting, token_keys
from tests.unit.algo.host_reads import DEVICE, HostReadError, NoHostReads

EPS = (0.2, 0.24)
SHAPE = (3, 7)


def weightings() -> dict[str, Weighting]:
    """Each one as it is, and by what all of them share."""
    found = {}
    for name in WEIGHTINGS:
        found[name] = make_weighting(name)
        for more in (
            {"placement": "outside"},
            {"placement": "inside"},
            {"normalize": "batch_mean"},
            {"probability": "engine"},
        ):
            key, value = next(iter(more.items()))
            try:
                found[f"{name} {key}={value}"] = make_weighting(name, more)
            except ParameterError:
                continue  # it does not go with this weighting
    return found


ALL = weightings()
#: Every weighting with the published objective, and every objective with a few weightings.
PAIRS = [
    *((name, "ppo") for name in ALL),
    *((f"{name} placement=outside", "cispo") for name in ("random", "top_entropy", "ar")),
    *(("grpo_sg placement=outside", objective) for objective in OBJECTIVES),
]


def real(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(SHAPE, dtype=dtype, device=DEVICE)


def a_context(threshold: bool) -> TokenContext:
    tokens = torch.empty((SHAPE[0], SHAPE[1] + 1), dtype=torch.long, device=DEVICE)
    return TokenContext(
        entropy=real(),
        keys=token_keys(tokens, tokens),
        engine_log_probs=real(),
        entropy_threshold=1.0 if threshold else None,
        surprisal_cuts=torch.empty(2, device=DEVICE) if threshold else None,
    )


@pytest.mark.parametrize(("weighting", "objective"), PAIRS)
def test_the_loss_its_statistics_and_its_gradient(weighting: str, objective: str) -> None:
    cfg, dtype = ALL[weighting], torch.bfloat16
    log_probs = real(dtype).requires_grad_()
    mask, old = real().bool(), real(dtype)
    with NoHostReads():
        plain = LossSettings(cfg, *EPS, objective=objective)
        clipped = dataclasses.replace(plain, dual_clip=10.0, aggregation="seq-mean")
        part = {"coefficient": real(), "active": in_pass(old, 0.5, PASSES[0])}
        for settings, threshold, options in ((plain, False, {}), (clipped, True, part)):
            terms = policy_loss(
                log_probs, old, real(dtype), mask, settings, context=a_context(threshold), **options
            )
            terms.loss.backward()
            terms.statistics.mean("clip_ratio")
            weight_sum_and_count(
                log_probs,
                cfg,
                mask,
                context=dataclasses.replace(
                    a_context(threshold=True), old_log_probs=old, advantages=real(dtype), eps=EPS
                ),
            )
    assert log_probs.grad is not None and log_probs.grad.shape == SHAPE


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_kl(estimator: str, unbiased: bool) -> None:
    if estimator == "wk3_eq11" and unbiased:
        return  # refused
    log_probs = real().requires_grad_()
    with NoHostReads():
        weights = token_weights(log_probs, make_weighting("grpo_sg"))
        kl_estimate(
            log_probs, real(), weights, estimator, old_log_probs=real(), unbiased_gradient=unbiased
        ).sum().backward()


@pytest.mark.parametrize("gating", ["ratio", "binary_kl", "tv"])
@pytest.mark.parametrize("level", ["token", "seq"])
def test_the_correction(level: str, gating: str) -> None:
    low = 0.5 if gating == "ratio" else 0.0
    cfg = RolloutCorrectionConfig(level=level, gating=gating, threshold=(low, 5.0))
    with NoHostReads():
        rollout_correction(real(), real(), real().bool(), cfg)


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: float(x.sum()),
        lambda x: bool(x.sum() > 0),
        lambda x: x.sum().tolist(),
        lambda x: x[x > 0],
        lambda x: x.index_put((x > 0,), torch.zeros((), device=DEVICE)),
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 0),
        lambda x: torch.tensor(3.0, device=x.device) * x,
        lambda x: torch.tensor([1.0] * SHAPE[1], device=x.device) * x,
        lambda x: torch.ones(SHAPE).to(x.device) * x,
        lambda x: x.copy_(torch.ones(SHAPE)),
        lambda x: x.cpu(),
        lambda x: torch.equal(x, x),
        lambda x: [int(v) for v in x[0].long()],
    ],
)
def test_a_wait_is_found(waits: Callable[[Tensor], Any]) -> None:
    with NoHostReads(), pytest.raises((RuntimeError, NotImplementedError)) as found:
        waits(real())
    assert isinstance(found.value, HostReadError) or "meta" in str(found.value).lower()
