"""Skips non-finite samples and optimizer steps (``sg.on_nonfinite=skip``).

Three levels:

- a sample whose reward or log-prob is not finite before the update is masked
  (:mod:`sg_rlhf.overlay.learner.sample_mask`);
- an optimizer step whose loss or gradient is not finite on any rank is skipped on all ranks, by
  DeepSpeed (:class:`RankSkips`);
- more skipped steps in a row than ``sg.max_nonfinite`` stop the run.

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

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from sg_rlhf.overlay.learner import gradient_check, micro_batches
from sg_rlhf.run_dir import jsonl_log

#: In a rank's status: rows of ``nonfinite.jsonl``, and why the run stops.
ROWS, STOP = "sg_nonfinite", "sg_stop"
SKIPPED_STEPS, MASKED_SAMPLES = "nonfinite/skipped_steps", "nonfinite/samples"


class TooManySkips(Exception):
    """Ends the update on every rank; the controller stops the run with its message."""


def masked_row(cause: str, message: str, prompts: Iterable[int], count: int) -> dict[str, Any]:
    """The row of samples that were masked before the update for one cause.

    Args:
        cause: name of the values that are not finite.
        message: details in one line.
        prompts: indices of the prompts that have such a sample.
        count: samples that were masked.
    """
    return {
        "optimizer_step": None,
        "cause": cause,
        "message": message,
        "prompts": sorted({*prompts}),
        "left_out": count,
    }


def collect_rows(status: dict[str, Any], masked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Collect the rollout's rows of ``nonfinite.jsonl``, and count them in the status.

    Args:
        status: of the ranks' update; :data:`ROWS` is removed, the metrics ``nonfinite/...`` added.
        masked: the rows of the samples that were masked before it.
    """
    rows = [*masked, *status.pop(ROWS, [])]
    status[SKIPPED_STEPS] = float(sum(row.get("optimizer_step") is not None for row in rows))
    status[MASKED_SAMPLES] = float(sum(row.get("left_out", 0) for row in rows))
    return rows


class RankSkips:
    """Makes DeepSpeed skip a step whose loss is not finite, and logs the steps that it skips.

    A loss that is not finite may have a finite gradient, and the other ranks do not know of it. So
    the gradient is made NaN: DeepSpeed's reduction carries it to all ranks, and all skip. There are
    two ways, because neither covers all steps. The update multiplies the loss by NaN, which needs a
    response token. :meth:`spoil_gradients_of` needs a trained layer below the output head.

    A skipped step counts in the engine's steps. DeepSpeed does not move the learning rate's
    schedule then; here it moves, so that every later step has its planned rate.

    Args:
        args: upstream's nested namespace with ``sg``.
        faults: names the gradients that are not finite.
        scheduler: of the learning rate.

    Attributes:
        loss_failed: whether the loss of the present micro-batch was not finite.
    """

    def __init__(self, args: Any, faults: gradient_check.GradientFaults, scheduler: Any) -> None:
        self._faults, self._scheduler = faults, scheduler
        self._group_size = args.rollout.n_samples_per_prompt
        self._max_in_a_row = args.sg.max_nonfinite
        self._has_loss_scale = args.ds.param_dtype == "fp16"
        self.loss_failed = False
        self._in_a_row = 0
        self._prompts: list[int] = []
        self._step_prompts: list[int] = []
        self._suspects: list[int] = []
        self._messages: list[str] = []
        self._masked: list[int] = []
        self._rows: list[dict[str, Any]] = []

    def begin(self, indices: Iterable[Any]) -> None:
        """Start a micro-batch.

        Args:
            indices: of its samples in the rollout.
        """
        self._prompts = [int(index) // self._group_size for index in indices]
        self._step_prompts += self._prompts
        self.loss_failed = False

    def spoil_gradients_of(self, model: torch.nn.Module) -> None:
        """Give the layers below the output head a NaN gradient while ``loss_failed``.

        Needed if all tokens of a step are masked. Then the loss is 0/0, but no log-prob connects it
        to the layers.

        Args:
            model: of the policy, with an output head; without one this does nothing.
        """

        def spoiled(gradient: torch.Tensor) -> torch.Tensor:
            return torch.full_like(gradient, torch.nan) if self.loss_failed else gradient

        def watch(_head: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
            if torch.is_tensor(inputs[0]) and inputs[0].requires_grad:
                inputs[0].register_hook(spoiled)

        head = getattr(model, "get_output_embeddings", lambda: None)()
        if head is not None:
            head.register_forward_pre_hook(watch)

    def report_loss(self, message: str, rows: Sequence[bool]) -> None:
        """Skip the present optimizer step, as the loss of a micro-batch is not finite.

        Args:
            message: details in one line.
            rows: of each of the B samples, whether one of its numbers is not finite. If none is,
                all samples are suspects.
        """
        self.loss_failed = True
        self._messages.append(message)
        bad = [prompt for prompt, is_bad in zip(self._prompts, rows, strict=False) if is_bad]
        self._suspects += bad or self._prompts

    def mask_sample(self, item: Any) -> None:
        """Mask a sample of the replay buffer whose log-probs are not finite."""
        item.action_mask = torch.zeros_like(item.action_mask)
        item.action_log_probs = torch.zeros_like(item.action_log_probs)
        self._masked.append(int(item.info[micro_batches.SAMPLE_INDEX]))

    def after_step(self, step: int, applied: bool) -> bool:
        """Log an optimizer step that was skipped; every rank must call it.

        Args:
            step: its number in the run.
            applied: whether DeepSpeed took it; the same on all ranks.

        Returns:
            Whether it was skipped for a number that is not finite. With fp16 DeepSpeed also skips
            steps to find its loss scale.

        Raises:
            TooManySkips: one more in a row than ``sg.max_nonfinite``.
        """
        local = (self._messages, self._suspects, self._step_prompts)
        self._messages, self._suspects, self._step_prompts = [], [], []
        if not applied:
            per_rank = gradient_check.all_gather_objects(local)
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
        if self._in_a_row > self._max_in_a_row:
            raise TooManySkips(
                f"{message}; {self._max_in_a_row} optimizer steps in a row were skipped before it "
                f"(sg.max_nonfinite={self._max_in_a_row}; their prompts: {jsonl_log.NONFINITE})"
            )

    def pop_rows(self) -> dict[str, Any]:
        """The rows of the update on all ranks; every rank must call it."""
        rows, self._rows = self._rows, []
        masked = {*_joined(gradient_check.all_gather_objects(self._masked))}
        self._masked = []
        if masked:
            prompts = {index // self._group_size for index in masked}
            message = f"{len(masked)} responses have a log-prob that is not finite"
            rows = [masked_row("log-probs of the policy", message, prompts, len(masked)), *rows]
        return {ROWS: rows}


def _joined(lists: Iterable[list[Any]]) -> list[Any]:
    return [item for items in lists for item in items]
