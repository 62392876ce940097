"""One rank of the test of a checkpoint that another number of ranks loads.

    python other_ranks.py FROM TO CASE...

For every case: an engine of its own; unless FROM is "nothing", FROM/CASE loaded over weights that
were spoilt; an optimizer step on eight responses; a checkpoint in TO/CASE; the step again. Rank 0
writes {case: {"loaded", "saved": what the checkpoints hold, "client": what was loaded with it,
"after": parameters after the first step, "next": after the second}} to TO/found.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# Sets the worker up, so it comes before everything that needs that.
import update_on_ranks as update

# isort: split
import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

MICRO_BATCH = 4
TAG = "global_step1"
CLIENT = {"global_step": 1, "data_loader_state_dict": {"drawn": [3, 1, 2]}}
#: name -> overrides of the recipe, elements of a rank's buffer, settings of the actor.
CASES: dict[str, tuple[list[str], int | None, dict[str, Any]]] = {
    "zero3": ([], None, {}),
    "several_buffers": ([], 20_000, {}),
    "bf16": (["ds.param_dtype=bf16"], None, {}),
    "lora": ([], None, {"lora_rank": 4, "lora_alpha": 8}),
    "zero2": (["ds.zero_stage=2"], None, {}),
    "zero1": (["ds.zero_stage=1"], None, {}),
}


def engine(case: str) -> tuple[Any, ...]:
    """Strategy, actor, optimizer and scheduler of a case."""
    overrides, buffer, of_the_actor = CASES[case]
    settings = ["actor.adam.lr=0.001", "actor.adam.betas=[0.9,0.99]", "actor.adam.weight_decay=0.1"]
    recipe, _ = update.cases()["grpo_sg"]
    args = update.arguments(recipe, [*settings, *overrides], MICRO_BATCH)
    given = update.Strategy

    def with_buffer(args: Any) -> Any:
        strategy = given(args)
        configured = strategy.get_ds_train_config

        def with_small_buffers(*a: Any, **k: Any) -> Any:
            config = configured(*a, **k)
            config["zero_optimization"]["sub_group_size"] = buffer
            return config

        if buffer is not None:
            strategy.get_ds_train_config = with_small_buffers
        return strategy

    update.Strategy = with_buffer
    try:
        return update.prepare(args, schedule="cosine_with_min_lr", **of_the_actor)
    finally:
        update.Strategy = given


def trained(actor: Any) -> dict[str, torch.Tensor]:
    return {
        name: safe_get_full_fp32_param(parameter).detach().clone()
        for name, parameter in actor.model.module.named_parameters()
        if parameter.requires_grad
    }


def moments(actor: Any, moment: str) -> dict[str, torch.Tensor]:
    """Of each parameter; under ZeRO-1 and 2 of each group, whose parameters lie in a row."""
    optimizer = actor.model.optimizer
    if actor.model.zero_optimization_partition_weights():
        return {
            name: safe_get_full_optimizer_state(parameter, moment).detach().clone()
            for name, parameter in actor.model.module.named_parameters()
            if parameter.requires_grad
        }
    found = {}
    for number, (group, parameters) in enumerate(
        zip(optimizer.optimizer.param_groups, optimizer.bit16_groups, strict=True)
    ):
        parts: list[Any] = [None] * torch.distributed.get_world_size()
        own = optimizer.optimizer.state[group["params"][0]][moment]
        torch.distributed.all_gather_object(parts, own)
        found[str(number)] = torch.cat(parts)[: sum(p.numel() for p in parameters)]
    return found


def state(actor: Any, scheduler: Any) -> dict[str, Any]:
    """All that a checkpoint holds, of whole parameters."""
    named = list(actor.model.module.named_parameters())
    found: dict[str, Any] = {"master": trained(actor), "weights": {}}
    for moment in ("exp_avg", "exp_avg_sq"):
        found[moment] = moments(actor, moment)
    for name, parameter in named:
        with deepspeed.zero.GatheredParameters([parameter]):
            found["weights"][name] = parameter.detach().clone()
    inner = actor.model.optimizer.optimizer
    steps = {float(kept["step"]) for kept in inner.state.values() if "step" in kept}
    steps |= {float(group["step"]) for group in inner.param_groups if "step" in group}
    settings = [
        {k: v for k, v in group.items() if k not in ("params", "step")}
        for group in inner.param_groups
    ]
    return found | {
        "buffers": len(inner.state), "steps": steps, "settings": settings,
        "rate": scheduler.get_last_lr(), "schedule": scheduler.state_dict(),
        "counted": [actor.model.global_steps, actor.model.skipped_steps],
    }  # fmt: skip


def step(strategy: Any, actor: Any, optimizer: Any, scheduler: Any, experiences: Any) -> None:
    """On the same eight responses, whoever has which."""
    trainer = update.trainer_of(strategy, actor, optimizer, scheduler, MICRO_BATCH)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for experience in experiences[rank::ranks]:
        trainer.replay_buffer.append(experience)
    trainer.ppo_train(strategy.args.algo.kl.init_coef)


def spoil(actor: Any) -> None:
    """As nobody has them: what is right afterwards has been loaded."""
    for parameter in actor.model.module.parameters():
        (parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter).data.fill_(7.0)


def main(before: Path | None, to: Path, cases: list[str]) -> None:
    everything: dict[str, Any] = {}
    to.mkdir(exist_ok=True)
    for case in cases:
        strategy, actor, optimizer, scheduler = engine(case)
        found: dict[str, Any] = {}
        if before is None:
            experiences = update.rollout(actor)
        else:
            # With rounding of its own, each number of ranks would have others.
            experiences = torch.load(before / f"{case}.pt", weights_only=False)
            spoil(actor)
            _, client = strategy.load_ckpt(actor.model, str(before / case))
            found["client"] = {key: client.get(key) for key in CLIENT}
            found["loaded"] = state(actor, scheduler)
        if torch.distributed.get_rank() == 0:
            torch.save(experiences, to / f"{case}.pt")
        step(strategy, actor, optimizer, scheduler, experiences)
        found["after"] = trained(actor)
        strategy.save_ckpt(actor.model, str(to / case), TAG, client_state=CLIENT)
        found["saved"] = state(actor, scheduler)
        step(strategy, actor, optimizer, scheduler, experiences)
        everything[case] = found | {"next": trained(actor)}
    if torch.distributed.get_rank() == 0:
        torch.save(everything, to / "found.pt")


if __name__ == "__main__":
    main(None if sys.argv[1] == "nothing" else Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
