"""GRPO-SG in tinker (0.38.0): a loss for ``TrainingClient.forward_backward_custom``.

The service computes the log-probs, this process the loss::

    loss = make_loss(LossSettings("grpo_sg"), total=number_of_response_tokens)
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

from tinker import Datum
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.integrations import METRICS


def make_loss(
    settings: LossSettings | None = None, *, total: float = 1.0
) -> Callable[[Sequence[Datum], list[Tensor]], tuple[Tensor, dict[str, float]]]:
    """A loss of data and their log-probs, which returns (loss, metrics).

    Args:
        settings: the settings; None for the paper's.
        total: what the sum over all tokens is divided by. 1, the sum itself, is tinker's own
            convention.
    """

    def loss(data: Sequence[Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        def rows(name: str) -> Tensor:
            return pad_sequence([x.loss_fn_inputs[name].to_torch() for x in data], batch_first=True)

        advantages = rows("advantages")
        masked = all("mask" in datum.loss_fn_inputs for datum in data)
        output = policy_loss(
            pad_sequence(logprobs, batch_first=True),
            rows("logprobs"),
            advantages,
            rows("mask") if masked else advantages != 0,
            settings,
            total=total,
        )
        return output.loss, {f"sg/{name}": output.statistics.mean(name).item() for name in METRICS}

    return loss
