"""The Ray actors of the ranks: policy, reference model and reward model."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray.launcher import BaseModelActor, RewardModelActor
from openrlhf.utils import get_tokenizer
from openrlhf.utils.deepspeed.deepspeed_utils import (
    offload_deepspeed_states,
    reload_deepspeed_states,
)
from openrlhf.utils.distributed_util import torch_dist_barrier_and_cuda_sync
from ray.actor import ActorHandle
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR

from sg_rlhf.overlay.checkpoints import store
from sg_rlhf.overlay.checkpoints.strategy import Strategy
from sg_rlhf.overlay.cluster.free_port import OwnPort
from sg_rlhf.overlay.cpu import platform
from sg_rlhf.overlay.learner import micro_batches
from sg_rlhf.overlay.learner.overlapped_reference import PendingLogProbs
from sg_rlhf.overlay.learner.update import SGActorPPOTrainer
from sg_rlhf.overlay.model import adam
from sg_rlhf.overlay.model.log_prob_head import PolicyModel
from sg_rlhf.overlay.reporting import activity
from sg_rlhf.overlay.rollout.async_buffer import BUFFER_KEY


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


def resumed_rates(scheduler: LambdaLR) -> tuple[float, float, float]:
    """The learning rates of a run that has loaded a checkpoint.

    The checkpoint's rate, the rate of this run's schedule after the same number of steps, and the
    checkpoint's base rate, which the schedule scales.
    """
    base = float(scheduler.base_lrs[0])
    rate = base * scheduler.lr_lambdas[0](scheduler.last_epoch)
    return float(scheduler.get_last_lr()[0]), float(rate), base


class SGPolicyModelActor(OwnPort, BaseModelActor):  # type: ignore[misc]  # upstream has no types
    """One rank of the policy: model, optimizer, update, checkpoints and weight sync."""

    strategy: Strategy

    def init_model_from_pretrained(
        self, strategy: Strategy, pretrain: str, max_steps: int, vllm_engines: list[ActorHandle]
    ) -> None:
        """Load the model into DeepSpeed, and a checkpoint if there is one."""
        micro_batches.prepare_strategy(strategy)
        args = strategy.args
        with activity.phase(activity.TRAINER, "loading the model into DeepSpeed"):
            self._setup_distributed(strategy)
            self._load_model(pretrain, max_steps)
            if args.ds.adam_offload or platform.is_cpu():
                entries = (getattr(p, "ds_numel", p.numel()) for p in self.actor.model.parameters())
                adam.use_host_threads(args.actor.num_gpus_per_node, sum(entries))
            self.checkpoint_states = self._load_checkpoint()
            if args.ds.enable_sleep:
                self.offload_states()
            self.trainer = SGActorPPOTrainer(
                strategy,
                self.actor,
                ema_model=self.ema_model,
                actor_optim=self.actor_optim,
                actor_scheduler=self.actor_scheduler,
                micro_train_batch_size=args.train.micro_batch_size,
                vllm_engines=vllm_engines,
            )

    def _load_model(self, pretrain: str, max_steps: int) -> None:
        strategy, args = self.strategy, self.strategy.args
        options = model_options(args)
        actor = PolicyModel(
            pretrain,
            **options,
            lora_rank=args.ds.lora.rank,
            lora_alpha=args.ds.lora.alpha,
            target_modules=args.ds.lora.target_modules,
            lora_dropout=args.ds.lora.dropout,
            ds_config=strategy.get_ds_train_config(),
            temperature=args.rollout.temperature,
            use_liger_kernel=args.ds.use_liger_kernel,
            freeze_visual_encoder=args.actor.freeze_visual_encoder,
        )
        strategy.print(actor)
        self.tokenizer = get_tokenizer(
            pretrain, actor.model, "left", strategy, use_fast=not args.data.disable_fast_tokenizer
        )
        average = None
        if args.train.enable_ema:
            ds_config = strategy.get_ds_eval_config(offload=True)
            average = PolicyModel(pretrain, **options, ds_config=ds_config)
        if args.actor.gradient_checkpointing_enable:
            actor.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={
                    "use_reentrant": args.actor.gradient_checkpointing_reentrant
                }
            )
        self.actor, self.actor_optim, self.actor_scheduler = strategy.prepare(
            (
                actor,
                {
                    "optim": args.actor.optim,
                    "muon": vars(args.actor.muon),
                    "adam": vars(args.actor.adam),
                    "lr_scheduler": args.actor.lr_scheduler,
                    "lr_warmup_ratio": args.actor.lr_warmup_ratio,
                    "min_lr_ratio": args.actor.min_lr_ratio,
                    "max_norm": args.actor.max_norm,
                    "scheduler_steps": max_steps,
                },
            )
        )
        self.ema_model = None
        if average is not None:
            average._offload = True
            self.ema_model = strategy.prepare(average)

    def _load_checkpoint(self) -> dict[str, Any]:
        """Load the newest checkpoint; its client state, {} without one."""
        ckpt = self.strategy.args.ckpt
        folder = Path(ckpt.path) / "_actor"
        if not (ckpt.load_enable and folder.exists()):
            return {}
        self.strategy.print(f"Loading the checkpoint: {folder}")
        _, states = self.strategy.load_ckpt(self.actor.model, str(folder))
        return dict(states)

    def get_checkpoint_states(self) -> dict[str, Any]:
        """The client state of the checkpoint that was loaded."""
        return self.checkpoint_states

    # -- forward passes and the update ---------------------------------------------------------

    def forward(
        self, sequences: torch.Tensor, action_mask: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        """Old log-probs, see :func:`response_log_probs`."""
        self.actor.eval()
        log_probs_BT = response_log_probs(self.actor, sequences, action_mask, attention_mask)
        self.actor.train()
        return log_probs_BT

    def append(self, experience: Experience) -> None:
        """Add a micro-batch to the samples of the next update."""
        self.trainer.replay_buffer.append(experience)

    def set_reference(self, results: PendingLogProbs) -> None:
        """Set the pending reference log-probs of the next update."""
        self.trainer.reference.set_pending(results)

    def update(self, kl_coefficient: float) -> dict[str, Any]:
        """Update the policy on the samples of :meth:`append`."""
        torch.cuda.empty_cache()
        self.actor.train()
        metrics = self.trainer.ppo_train(kl_coefficient)
        self.trainer.replay_buffer.clear()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        return metrics

    def reload_states(self) -> None:
        """With ``ds.enable_sleep``: move the optimizer's state to the GPU."""
        reload_deepspeed_states(self.actor.model)

    def offload_states(self) -> None:
        """With ``ds.enable_sleep``: move it to host memory."""
        offload_deepspeed_states(self.actor.model)

    def broadcast_to_vllm(self) -> None:
        """Send the weights to the engines."""
        self.trainer.broadcast_to_vllm()

    # -- checkpoints ---------------------------------------------------------------------------

    def save_model(self, folder: str | Path | None = None) -> None:
        """Save a Hugging Face folder: ``ckpt.output_dir``, or another one."""
        model = self.actor if self.ema_model is None else self.ema_model
        self.strategy.save_model(
            model, self.tokenizer, folder or self.strategy.args.ckpt.output_dir
        )

    def save_checkpoint(
        self,
        tag: str,
        client_states: dict[str, Any] | None = None,
        metric_value: float | None = None,
        metric_key: str | None = None,
    ) -> None:
        """Save the Hugging Face folder of ``ckpt.save_hf``, then the checkpoint to resume from.

        A run that is killed between the two writes the folder again. In the other order it would
        resume without it.
        """
        ckpt, is_first = self.strategy.args.ckpt, self.strategy.is_rank_0()
        if client_states and not is_first:
            # ZeRO 3 writes a file for each rank. Only the first rank's states are read, and these
            # hold all samples that wait for their update.
            client_states = {k: v for k, v in client_states.items() if k != BUFFER_KEY}
        if ckpt.save_hf:
            self.save_model(Path(ckpt.path) / f"{tag}_hf")
            torch_dist_barrier_and_cuda_sync()
        if not ckpt.disable_ds:
            self.strategy.save_ckpt(
                self.actor.model,
                str(Path(ckpt.path) / "_actor"),
                tag,
                ckpt.max_num,
                ckpt.max_mem,
                client_states or {},
                metric_value=metric_value,
                metric_key=metric_key,
            )
        torch_dist_barrier_and_cuda_sync()
        if ckpt.save_hf and is_first:
            store.delete_pruned_hf_folders(
                Path(ckpt.path), ckpt.max_num, not ckpt.disable_ds, Path(ckpt.output_dir)
            )

    # -- other calls of the controller ---------------------------------------------------------

    def token_values(self, indices: list[int]) -> list[dict[str, list[float]] | None]:
        """See :meth:`sg_rlhf.overlay.learner.metrics.TokenRecord.lookup`."""
        values: list[dict[str, list[float]] | None] = self.trainer.token_record.lookup(indices)
        return values

    def join_engines(self) -> None:
        """Rebuild the weight sync's group, after an engine was restarted."""
        trainer = self.trainer
        if not trainer.use_cuda_ipc and torch.distributed.get_rank() == 0:
            trainer.connect_engines()

    def resumed_rates(self) -> tuple[float, float, float]:
        """See :func:`resumed_rates`."""
        return resumed_rates(self.actor_scheduler)

    def sync_deadline(self) -> float:
        """Seconds that the engines have for a weight sync."""
        return float(self.trainer.weight_sync.deadline_seconds)

    def prompt_log_probs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Per sequence of token ids log p(token t | tokens before t), t from 1, temperature 1.

        Every rank must be called: under ZeRO-3 a forward pass gathers the parameters.
        """
        device = torch.cuda.current_device()
        temperature, self.actor.temperature = self.actor.temperature, 1.0
        self.actor.eval()
        results: list[list[float]] = [[]] * len(sequences)
        by_length = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
        size = self.strategy.args.rollout.micro_batch_size
        try:
            with torch.no_grad():
                for start in range(0, len(by_length), size):
                    indices = by_length[start : start + size]
                    token_ids = [torch.tensor(sequences[i]) for i in indices]
                    masks = [torch.ones_like(row) for row in token_ids]
                    log_probs = self.actor(
                        pad_sequence(token_ids, batch_first=True).to(device),
                        attention_mask=pad_sequence(masks, batch_first=True).to(device),
                        return_logprobs=True,
                    )
                    for i, row in zip(indices, log_probs.float().tolist(), strict=True):
                        results[i] = row[: len(sequences[i]) - 1]
        finally:
            self.actor.temperature = temperature
            self.actor.train()
            # An engine on the same GPU allocates its cache next. After an update ZeRO-3 holds
            # gigabytes of parameters for a backward pass, and a weight sync fails on those that it
            # is fetching.
            self.actor.model.empty_partition_cache()
            torch.cuda.empty_cache()
        return results


class SGReferenceModelActor(OwnPort, BaseModelActor):  # type: ignore[misc]
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
    RewardModelActor.__ray_metadata__.modified_class,  # type: ignore[misc]
):
    """Upstream's rank of the reward model."""
