"""Stage a: ``sg_rlhf.algo`` on the device gives what it gives on the CPU, and nobody waits.

Every weighting with every objective that takes it, and every KL estimator: loss, gradient and
statistics of a random batch. A token whose value lies at a clip's bound, to rounding, may be cut
on one device and not on the other; such tokens are counted and limited, all others must agree.

The host must not wait for the device inside the loss: ``torch.cuda.set_sync_debug_mode("error")``
makes each wait an exception.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sg_rlhf.algo.advantages import group_advantages
from sg_rlhf.algo.kl import ESTIMATORS, kl_estimate
from sg_rlhf.algo.objectives import OBJECTIVES, check_objective, make_objective
from sg_rlhf.algo.parameters import ParameterError
from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.rollout_correction import RolloutCorrectionConfig, rollout_correction
from sg_rlhf.algo.token_weights import token_weights
from sg_rlhf.algo.weightings import WEIGHTINGS, TokenContext, Weighting, make_weighting, token_keys
from tests.gpu.measure import costs, largest
from tests.gpu.result import Job, Record

EPS = (0.2, 0.24)


@dataclass(frozen=True)
class Tolerance:
    """relative: of a token's gradient, or the loss to the mean |A|. at_bounds: share of tokens
    that may fall on the other side of a bound."""

    relative: float
    at_bounds: float


TOLERANCES = {
    torch.float64: Tolerance(1e-11, 0.0),
    torch.float32: Tolerance(2e-5, 5e-4),
    # A few units of its last place; upstream's log-probs are float32, so no run depends on it.
    torch.bfloat16: Tolerance(2.0**-6, 1e-2),
}


@dataclass(frozen=True)
class Batch:
    """Of one dtype; all [B, T] but the sequences [B, T + 1]."""

    log_probs: Tensor
    old_log_probs: Tensor
    ref_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    entropy: Tensor
    engine_log_probs: Tensor
    sequences: Tensor

    def to(self, device: str) -> Batch:
        moved = {name: value.to(device) for name, value in vars(self).items()}
        return Batch(**moved)

    def context(self) -> TokenContext:
        return TokenContext(
            entropy=self.entropy,
            engine_log_probs=self.engine_log_probs,
            keys=token_keys(self.sequences, torch.ones_like(self.sequences)),
            advantages=self.advantages,
            old_log_probs=self.old_log_probs,
            eps=EPS,
        )


def random_batch(rows: int, tokens: int, dtype: torch.dtype, seed: int) -> Batch:
    """Ragged responses, one of them empty, ratios on both sides of the clip, A of every sign."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, tokens, generator=generator, dtype=torch.float64)

    def near(log_probs: Tensor, by: float) -> Tensor:
        # Well below 0: at p = 1 itself a rounding error decides what a divergence is.
        return (log_probs + by * normal()).clamp(max=-0.01)

    log_probs = -(normal().abs() * 1.5 + 0.01)
    advantages = normal()
    advantages[torch.rand(rows, tokens, generator=generator) < 0.1] = 0.0
    lengths = torch.randint(1, tokens + 1, (rows, 1), generator=generator)
    lengths[rows // 2] = 0
    return Batch(
        log_probs=log_probs.to(dtype),
        old_log_probs=near(log_probs, 0.4).to(dtype),
        ref_log_probs=near(log_probs, 0.3).to(dtype),
        advantages=advantages.to(dtype),
        mask=torch.arange(tokens) < lengths,
        entropy=torch.rand(rows, tokens, generator=generator, dtype=torch.float64).float(),
        engine_log_probs=near(log_probs, 0.1).float(),
        sequences=torch.randint(0, 50_000, (rows, tokens + 1), generator=generator),
    )


def weightings() -> dict[str, Weighting]:
    """Each as it is, and by what all of them share."""
    found = {}
    for name in WEIGHTINGS:
        found[name] = make_weighting(name)
        for key, value in (
            ("placement", "outside"),
            ("normalize", "batch_mean"),
            ("probability", "engine"),
        ):
            with contextlib.suppress(ParameterError):  # it does not go with this weighting
                found[f"{name}, {key} {value}"] = make_weighting(name, {key: value})
    return found


def pairs() -> Iterator[tuple[str, Weighting, str]]:
    """(name of the weighting, it, name of the objective) that go together."""
    for name, weighting in weightings().items():
        for objective in OBJECTIVES:
            with contextlib.suppress(ParameterError):
                check_objective(make_objective(objective), weighting)
                yield name, weighting, objective


def loss_of(
    batch: Batch, weighting: Weighting, objective: str, *, dual_clip: float | None = None
) -> Any:
    """(leaf, terms) of a batch."""
    leaf = batch.log_probs.clone().requires_grad_()
    terms = policy_loss(
        leaf, batch.old_log_probs, batch.advantages, batch.mask,
        LossSettings(weighting, *EPS, dual_clip, objective), context=batch.context(),
    )  # fmt: skip
    return leaf, terms


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss, leaf)[0]


class Worst:
    """The largest of a figure over cases, and which case it was."""

    def __init__(self) -> None:
        self.value: float = 0.0
        self.case: str | None = None

    def take(self, value: float, case: str) -> None:
        if not value <= self.value:
            self.value, self.case = value, case

    def check(self, record: Record, name: str, limit: float) -> None:
        record.within(name, self.value, limit, self.case)


def differing(found: Tensor, expected: Tensor, relative: float) -> int:
    """Entries that differ by more than ``relative`` of themselves and of the largest."""
    found, expected = found.cpu().double(), expected.double()
    room = relative * (expected.abs() + expected.abs().max())
    return int((~((found - expected).abs() <= room)).sum())


def compare_losses(record: Record, job: Job, dtype: torch.dtype, rows: int, tokens: int) -> None:
    """Losses, gradients and statistics of every pair."""
    tolerance = TOLERANCES[dtype]
    here = random_batch(rows, tokens, dtype, seed=0)
    there = here.to(job.device)
    valid = int(here.mask.sum())
    scale = float(here.advantages.double().abs().mean())
    losses, gradients, sums, cases = Worst(), Worst(), Worst(), 0
    for name, weighting, objective in pairs():
        for dual_clip in (None, 3.0):
            case = f"{name}, {objective}, dual clip {dual_clip}"
            leaf, terms = loss_of(here, weighting, objective, dual_clip=dual_clip)
            leaf_there, terms_there = loss_of(there, weighting, objective, dual_clip=dual_clip)
            expected = gradient(terms.loss, leaf)
            found = gradient(terms_there.loss, leaf_there)
            crossed = differing(found, expected, tolerance.relative)
            gradients.take(crossed / valid, case)
            # A token at a bound of a mask moves a sum by itself.
            room = 10 * crossed / valid
            off = abs(float(terms_there.loss.detach()) - float(terms.loss.detach())) / scale - room
            losses.take(off, case)
            expected_sums, found_sums = terms.statistics.sums, terms_there.statistics.sums.cpu()
            allowed = expected_sums.abs() + valid
            share = ((found_sums - expected_sums).abs() / allowed).max()
            sums.take(float(share) - room, case)
            cases += 1
    kind = str(dtype).removeprefix("torch.")
    gradients.check(record, f"{kind}: share of tokens with another gradient", tolerance.at_bounds)
    losses.check(record, f"{kind}: loss, relative to mean |A|", tolerance.relative)
    # Counts in whole tokens: in bfloat16 many lie exactly at a bound.
    limit = 2e-2 if dtype == torch.bfloat16 else max(1e-9, 2 * tolerance.at_bounds)
    sums.check(record, f"{kind}: sums of the statistics, relative", limit)
    record.figure(f"cases_{kind}", cases)


def compare_kl(record: Record, job: Job, dtype: torch.dtype, rows: int, tokens: int) -> None:
    """Every estimator with every weighting's weights."""
    tolerance = TOLERANCES[dtype]
    here = random_batch(rows, tokens, dtype, seed=1)
    there = here.to(job.device)
    values, gradients, cases = Worst(), Worst(), 0
    for name, weighting in weightings().items():
        for estimator in ESTIMATORS:
            for unbiased in (False, True):
                if estimator == "wk3_eq11" and (unbiased or weighting.bounds()[0] <= 0):
                    continue  # refused, or the logarithm of a weight of 0
                case = f"{name}, {estimator}, unbiased gradient {unbiased}"
                both = []
                for batch in (here, there):
                    leaf = batch.log_probs.clone().requires_grad_()
                    weights = token_weights(leaf, weighting, batch.mask, context=batch.context())
                    kl = kl_estimate(
                        leaf, batch.ref_log_probs, weights, estimator,
                        old_log_probs=batch.old_log_probs, unbiased_gradient=unbiased,
                    )  # fmt: skip
                    both.append((kl.detach(), gradient(kl.sum(), leaf)))
                (value, slope), (value_there, slope_there) = both
                values.take(differing(value_there, value, tolerance.relative) / value.numel(), case)
                gradients.take(
                    differing(slope_there, slope, tolerance.relative) / value.numel(), case
                )
                cases += 1
    kind = str(dtype).removeprefix("torch.")
    values.check(record, f"{kind}: share of tokens with another KL", tolerance.at_bounds)
    gradients.check(record, f"{kind}: share with another KL gradient", tolerance.at_bounds)
    record.figure(f"kl_cases_{kind}", cases)


def compare_the_rest(record: Record, job: Job, rows: int, tokens: int) -> None:
    """Advantages, keys, the rollout correction."""
    here = random_batch(rows, tokens, torch.float32, seed=2)
    there = here.to(job.device)
    keys, keys_there = here.context().keys, there.context().keys
    assert keys is not None and keys_there is not None
    record.check("token keys are equal", torch.equal(keys, keys_there.cpu()))
    for std in ("sample", "population"):
        found = group_advantages(there.advantages, std)
        difference = largest(found, group_advantages(here.advantages, std))
        record.within(f"group advantages, {std} std", difference, 1e-5)
    for level in ("token", "seq"):
        cfg = RolloutCorrectionConfig(level=level)
        both = [
            rollout_correction(b.old_log_probs, b.engine_log_probs, b.mask, cfg)
            for b in (here, there)
        ]
        (expected, _), (found, metrics) = both
        assert expected is not None and found is not None
        share = differing(
            found.masked_fill(~there.mask, 0), expected.masked_fill(~here.mask, 0), 2e-5
        )
        record.within(f"rollout correction by {level}", share / found.numel(), 5e-4)
        record.check(f"vllm_kl by {level} is finite", bool(torch.isfinite(metrics["vllm_kl"])))


def no_waits(record: Record, job: Job, rows: int, tokens: int) -> None:
    """No operation of the loss synchronises."""
    name = "no host synchronisation inside the loss and the KL"
    if not job.on_cuda:
        record.skip(name, "asks CUDA; without it tests/unit/algo/test_no_host_reads.py does")
        return
    batch = random_batch(rows, tokens, torch.float32, seed=3).to("cuda")
    everything = list(pairs())
    waiting: list[str] = []

    def each() -> None:
        for label, weighting, objective in everything:
            try:
                leaf, terms = loss_of(batch, weighting, objective, dual_clip=10.0)
                weights = token_weights(leaf, weighting, batch.mask, context=batch.context())
                kl = kl_estimate(leaf, batch.ref_log_probs, weights, "wk3")
                (terms.loss + kl.masked_fill(~batch.mask, 0.0).sum()).backward()
                terms.statistics.mean("clip_ratio")
            except RuntimeError as error:
                if "synchroniz" not in str(error):
                    raise
                waiting.append(f"{label}, {objective}")

    each()  # kernels are loaded at their first use
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        try:
            batch.mask.sum().item()
            control = False
        except RuntimeError:
            control = True
        each()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    record.check("control: a wait on purpose is noticed", control)
    record.check(
        name, not waiting, ", ".join(sorted(set(waiting)))[:300] or f"{len(everything)} ran"
    )


def time_of_the_loss(record: Record, job: Job, rows: int, tokens: int) -> None:
    """What the weights cost beside the same loss with w = 1."""
    batch = random_batch(rows, tokens, torch.float32, seed=4).to(job.device)

    def of(weighting: Weighting) -> Any:
        def call() -> None:
            loss_of(batch, weighting, "ppo", dual_clip=10.0)[1].loss.backward()

        return call

    found = costs(
        {"uniform": of(make_weighting("uniform")), "grpo_sg": of(make_weighting("grpo_sg"))},
        job.device,
        repeats=5 if job.small else 30,
    )
    for name, cost in found.items():
        record.figure(f"loss_ms_{name}_{rows}x{tokens}", cost.milliseconds)
        record.figure(f"loss_peak_bytes_{name}_{rows}x{tokens}", cost.peak_bytes)


def run(record: Record, job: Job) -> None:
    """Every dtype, then the waits, then the time."""
    rows, tokens = (4, 33) if job.small else (16, 512)
    dtypes = [torch.float32] if job.small else list(TOLERANCES)
    for dtype in dtypes:
        compare_losses(record, job, dtype, rows, tokens)
        compare_kl(record, job, dtype, rows, tokens)
    compare_the_rest(record, job, rows, tokens)
    no_waits(record, job, rows, tokens)
    time_of_the_loss(record, job, *((4, 64) if job.small else (8, 4096)))
