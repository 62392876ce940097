"""One rank of the test of frozen parameters: LoRA under ZeRO-3, with and without recomputation.

    python lora_on_ranks.py OUT

Two updates of the real trainer each. No parameter is small enough to stay gathered and none is kept
for its next use, as in a large model. Rank 0 writes {case: {moment: names of the frozen parameters
that are gathered then}} to OUT.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# Sets the worker up, so it comes before everything that needs that.
import update_on_ranks as update

# isort: split
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

MICRO_BATCH = 2
RELEASED_AT_ONCE = {
    "stage3_param_persistence_threshold": 0,
    "stage3_model_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 0,
}
CASES: dict[str, dict[str, bool] | None] = {
    "kept activations": None,
    "recomputed": {"use_reentrant": False},
    "recomputed, reentrant": {"use_reentrant": True},
}


def gathered(model: Any) -> list[str]:
    """Names of the frozen parameters that this rank holds whole."""
    return [
        name
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and parameter.ds_status != ZeroParamStatus.NOT_AVAILABLE
    ]


def main(out: Path) -> None:
    recipe, _ = update.cases()["grpo_sg"]
    args = update.arguments(recipe, ["ds.zero_stage=3", "ds.lora.rank=4"], MICRO_BATCH)
    found: dict[str, dict[str, list[str]]] = {}
    for case, recomputation in CASES.items():
        strategy, actor, optimizer, scheduler = update.prepare(
            args, ds=RELEASED_AT_ONCE, lora_rank=4, target_modules="all-linear"
        )
        model = actor.model.module
        assert any(not parameter.requires_grad for parameter in model.parameters())
        rollout = update.rollout(actor)
        actor.train()
        if recomputation is not None:
            actor.gradient_checkpointing_enable(gradient_checkpointing_kwargs=recomputation)
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        moments: dict[str, list[str]] = {}
        backward, step = strategy.backward, strategy.optimizer_step

        def watched_backward(*args: Any, **kwargs: Any) -> None:
            backward(*args, **kwargs)  # noqa: B023
            moments.setdefault("backward", []).extend(gathered(model))  # noqa: B023

        def watched_step(*args: Any, **kwargs: Any) -> None:
            step(*args, **kwargs)  # noqa: B023
            moments.setdefault("step", []).extend(gathered(model))  # noqa: B023

        strategy.backward, strategy.optimizer_step = watched_backward, watched_step
        for _ in range(2):
            trainer = update.trainer_of(strategy, actor, optimizer, scheduler, MICRO_BATCH)
            for experience in rollout[rank::ranks]:
                trainer.replay_buffer.append(experience)
            trainer.ppo_train(args.algo.kl.init_coef)
        found[case] = moments
    if rank == 0:
        torch.save(found, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
