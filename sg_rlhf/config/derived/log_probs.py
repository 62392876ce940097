"""How a recipe's log-probs are computed: fused or from logits, and when with a separate pass.

Training and the memory plan both ask these rules.

Old log-probs are those of the policy that sampled. Until the rollout's first optimizer step this is
the current policy, so the update's own forward pass gives them (detached). Samples of later
optimizer steps need them from before the first one. All samples need a separate pass where
something reads old log-probs before the update, or where the two passes would differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from sg_rlhf.config.upstream_flags import POLICY_LOSS_TYPES


class LogitChange(NamedTuple):
    """What a model does with the output of its head."""

    how: Literal["divide", "multiply", "softcap"]  # by or at a number; a cap: ``c tanh(z / c)``
    attribute: str  # the number's name in the model's config; a model that multiplies copies it


_SOFTCAP = LogitChange("softcap", "final_logit_softcapping")
_PLAIN = ("gemma", "glm4", "llama", "mistral", "olmo2", "olmo3", "qwen2", "qwen3", "smollm3")
#: Model families whose head can return log-probs, and what they do with its logits (None: nothing).
FUSED_FAMILIES: Mapping[str, LogitChange | None] = {
    **dict.fromkeys(_PLAIN),
    "cohere2": LogitChange("multiply", "logit_scale"),
    "gemma2": _SOFTCAP,
    "gemma3_text": _SOFTCAP,
    "granite": LogitChange("divide", "logits_scaling"),
}


def fused_log_probs_supported(requested: bool, deepcompile: bool) -> bool:
    """Whether log-probs can be computed without logits; not where the whole model is compiled."""
    return requested and not deepcompile


class OldLogProbRule(NamedTuple):
    """Which samples of a recipe need a separate forward pass for old log-probs."""

    of: Literal["all", "later", "none"]  # later: of the rollout's later optimizer steps
    share: float  # of the rollout's samples, 0 to 1
    why: str  # with the keys that decide it


def old_log_prob_rule(value: Callable[[str], Any]) -> OldLogProbRule:
    """Apply the rule to a recipe."""
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
    ours = value("actor.policy_loss_type") in POLICY_LOSS_TYPES
    return [
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
            "sg.weighting.type=stare ranks the rollout's tokens by them",
            ours and value("sg.weighting").get("type") == "stare",
        ),
        (
            f"algo.advantage.is_correction_level={correction} compares them with the engine's",
            correction not in (None, False, "off"),
        ),
        # Dropped out in training, and not in a pass of their own.
        ("ds.lora.dropout is above 0", value("ds.lora.rank") > 0 and value("ds.lora.dropout") > 0),
    ]
