"""The policy for values that are not finite: the run stops, or leaves them out and counts them.

With ``sg.on_nonfinite=stop`` :func:`check_samples` and :func:`check_finite` raise before the
update, and :class:`LossCheck` before the optimizer step. With ``skip``:

- A sample whose reward or log-prob is not finite is masked before the update. It stays in its
  batch, so that shapes stay. A reward that is not finite masks its whole group, whose mean and
  standard deviation it spoils; a log-prob masks its response alone, whose reward still counts.
- An optimizer step whose loss or gradient is not finite on any rank is skipped on all ranks, by
  DeepSpeed (:class:`RankSkips`). One more in a row than ``MAX_IN_A_ROW`` stops the run.

Each skipped step and each cause of masked samples is a row of ``nonfinite.jsonl``:

==================  ================================================================
``optimizer_step``  number in the run; null for samples that were masked
``cause``           "the policy loss", "the gradient", "reward", "log-probs of ..."
``message``         details in one line
``prompts``         indices in the rollout; all of the step's where only the gradient is known
``in_a_row``        of a step: how many were skipped up to this one
``left_out``        of samples: how many were masked
==================  ================================================================
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from sg_rlhf.algo.nonfinite import mean_of_finite, rows_not_finite
from sg_rlhf.overlay.checkpoints import consensus
from sg_rlhf.overlay.learner import gradient_checks, micro_batches
from sg_rlhf.overlay.reporting.errors import NonFiniteError
from sg_rlhf.run_dir import jsonl_log

if TYPE_CHECKING:
    from sg_rlhf.overlay.learner.policy_loss import MicroBatchLoss

T = TypeVar("T")
#: In a rank's status: rows of ``nonfinite.jsonl``, and why the run stops.
ROWS, STOP = "sg_nonfinite", "sg_stop"
REWARD = "reward"
SKIPPED_STEPS, MASKED_SAMPLES = "nonfinite/skipped_steps", "nonfinite/samples"
#: Optimizer steps in a row that may be skipped; one more stops the run.
MAX_IN_A_ROW = 3


#: Cause -> field of an experience. The first cause of a sample is the one that is logged.
_FIELDS = {
    REWARD: "rewards",
    "log-probs of the policy": "action_log_probs",
    "log-probs of the reference model": "base_action_log_probs",
    "the KL to the reference model": "kl",
    "log-probs of the rollout engine": "rollout_log_probs",
}


def check_samples(
    experiences: list[Experience], group: int, on_nonfinite: str
) -> list[dict[str, Any]]:
    """Stop (NonFiniteError), or mask the samples that are not finite, before advantages; in place.

    A reward that is not finite becomes the mean of the finite ones, which keeps the rollout's mean.
    """
    masked: set[int] = set()
    rows = []
    for cause, name in _FIELDS.items():
        bad = {i for e in experiences for i in _check(e, cause, name, on_nonfinite)} - masked
        if not bad:
            continue
        prompts = {i // group for i in bad}
        added = bad
        if cause == REWARD:
            added = {prompt * group + i for prompt in prompts for i in range(group)}
        masked |= added
        message = f"{len(bad)} responses have a value that is not finite"
        rows.append(masked_row(cause, message, prompts, len(added)))
    if masked:
        mean = mean_of_finite(torch.cat([e.rewards.flatten() for e in experiences]))
        for experience in experiences:
            is_masked = torch.tensor([i in masked for i in experience.index])
            _mask_samples(experience, is_masked, mean)
    return rows


def _check(experience: Experience, cause: str, name: str, on_nonfinite: str) -> list[int]:
    """Indices of the samples that are not finite in a field."""
    values = getattr(experience, name)
    if values is None:
        return []
    mask_BT = None if name == "rewards" else experience.action_mask
    if on_nonfinite == "stop":
        check_finite(cause, values, mask_BT, experience.prompts)
    return list(itertools.compress(experience.index, rows_not_finite(values, mask_BT).tolist()))


def _mask_samples(experience: Experience, rows: Tensor, mean_reward: float) -> None:
    """Mask B samples where ``rows`` [B] is true, and replace what is not finite; in place.

    Upstream multiplies values by the mask, and NaN times 0 is NaN.
    """
    if not rows.any():
        return
    for field in fields(Experience):
        value = getattr(experience, field.name)
        if not torch.is_tensor(value):
            continue
        if field.name == "action_mask":
            value = value.masked_fill(rows[:, None], 0)
        elif Experience.is_step_tensor_field(field.name) and value.is_floating_point():
            value = value.masked_fill(rows[:, None], 0.0)
        elif Experience.is_episode_tensor_field(field.name):
            value = _finite_or(mean_reward if field.name == "rewards" else 0.0, value)
        setattr(experience, field.name, value)
    for key, value in experience.info.items():
        if torch.is_tensor(value):
            experience.info[key] = _finite_or(mean_reward if key == "reward" else 0.0, value)


def _finite_or(default: float, values: Tensor) -> Tensor:
    if not values.is_floating_point():
        return values
    return torch.where(torch.isfinite(values), values, default)


def check_finite(
    cause: str, values: Tensor, mask_BT: Tensor | None, prompts: Sequence[str]
) -> None:
    """NonFiniteError unless values [B, T] with a mask, or [B] or [B, 1] without, are finite."""
    bad = rows_not_finite(values, mask_BT).tolist()
    if any(bad):
        prompt = next(itertools.compress(prompts, bad), "")
        raise NonFiniteError(
            f"{sum(bad)} of {len(bad)} responses: the {cause.removeprefix('the ')} are not finite "
            f"before the update (prompt: {prompt[-200:]!r}); nothing was trained on them"
        )


def is_failed(loss: Tensor) -> Tensor:
    """Whether a loss is not finite: a bool scalar on its device."""
    return ~torch.isfinite(loss)


@dataclass(frozen=True)
class _Evidence:
    """A micro-batch, until its optimizer step has been checked; tensors [B, T]."""

    samples: list[Experience]
    prompts: list[str]
    loss: Tensor
    log_probs_BT: Tensor
    old_log_probs_BT: Tensor
    advantages_BT: Tensor
    mask_BT: Tensor


class LossCheck:
    """Finds the micro-batches of an optimizer step whose policy loss is not finite."""

    def __init__(self) -> None:
        self._micro_batches: list[_Evidence] = []

    def add(self, samples: list[Experience], output: MicroBatchLoss, batch: Experience) -> Tensor:
        """Add a micro-batch; whether its policy loss is not finite, as a bool scalar on the device.

        A log-prob that is not finite makes the loss so too: its ratio to itself is NaN.
        """
        evidence = _Evidence(
            samples,
            batch.prompts,
            output.policy_loss,
            output.log_probs_BT,
            output.old_log_probs_BT,
            batch.advantages,
            batch.action_mask,
        )
        self._micro_batches.append(evidence)
        return is_failed(output.policy_loss)

    def finish(self, failed: Sequence[bool], step: int, skips: RankSkips | None) -> None:
        """Raise NonFiniteError, or report to ``skips``, if one failed; forget the micro-batches."""
        micro_batches, self._micro_batches = self._micro_batches, []
        for evidence in itertools.compress(micro_batches, failed):
            message = (
                f"policy loss {float(evidence.loss)} before optimizer step {step}: "
                f"{_describe(evidence)}; nothing was trained on it"
            )
            if skips is None:
                raise NonFiniteError(message)
            values = (evidence.log_probs_BT, evidence.old_log_probs_BT, evidence.advantages_BT)
            bad = [rows_not_finite(of, evidence.mask_BT) for of in values]
            skips.report_loss(message, evidence.samples, torch.stack(bad).any(0).tolist())


def _describe(evidence: _Evidence) -> str:
    valid = evidence.mask_BT.bool()
    if not bool(valid.any()):
        return "no token of the optimizer step takes part in it"
    counts = {
        name: int((~torch.isfinite(values[valid])).sum())
        for name, values in (
            ("log_probs", evidence.log_probs_BT),
            ("old log_probs", evidence.old_log_probs_BT),
            ("advantages", evidence.advantages_BT),
        )
    }
    listed = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    bad = rows_not_finite(evidence.log_probs_BT, evidence.mask_BT).tolist()
    prompt = next(itertools.compress(evidence.prompts, bad), None)
    return (
        f"of {int(valid.sum())} tokens not finite are {listed or 'none (an overflow in the loss)'}"
        f"{f' (prompt: {prompt[-200:]!r})' if prompt is not None else ''}"
    )


class TooManySkips(Exception):
    """Ends the update on every rank; the controller stops the run with its message."""


def masked_row(cause: str, message: str, prompts: Iterable[int], count: int) -> dict[str, Any]:
    """The row of samples that were masked before the update for one cause."""
    return {
        "optimizer_step": None,
        "cause": cause,
        "message": message,
        "prompts": sorted({*prompts}),
        "left_out": count,
    }


def collect_rows(status: dict[str, Any], masked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Collect the rollout's rows of ``nonfinite.jsonl``, and count them in the status."""
    rows = [*masked, *status.pop(ROWS, [])]
    status[SKIPPED_STEPS] = float(sum(row.get("optimizer_step") is not None for row in rows))
    status[MASKED_SAMPLES] = float(sum(row.get("left_out", 0) for row in rows))
    return rows


class RankSkips:
    """Makes DeepSpeed skip a step whose loss is not finite, and logs the steps that it skips.

    A loss that is not finite may have a finite gradient, and the other ranks do not know of it. So
    the gradient is made NaN: DeepSpeed's reduction carries it to all ranks. There are two ways,
    because neither covers all steps. :meth:`spoil_loss` multiplies the loss by NaN, which needs a
    response token. :meth:`spoil_gradients_of` needs a trained layer below the output head.

    A skipped step counts in the engine's steps. DeepSpeed does not move the learning rate's
    schedule then; here it moves, so that every later step has its planned rate.
    """

    def __init__(
        self, args: Namespace, faults: gradient_checks.GradientFaults, scheduler: LRScheduler
    ) -> None:
        self._faults, self._scheduler = faults, scheduler
        self._group_size = args.rollout.n_samples_per_prompt
        self._has_loss_scale = args.ds.param_dtype == "fp16"
        self._failed: Tensor | None = None  # whether the present micro-batch's loss is not finite
        self._in_a_row = 0
        self._step_prompts: list[int] = []
        self._suspects: list[int] = []
        self._messages: list[str] = []
        self._masked: list[int] = []
        self._rows: list[dict[str, Any]] = []

    def _prompts_of(self, samples: Iterable[Experience]) -> list[int]:
        indices = [int(sample.info[micro_batches.SAMPLE_INDEX]) for sample in samples]
        return [index // self._group_size for index in indices]

    def spoil_loss(self, loss: Tensor, failed: Tensor, samples: list[Experience]) -> Tensor:
        """The loss of a micro-batch, or NaN if it failed (a bool scalar); before backward."""
        self._failed = failed
        self._step_prompts += self._prompts_of(samples)
        return loss * torch.where(failed, torch.nan, 1.0)

    def spoil_gradients_of(self, model: torch.nn.Module) -> None:
        """Give the layers below the output head a NaN gradient where the loss is not finite.

        If all tokens of a step are masked, the loss is 0/0, but no log-prob connects it to them.
        """

        def spoiled(gradient: Tensor) -> Tensor:
            failed = self._failed
            return gradient if failed is None else gradient.masked_fill(failed, torch.nan)

        def watch(_head: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if torch.is_tensor(inputs[0]) and inputs[0].requires_grad:
                inputs[0].register_hook(spoiled)  # type: ignore[no-untyped-call]

        head = getattr(model, "get_output_embeddings", lambda: None)()
        if head is not None:
            head.register_forward_pre_hook(watch)

    def report_loss(self, message: str, samples: list[Experience], rows: Sequence[bool]) -> None:
        """Record a micro-batch that failed; ``rows``: which samples are not finite, if any."""
        self._messages.append(message)
        self._suspects += self._prompts_of(itertools.compress(samples, rows)) or self._prompts_of(
            samples
        )

    def mask_sample(self, item: Experience) -> None:
        """Mask a sample of the replay buffer whose log-probs are not finite."""
        item.action_mask = torch.zeros_like(item.action_mask)
        item.action_log_probs = torch.zeros_like(item.action_log_probs)
        self._masked.append(int(item.info[micro_batches.SAMPLE_INDEX]))

    def after_step(self, step: int, applied: bool) -> bool:
        """Log an optimizer step that was skipped; every rank must call it. Raises TooManySkips.

        Returns whether it was skipped for a number that is not finite. With fp16 DeepSpeed also
        skips steps to find its loss scale.
        """
        local = (self._messages, self._suspects, self._step_prompts)
        self._messages, self._suspects, self._step_prompts = [], [], []
        if not applied:
            per_rank = consensus.all_gather_objects(local)
            messages, suspects, prompts = map(_joined, zip(*per_rank, strict=True))
            if messages or not self._has_loss_scale:
                self._in_a_row += 1
                self._scheduler.step()
                self._log_step(step, messages, suspects if messages else prompts)
                return True
        self._in_a_row = 0
        return False

    def _log_step(self, step: int, messages: list[str], prompts: list[int]) -> None:
        gradient_message = str(self._faults.error(step))
        message = messages[0] if messages else gradient_message
        row = {
            "optimizer_step": step,
            "cause": "the policy loss" if messages else "the gradient",
            "message": message,
            "prompts": sorted({*prompts}),
            "in_a_row": self._in_a_row,
        }
        self._rows.append(row)
        if self._in_a_row > MAX_IN_A_ROW:
            raise TooManySkips(
                f"{message}; {MAX_IN_A_ROW} optimizer steps in a row were skipped before it "
                f"(their prompts: {jsonl_log.NONFINITE})"
            )

    def pop_rows(self) -> dict[str, Any]:
        """The rows of the update on all ranks; every rank must call it."""
        rows, self._rows = self._rows, []
        masked = {*_joined(consensus.all_gather_objects(self._masked))}
        self._masked = []
        if masked:
            prompts = {index // self._group_size for index in masked}
            message = f"{len(masked)} responses have a log-prob that is not finite"
            rows = [masked_row("log-probs of the policy", message, prompts, len(masked)), *rows]
        return {ROWS: rows}


def _joined(lists: Iterable[list[T]]) -> list[T]:
    return [item for items in lists for item in items]
