"""GRPO-SG in tinker (0.38.0): a loss for ``TrainingClient.forward_backward_custom``.

The service computes the log-probs, this process the loss::

    loss = make_loss("grpo_sg", total=number_of_response_tokens)
    training_client.forward_backward_custom(data, loss)

==========================================  =================================================
tinker (``Datum.loss_fn_inputs``)           here
==========================================  =================================================
logprobs                                    old log-probs, those of the sampler
advantages                                  advantages, one per token
mask; without it the advantages except 0    response tokens
==========================================  =================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tinker import Datum
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sg_rlhf.algo.policy_loss import policy_loss_terms
from sg_rlhf.algo.weightings import Weighting, make_weighting
from sg_rlhf.integrations import METRICS


def make_loss(
    weighting: str | Weighting = "grpo_sg",
    objective: str = "ppo",
    *,
    total: float = 1.0,
    eps_low: float = 0.2,
    eps_high: float = 0.24,
    **options: Any,
) -> Callable[[Sequence[Datum], list[Tensor]], tuple[Tensor, dict[str, float]]]:
    """A loss of data and their log-probs, which returns (loss, metrics).

    Args:
        weighting: the token weighting, or its name for default parameters.
        objective: the objective's name.
        total: what the sum over all tokens is divided by. 1, the sum itself, is tinker's own
            convention.
        eps_low: lower clip range.
        eps_high: upper clip range.
        **options: others of :func:`~sg_rlhf.algo.policy_loss.policy_loss_terms`, as ``dual_clip``.
    """
    cfg = make_weighting(weighting)

    def loss(data: Sequence[Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        def rows(name: str) -> Tensor:
            return pad_sequence([x.loss_fn_inputs[name].to_torch() for x in data], batch_first=True)

        advantages = rows("advantages")
        masked = all("mask" in datum.loss_fn_inputs for datum in data)
        terms = policy_loss_terms(
            pad_sequence(logprobs, batch_first=True),
            rows("logprobs"),
            advantages,
            rows("mask") if masked else advantages != 0,
            cfg,
            eps_low,
            eps_high,
            objective=objective,
            batch_num_tokens=total,
            **options,
        )
        return terms.loss, {f"sg/{name}": terms.statistics.mean(name).item() for name in METRICS}

    return loss
