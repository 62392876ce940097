"""The Ray actors of the models that score a rollout and do not learn: reference and reward."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import openrlhf.trainer.ray.launcher as upstream
import torch

from sg_rlhf.overlay.checkpoints.strategy import Strategy
from sg_rlhf.overlay.cluster.free_port import OwnPort
from sg_rlhf.overlay.model.log_prob_head import PolicyModel


def model_options(args: Namespace) -> dict[str, Any]:
    """Arguments of a model that policy, moving average and reference share."""
    return {
        "attn_implementation": args.ds.attn_implementation,
        "experts_implementation": args.ds.experts_implementation,
        "param_dtype": args.ds.param_dtype,
        "load_in_4bit": args.ds.load_in_4bit,
        "packing_samples": args.ds.packing_samples,
    }


def response_log_probs(
    model: PolicyModel,
    sequences: torch.Tensor,
    action_mask: torch.Tensor,
    attention_mask: torch.Tensor,
) -> torch.Tensor:
    """Log-probs [B, T] of the response tokens of sequences [B, L], detached, on the CPU."""
    device = torch.cuda.current_device()
    with torch.no_grad():
        log_probs_BT: torch.Tensor = model(
            sequences.to(device), action_mask.to(device), attention_mask.to(device)
        )
    return log_probs_BT.to("cpu")


class SGReferenceModelActor(OwnPort, upstream.BaseModelActor):  # type: ignore[misc]
    """One rank of the reference model."""

    def init_model_from_pretrained(self, strategy: Strategy, pretrain: str) -> None:
        """Load the model into DeepSpeed."""
        self._setup_distributed(strategy)
        args = strategy.args
        model = PolicyModel(
            pretrain,
            **model_options(args),
            ds_config=strategy.get_ds_eval_config(offload=args.ref.offload),
            temperature=args.rollout.temperature,
            use_liger_kernel=args.ds.use_liger_kernel,
        )
        strategy.print(model)
        if args.ref.offload:
            model._offload = True
        self.model = strategy.prepare(model)
        self.model.eval()

    def forward(
        self, sequences: torch.Tensor, action_mask: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        """Reference log-probs, see :func:`response_log_probs`."""
        return response_log_probs(self.model, sequences, action_mask, attention_mask)


class SGRewardModelActor(
    OwnPort,
    upstream.RewardModelActor.__ray_metadata__.modified_class,  # type: ignore[misc]
):
    """Upstream's rank of the reward model."""
