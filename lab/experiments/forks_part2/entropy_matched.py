"""The entropy bonus at which GRPO changes the entropy as fast as an arm does.

    python -m lab.experiments.forks_part2.entropy_matched r0 d0

A control for "the arm works because it keeps, or lowers, the entropy". With g the gradient of a
loss and h that of the mean entropy, a step of unit length along -g changes the entropy by

    rate(g) = -<h, g> / |g|

GRPO with the bonus c has the gradient g_grpo - c h. The script finds the c whose rate is the arm's,
on the gradients of 8 minibatches added up. It prints c, the rates, and the cosine of the control's
gradient with the arm's. ``actor.entropy_coef: c`` in a recipe is the control.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from scipy.optimize import brentq
from torch import Tensor
from transformers import PreTrainedModel

from lab.experiments.forks.start_gradients import CONFIGS
from lab.experiments.forks_part2 import gradients
from lab.measure.batch_loss import BatchLoss
from lab.measure.checkpoint import PASS_TOKENS, load_model, load_tokenizer
from lab.measure.fixed_batch import FixedBatch, read_data
from lab.measure.minibatch_gradients import gradients as loss_gradients
from lab.measure.minibatch_gradients import surrogates
from lab.measure.rollouts import Sampling, load_reward, sample_batch
from sg_rlhf.common.atomic_io import write_whole

OUT = gradients.HERE / "entropy_matched.json"
BATCHES, PROMPTS = 8, 8
ARMS = ("sg_inside", "mask_only")
RECIPES = {"grpo": "grpo", "sg_inside": "grpo_sg", "mask_only": "mask_only"}
#: The search's interval for c, in units of |g_grpo| / |h|.
WIDEST = 20.0


def rate(loss: Tensor, entropy: Tensor) -> float:
    """First-order change of the entropy by a step of unit length against the loss's gradient."""
    return -float(entropy @ loss / loss.norm())


def matching_bonus(grpo: Tensor, entropy: Tensor, target: float) -> float:
    """The c for which ``rate(grpo - c entropy)`` is ``target``.

    The rate rises with c from -|entropy| to |entropy|, so there is one for any rate in between.
    """
    scale = float(grpo.norm() / entropy.norm())
    found = brentq(
        lambda c: rate(grpo - c * scale * entropy, entropy) - target, -WIDEST, WIDEST, xtol=1e-10
    )
    return float(found) * scale


def entropy_gradient(model: PreTrainedModel, batch: FixedBatch) -> Tensor:
    """Gradient of the mean entropy over the batch's tokens, [D]."""
    params = list(model.parameters())
    total: Tensor | None = None
    for passed in BatchLoss(model, batch, None, pass_tokens=PASS_TOKENS).forward():
        mean = passed.entropy_BT().sum() / batch.tokens
        parts = torch.autograd.grad(mean, params, materialize_grads=True)
        vector = torch.cat([part.flatten() for part in parts])
        total = vector if total is None else total + vector
    assert total is not None
    return total


def added_up(folder: Path) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of the arms' losses and of the entropy, each added over the minibatches."""
    data = gradients.RUNS / "data/arithmetic/train.jsonl"
    rows, reward = read_data(data), load_reward("module:lab.experiments.forks.reward")
    model = load_model(str(folder), torch.float32, torch.device("cpu"))
    tokenizer = load_tokenizer(str(folder))
    losses = surrogates([str(CONFIGS / f"{recipe}.yaml") for recipe in RECIPES.values()])
    settings = Sampling(prompts=PROMPTS)
    sums: dict[str, Tensor] = {}
    for number in range(BATCHES):
        part = rows[number * PROMPTS : (number + 1) * PROMPTS]
        drawn = replace(settings, seed=number)
        batch = sample_batch(data, part, str(folder), model, tokenizer, drawn, reward)
        found = loss_gradients(model, batch, losses, PASS_TOKENS)
        found["entropy"] = entropy_gradient(model, batch)
        for name, vector in found.items():
            sums[name] = sums[name] + vector if name in sums else vector
    return {arm: sums[recipe] for arm, recipe in RECIPES.items()}, sums["entropy"]


def main(argv: list[str] | None = None) -> int:
    """Exit status 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("starts", nargs="+", help="start models, such as r0 and d0")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = json.loads(OUT.read_text()) if OUT.exists() else {}
    for name in args.starts:
        losses, entropy = added_up(gradients.HERE / "starts" / name)
        found[name] = {"rate_grpo": rate(losses["grpo"], entropy)}
        for arm in ARMS:
            bonus = matching_bonus(losses["grpo"], entropy, rate(losses[arm], entropy))
            control = losses["grpo"] - bonus * entropy
            found[name][arm] = {
                "rate": rate(losses[arm], entropy),
                "entropy_coef": bonus,
                "cosine_with_arm": float(torch.cosine_similarity(control, losses[arm], dim=0)),
                "cosine_with_grpo": float(torch.cosine_similarity(control, losses["grpo"], dim=0)),
            }
            print(name, arm, found[name][arm])
        write_whole(OUT, json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
