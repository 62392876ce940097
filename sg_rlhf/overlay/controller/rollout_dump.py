"""Write the experience of a rollout to a file, for ``sg-rlhf train --replay FILE``.

``sg.dump_rollout=STEP`` writes ``rollouts/step_STEP.pt`` in the run directory: the micro-batches
that the update of that rollout step receives. The file has plain tensors, lists and dicts, so
``torch.load(file, weights_only=True)`` reads it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import ray
import torch
from openrlhf.trainer.ppo_utils.experience import Experience, balance_experiences

from sg_rlhf.common.atomic_io import disk_full_context
from sg_rlhf.overlay.learner.micro_batches import IS_LAST_OF_STEP, is_balanced

FOLDER = "rollouts"
FIELDS = tuple(field.name for field in dataclasses.fields(Experience))


def dump(
    run_dir: Path,
    step: int,
    micro_batches: list[Any],
    ranks: int,
    reference: list[list[Any]] | None = None,
) -> Path:
    """Write a rollout.

    Args:
        run_dir: of the run.
        step: rollout step, from 1.
        micro_batches: experiences as they are sent to the ranks: all of the first rank, all of the
            second, and so on.
        ranks: of the policy, data-parallel.
        reference: pending log-probs of the reference model
            (:mod:`sg_rlhf.overlay.learner.overlapped_reference`), which are waited for; None if the
            micro-batches have them.

    Returns:
        The file.
    """
    rows = [{name: getattr(e, name) for name in FIELDS} for e in micro_batches]
    for row, experience in zip(rows, micro_batches, strict=True):
        row[IS_LAST_OF_STEP] = bool(getattr(experience, IS_LAST_OF_STEP, False))
    if reference is not None:
        # Per optimizer step and rank -> per rank, in the order of the micro-batches.
        in_steps = [ray.get(per_rank) for per_rank in reference]
        log_probs = [
            values
            for rank in range(len(in_steps[0]))
            for in_step in in_steps
            for values in in_step[rank]
        ]
        for row, values in zip(rows, log_probs, strict=True):
            row["base_action_log_probs"] = values
    file = run_dir / FOLDER / f"step_{step}.pt"
    with disk_full_context(file.parent):
        file.parent.mkdir(exist_ok=True)
        torch.save({"step": step, "ranks": ranks, "experiences": rows}, file)
    return file


def in_rank_order(micro_batches: list[Any], args: Any) -> list[Any]:
    """The micro-batches in the order in which they go to the ranks.

    Upstream distributes dynamic micro-batches itself; all others are in that order already.
    """
    if args.train.dynamic_batch_enable and not is_balanced(args):
        micro_batches = balance_experiences(micro_batches, args)
    return micro_batches


def experiences(rows: list[dict[str, Any]]) -> list[Any]:
    """The micro-batches of a dumped rollout, as they were sent to the ranks."""
    result = []
    for row in rows:
        fields = dict(row)
        is_last = fields.pop(IS_LAST_OF_STEP)
        experience = Experience(**fields)
        setattr(experience, IS_LAST_OF_STEP, is_last)
        result.append(experience)
    return result
