"""One rank of the test of a gradient that is not finite though the loss is.

    python non_finite_gradient.py ZERO_STAGE OUT

One optimizer step of the real trainer, then a second in whose backward the last rank alone gets a
NaN. Rank 0 writes {"stopped": each rank's message or None, "unharmed": whether every rank still has
the parameters of the first step, "trained": whether the first step changed them} to OUT.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# Sets the worker up, so it comes before everything that needs that.
import update_on_ranks as update

# isort: split
import torch

from sg_rlhf.overlay.reporting.errors import NonFiniteError

MICRO_BATCH = 2


def give_back_nan(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
    """A forward hook: the output stays, its gradient does not."""
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * float("nan"))


def main(stage: int, out: Path) -> None:
    recipe, _ = update.cases()["grpo_sg"]
    args = update.arguments(recipe, [f"ds.zero_stage={stage}", "actor.adam.lr=0.001"], MICRO_BATCH)
    strategy, actor, optimizer, scheduler = update.prepare(args)
    trainer = update.trainer_of(strategy, actor, optimizer, scheduler, MICRO_BATCH)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for experience in update.rollout(actor)[rank::ranks]:
        trainer.replay_buffer.append(experience)
    before = update.parameters(actor)
    trainer.ppo_train(args.algo.kl.init_coef)
    after = update.parameters(actor)
    if rank == ranks - 1:
        norm = actor.model.module.model.norm
        norm.register_forward_hook(give_back_nan)
    stopped = None
    try:
        trainer.ppo_train(args.algo.kl.init_coef)
    except NonFiniteError as error:
        stopped = str(error)
    unharmed = torch.equal(update.parameters(actor), after)
    found: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(found, (stopped, unharmed))
    if rank == 0:
        result = {
            "stopped": [message for message, _ in found],
            "unharmed": all(kept for _, kept in found),
            "trained": not torch.equal(before, after),
        }
        torch.save(result, out)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
