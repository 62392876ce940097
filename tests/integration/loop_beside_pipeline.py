"""The gradient of an optimizer step, by the pipeline's trainer and by lab.loop, on one rank.

    python loop_beside_pipeline.py OUT

Writes {algorithm: {"pipeline": ..., "loop": ...}} with the gradient [parameters] and the row of the
step; both have the same responses, log-probs, advantages and parameters, in float32.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.integration import update_on_ranks as ranks  # installs the patches

# isort: split
import torch
from transformers import AutoModelForCausalLM

from lab import loop
from sg_rlhf.config import load_config

ALGORITHMS = ("grpo", "grpo_sg", "grpo_sg_outside", "mask_only", "ar", "tr_grpo")
KL = 0.1


def samples(experiences: list[ranks.Experience]) -> list[loop.Sample]:
    """The same responses for lab.loop."""
    found = []
    for experience in experiences:
        ids, mask = experience.sequences[0].tolist(), experience.action_mask[0].bool()
        start = len(ids) - int(mask.sum())
        old, reference, advantages = (
            values[0][mask]
            for values in (
                experience.action_log_probs,
                experience.base_action_log_probs,
                experience.advantages,
            )
        )
        found.append(
            loop.Sample(
                tuple(ids[:start]), tuple(ids[start:]), float(advantages[0]), old, reference
            )
        )
    return found


def main(out: Path) -> None:
    """Both ways, for each algorithm."""
    cases = ranks.cases()
    micro_batch = ranks.RESPONSES
    strategy, actor, optimizer, scheduler = ranks.prepare(
        ranks.arguments(*cases["grpo"], micro_batch), in_float32=True
    )
    experiences = ranks.rollout(actor)
    model = AutoModelForCausalLM.from_pretrained(ranks.MODEL, dtype=torch.float32).eval()
    found = {}
    for name in ALGORITHMS:
        recipe, extra = cases[name]
        strategy.args = ranks.arguments(recipe, [*extra, f"algo.kl.init_coef={KL}"], micro_batch)
        trainer = ranks.trainer_of(strategy, actor, optimizer, scheduler, micro_batch)
        for experience in experiences:
            trainer.replay_buffer.append(experience)
        (row,) = trainer.ppo_train(KL)["sg_optimizer_steps"]
        config = load_config(recipe, [*extra, f"algo.kl.init_coef={KL}"])
        temperature = strategy.args.rollout.temperature
        model.zero_grad()
        of_loop = loop.backward(model, samples(experiences), loop.loss_of(config), temperature)
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        found[name] = {
            "pipeline": (ranks.gradient(actor), row),
            "loop": (gradient, {**of_loop, "actor_grad_norm": float(gradient.norm())}),
        }
    torch.save(found, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
