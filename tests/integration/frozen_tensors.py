"""One rank of the test of tensors that an optimizer step does not train.

    python frozen_tensors.py ZERO_STAGE OUT

First steps of the real trainer on one model, each with another fault, at a learning rate that moves
no bf16 number, and a last one without a fault. Rank 0 writes {fault: the error's message or the
remarks} to OUT.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Sets the worker up, so it comes before everything that needs that.
import update_on_ranks as update

# isort: split
import torch

from sg_rlhf.overlay.reporting.errors import FrozenError

MICRO_BATCH = 2
LAYER = "model.layers.0"


def cut_off(model: Any, parameters: dict[str, Any], _strategy: Any) -> Callable[[], None]:
    """A module's output without its graph."""
    hook = model.get_submodule(f"{LAYER}.self_attn.v_proj").register_forward_hook(
        lambda _module, _inputs, output: output.detach()
    )
    return hook.remove


def nothing(*_: Any) -> Callable[[], None]:
    """A sane step."""
    return lambda: None


FAULTS = {"cut off": cut_off, "none": nothing}


def main(stage: int, out: Path) -> None:
    recipe, _ = update.cases()["grpo_sg"]
    args = update.arguments(recipe, [f"ds.zero_stage={stage}", "actor.adam.lr=1e-12"], MICRO_BATCH)
    strategy, actor, optimizer, scheduler = update.prepare(args)
    model = actor.model.module
    parameters = dict(model.named_parameters())
    rollout = update.rollout(actor)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = {}
    for name, fault in FAULTS.items():
        trainer = update.trainer_of(strategy, actor, optimizer, scheduler, MICRO_BATCH)
        undo = fault(model, parameters, strategy)
        for experience in rollout[rank::ranks]:
            trainer.replay_buffer.append(experience)
        remarks = io.StringIO()
        try:
            with contextlib.redirect_stdout(remarks):
                trainer.ppo_train(args.algo.kl.init_coef)
            found[name] = remarks.getvalue()
        except FrozenError as error:
            found[name] = str(error)
        undo()
    of_ranks: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(of_ranks, found)
    assert all(each == found for each in of_ranks), of_ranks
    if rank == 0:
        torch.save(found, out)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
