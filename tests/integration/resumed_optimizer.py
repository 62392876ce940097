"""One rank of the test of an optimizer that is saved asleep and loaded.

    python resumed_optimizer.py FOLDER OUT

One optimizer step, the states put to sleep (``ds.enable_sleep``), a checkpoint, another step; then
an engine of its own that loads the checkpoint, sleeps, wakes and makes that step too. Writes
{"kept", "loaded_by_upstream", "loaded": names of tensors in the optimizer's state, "bytes": of the
saved optimizer, "asleep": bytes of its moments and float32 parameters, "equal": whether both second
steps led to the same parameters, "moved": whether they changed any} to OUT.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# Sets the worker up, so it comes before everything that needs that.
import update_on_ranks as update

# isort: split
import torch
from openrlhf.utils.deepspeed import DeepspeedStrategy
from openrlhf.utils.deepspeed.deepspeed_utils import (
    offload_deepspeed_states,
    reload_deepspeed_states,
)

MICRO_BATCH = 4
TAG = "global_step1"


def names(engine: Any) -> list[str]:
    """Of the tensors that the optimizer keeps for its parameters."""
    states = engine.optimizer.optimizer.state.values()
    return sorted({key for state in states for key, kept in state.items() if torch.is_tensor(kept)})


def main(folder: Path, out: Path) -> None:
    recipe, _ = update.cases()["grpo_sg"]
    args = update.arguments(
        recipe, ["actor.adam.lr=0.001", "actor.adam.betas=[0.9,0.99]"], MICRO_BATCH
    )
    strategy, actor, optimizer, scheduler = update.prepare(args)
    experiences = update.rollout(actor)

    def step(actor: Any, optimizer: Any, scheduler: Any) -> torch.Tensor:
        trainer = update.trainer_of(strategy, actor, optimizer, scheduler, MICRO_BATCH)
        for experience in experiences:
            trainer.replay_buffer.append(experience)
        torch.manual_seed(0)
        trainer.ppo_train(args.algo.kl.init_coef)
        return update.parameters(actor)

    first = step(actor, optimizer, scheduler)
    offload_deepspeed_states(actor.model)
    found: dict[str, Any] = {"kept": names(actor.model)}
    strategy.save_ckpt(actor.model, str(folder), TAG)
    found["bytes"] = sum(path.stat().st_size for path in (folder / TAG).glob("*optim_states.pt"))
    found["asleep"] = 3 * 4 * first.numel()
    reload_deepspeed_states(actor.model)
    second = step(actor, optimizer, scheduler)

    _, actor, optimizer, scheduler = update.prepare(args)
    DeepspeedStrategy.load_ckpt(strategy, actor.model, str(folder))
    found["loaded_by_upstream"] = names(actor.model)
    strategy.load_ckpt(actor.model, str(folder))
    found["loaded"] = names(actor.model)
    offload_deepspeed_states(actor.model)
    found["asleep_again"] = names(actor.model)
    reload_deepspeed_states(actor.model)
    resumed = step(actor, optimizer, scheduler)
    found |= {"equal": torch.equal(resumed, second), "moved": not torch.equal(first, second)}
    torch.save(found, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
