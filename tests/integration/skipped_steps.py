"""One rank of the test of optimizer steps that are skipped on all ranks.

    python skipped_steps.py ZERO_STAGE HOW OUT

HOW is `nan`: four rollouts of one optimizer step each, on a learning rate that falls from step to
step. In the second one advantage of the last rank's first micro-batch is NaN. In the third the
loss is finite and the last rank's backward gives NaN. After the fourth one whose loss is called not
finite though its gradient is, and NaN until the run stops.
Or `without`: what should be left of it, the first rollout and the fourth, each at its own rate.
Rank 0 writes what was found to OUT.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# Sets the worker up, so it comes before everything that needs that.
import update_on_ranks as update

# isort: split
import torch
from deepspeed.utils import safe_get_full_optimizer_state
from non_finite_gradient import MICRO_BATCH, give_back_nan

from sg_rlhf.overlay.learner import micro_batches, nonfinite

BOUND = nonfinite.MAX_IN_A_ROW = 2


class Run:
    """The real trainer and what is asked of it."""

    def __init__(self, stage: int) -> None:
        recipe, _ = update.cases()["grpo_sg"]
        self.args = update.arguments(
            recipe,
            [
                f"ds.zero_stage={stage}", "actor.adam.lr=0.001", "actor.adam.betas=[0.9,0.999]",
                "sg.on_nonfinite=skip",
            ],
            MICRO_BATCH,
        )  # fmt: skip
        parts = update.prepare(self.args, schedule="linear")
        self.actor, self.scheduler = parts[1], parts[3]
        self.trainer = update.trainer_of(*parts, MICRO_BATCH)
        self.rank = torch.distributed.get_rank()
        self.ranks = torch.distributed.get_world_size()
        self.rollout = update.rollout(self.actor)

    def train(self, with_nan: bool = False) -> dict[str, Any]:
        buffer = self.trainer.replay_buffer
        buffer.clear()
        for experience in self.rollout[self.rank :: self.ranks]:
            place = experience.index[0]
            experience.info = {micro_batches.SAMPLE_INDEX: torch.tensor([place])}
            experience.prompts = [f"prompt {place}"]
            buffer.append(experience)
            experience.index = [place]
        if with_nan and self.rank == self.ranks - 1:
            bad = buffer.items[0]
            bad.advantages = torch.full_like(bad.advantages, torch.nan)
        status: dict[str, Any] = self.trainer.ppo_train(self.args.algo.kl.init_coef)
        return status

    def state(self) -> torch.Tensor:
        """Parameters and both moments; below ZeRO 3 this rank's part of these."""
        parts = [update.parameters(self.actor)]
        states = self.actor.model.optimizer.optimizer.state.values()
        for name in ("exp_avg", "exp_avg_sq"):
            if self.args.ds.zero_stage < 3:
                found = [state[name] for state in states]
            else:  # a part is padded there with whatever was in that memory
                found = [
                    safe_get_full_optimizer_state(p, name) for p in self.actor.model.parameters()
                ]
            parts += [part.float().flatten() for part in found]
        return torch.cat(parts)

    def agree(self, found: Any) -> list[Any]:
        of_ranks: list[Any] = [None] * self.ranks
        torch.distributed.all_gather_object(of_ranks, found)
        return of_ranks


def with_nan(run: Run) -> dict[str, Any]:
    before = update.parameters(run.actor)
    run.train()
    first = run.state()
    skipped = [run.train(with_nan=True)]
    kept = [torch.equal(run.state(), first)]
    hook = None
    if run.rank == run.ranks - 1:
        norm = run.actor.model.module.model.norm
        hook = norm.register_forward_hook(give_back_nan)
    skipped.append(run.train())
    kept.append(torch.equal(run.state(), first))
    if hook is not None:
        hook.remove()
    applied = run.train()
    last = run.state()
    norm = run.actor.model.module.model.norm
    rows, finite_check = [], nonfinite.is_failed
    if run.rank == run.ranks - 1:
        # A loss that is not finite may have a gradient that is.
        nonfinite.is_failed = lambda loss: torch.ones_like(loss, dtype=torch.bool)
    rows.append(run.train()[nonfinite.ROWS])
    nonfinite.is_failed = finite_check
    norm.register_forward_hook(give_back_nan)
    rows += [run.train()[nonfinite.ROWS] for _ in range(BOUND - 1)]
    stopped = run.train()
    kept.append(torch.equal(run.state(), last))
    engine = run.actor.model
    return {
        "trained": not torch.equal(before, first[: len(before)]),
        "kept": [all(of_rank) for of_rank in zip(*run.agree(kept), strict=True)],
        "rows": run.agree([status[nonfinite.ROWS] for status in skipped]),
        "steps": [len(status["sg_optimizer_steps"]) for status in skipped],
        "figures": [status["policy_loss"] for status in skipped],
        "applied": applied["sg_optimizer_steps"],
        "state": last,
        "last": [(row["in_a_row"], row["cause"]) for of_rollout in rows for row in of_rollout],
        "stopped": run.agree(stopped[nonfinite.STOP]),
        "counts": [engine.global_steps, engine.skipped_steps, engine.micro_steps],
        "same_schedule": run.scheduler is engine.lr_scheduler,
    }


def without(run: Run) -> dict[str, Any]:
    run.train()
    for _ in range(2):  # the rates of the skipped steps
        run.scheduler.step()
    applied = run.train()
    return {"applied": applied["sg_optimizer_steps"], "state": run.state()}


def main(stage: int, how: str, out: Path) -> None:
    run = Run(stage)
    found = with_nan(run) if how == "nan" else without(run)
    if run.rank == 0:
        torch.save(found, out)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
