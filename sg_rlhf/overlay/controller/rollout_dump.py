"""Write the experience of a rollout to a file, and train on it again without engines.

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
from openrlhf.trainer.ppo_utils.experience import Experience

from sg_rlhf.common.atomic_io import disk_full_context
from sg_rlhf.overlay.learner.micro_batches import IS_LAST_OF_STEP

FOLDER = "rollouts"
FIELDS = tuple(field.name for field in dataclasses.fields(Experience))


def dump(
    run_dir: Path, step: int, experiences: list[Any], reference: list[list[Any]] | None = None
) -> Path:
    """Write a rollout.

    Args:
        run_dir: of the run.
        step: rollout step, from 1.
        experiences: micro-batches as they are sent to the ranks: all of the first rank, all of the
            second, and so on.
        reference: pending log-probs of the reference model
            (:mod:`sg_rlhf.overlay.learner.overlapped_reference`), which are waited for; None if the
            experiences have them.

    Returns:
        The file.
    """
    rows = [{name: getattr(e, name) for name in FIELDS} for e in experiences]
    for row, experience in zip(rows, experiences, strict=True):
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
        torch.save({"step": step, "experiences": rows}, file)
    return file


def load(file: str | Path) -> list[Any]:
    """The micro-batches of a dumped rollout, as they were sent to the ranks."""
    experiences = []
    for row in torch.load(file, weights_only=True)["experiences"]:
        is_last = row.pop(IS_LAST_OF_STEP)
        experience = Experience(**row)
        setattr(experience, IS_LAST_OF_STEP, is_last)
        experiences.append(experience)
    return experiences


def replay(
    file: str | Path, trainer: Any, kl_coefficient: float, rank: int = 0, ranks: int = 1
) -> dict[str, Any]:
    """Train on a dumped rollout: one update, without an engine.

    Each rank of the policy calls it, with as many ranks as the run had. The update and its metrics
    are those of the run if the policy has the same weights.

    Args:
        file: of :func:`dump`.
        trainer: the rank's :class:`sg_rlhf.overlay.learner.update.SGActorPPOTrainer`.
        kl_coefficient: of the KL loss, ``algo.kl.init_coef``.
        rank: of the policy's data-parallel ranks.
        ranks: how many there are.

    Returns:
        Metrics of the update, with a row per optimizer step in ``sg_optimizer_steps``.
    """
    experiences = load(file)
    per_rank = len(experiences) // ranks
    trainer.replay_buffer.clear()
    for experience in experiences[rank * per_rank : (rank + 1) * per_rank]:
        trainer.replay_buffer.append(experience)
    metrics: dict[str, Any] = trainer.ppo_train(kl_coefficient)
    trainer.replay_buffer.clear()
    return metrics
