"""GRPO-SG in prime-rl (August 2026): a custom loss, named in the trainer's configuration::

    [trainer.loss]
    type = "custom"
    import_path = "sg_rlhf.integrations.prime_rl.grpo_sg"

    [trainer.loss.kwargs]
    weighting = "grpo_sg"
    parameters = { upper = 1.2 }

prime-rl calls it for each sequence and divides the sum by the tokens of the optimizer step
(token-mean). Its old log-probs are those of the inference engine.
"""

from __future__ import annotations

from typing import Any

from prime_rl.trainer.rl.loss import LossInputs, LossOutputs

from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.weightings import make_weighting
from sg_rlhf.integrations import METRICS


def grpo_sg(
    inputs: LossInputs,
    weighting: str = "grpo_sg",
    parameters: dict[str, Any] | None = None,
    objective: str = "ppo",
    eps_low: float = 0.2,
    eps_high: float = 0.24,
    dual_clip: float | None = None,
) -> LossOutputs:
    """The loss of one sequence: the sum over its tokens, [seq] in all inputs."""
    weights = inputs.loss_weights
    output = policy_loss(
        inputs.trainer_logprobs[None],
        inputs.inference_logprobs[None],
        inputs.advantages[None],
        inputs.loss_mask[None],
        LossSettings(
            make_weighting(weighting, parameters or {}),
            eps_low,
            eps_high,
            dual_clip,
            objective=objective,
        ),
        coefficient=None if weights is None else weights[None],
        total=1.0,
    )
    return LossOutputs(output.loss, {f"sg/{k}": output.statistics.mean(k) for k in METRICS})
