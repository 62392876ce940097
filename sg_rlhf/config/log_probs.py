"""For which samples old log-probs need a forward pass of their own: one rule for run and plan.

The old policy is the one that sampled. Until a rollout's first optimizer step it is the current
policy, whose log-probs the update's own forward pass gives: detached, they are the old ones.
Samples of later steps need theirs from before the first. A pass over all samples is left to what
reads old log-probs before the update, and to where the two passes would not compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from sg_rlhf.config.upstream_flags import POLICY_LOSS_TYPES


class OldLogProbRule(NamedTuple):
    """What the rule says of a recipe.

    Attributes:
        of: the samples that need a pass: all, those of the rollout's later optimizer steps, none.
        share: of the rollout's samples.
        why: in a few words, with the keys that decide it.
    """

    of: Literal["all", "later", "none"]
    share: float
    why: str


def old_log_prob_rule(value: Callable[[str], Any]) -> OldLogProbRule:
    """The rule.

    Args:
        value: of a dotted key of the recipe, upstream's or ``sg``'s default where it sets none.
    """
    reader = next((why for why, applies in _readers(value) if applies), None)
    if reader:
        return OldLogProbRule("all", 1.0, reader)
    step = value("train.batch_size")
    samples = value("rollout.batch_size") * value("rollout.n_samples_per_prompt")
    steps = max(1, samples // step)
    if steps == 1:
        return OldLogProbRule("none", 0.0, "a rollout is one optimizer step")
    why = f"a rollout is {steps} optimizer steps (train.batch_size={step} of {samples} samples)"
    return OldLogProbRule("later", (steps - 1) / steps, why)


def _readers(value: Callable[[str], Any]) -> list[tuple[str, bool]]:
    """Why all samples need a pass, and whether it applies."""
    correction = value("algo.advantage.is_correction_level")
    shards = value("ds.ring_attn_size") * value("ds.tensor_parallel_size")
    ours = value("actor.policy_loss_type") in POLICY_LOSS_TYPES
    return [
        ("sg.skip_old_log_probs=false", not value("sg.skip_old_log_probs")),
        (
            "the KL is in the reward (algo.kl.use_loss=false)",
            value("algo.kl.init_coef") > 0 and not value("algo.kl.use_loss"),
        ),
        ("sg.update=lopti parts tokens by them", value("sg.update") == "lopti"),
        (
            "sg.weighting.normalize=batch_mean divides by a mean over them",
            ours and value("sg.weighting").get("normalize") == "batch_mean",
        ),
        (
            f"algo.advantage.is_correction_level={correction} compares them with the engine's",
            correction not in (None, False, "off"),
        ),
        # Until its first update upstream keeps the samples of several rollouts.
        ("there is a critic (critic.model_name_or_path)", bool(value("critic.model_name_or_path"))),
        # Dropped out in training, and not in a pass of their own.
        ("ds.lora.dropout is above 0", value("ds.lora.rank") > 0 and value("ds.lora.dropout") > 0),
        ("ranks share samples (ds.ring_attn_size, ds.tensor_parallel_size)", shards > 1),
        (
            "sg.batches=upstream has each rank shuffle its samples",
            value("sg.batches") == "upstream" and not value("train.dynamic_batch_enable"),
        ),
    ]
