"""The Ray actor of one policy rank: checkpoints, log-probs of texts, calls of the controller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openrlhf.trainer.ray.ppo_actor as upstream
import ray
import torch
from torch.nn.utils.rnn import pad_sequence

from sg_rlhf.config.derived.weight_sync import uses_buckets
from sg_rlhf.overlay.checkpoints import store
from sg_rlhf.overlay.learner import micro_batches
from sg_rlhf.overlay.learner.overlapped_reference import PendingLogProbs
from sg_rlhf.overlay.model import adam
from sg_rlhf.overlay.reporting import activity
from sg_rlhf.overlay.rollout.async_buffer import BUFFER_KEY
from sg_rlhf.overlay.settings.lookup import value_of


def resumed_rates(scheduler: Any) -> tuple[float, float, float]:
    """The learning rates of a run that has loaded a checkpoint.

    Args:
        scheduler: transformers' schedule, a ``LambdaLR``.

    Returns:
        The rate at the checkpoint, the rate of this run's schedule after the same number of steps,
        and the rate that the schedule scales. The first and the last are the checkpoint's.
    """
    base = float(scheduler.base_lrs[0])
    rate = base * scheduler.lr_lambdas[0](scheduler.last_epoch)
    return float(scheduler.get_last_lr()[0]), float(rate), base


class SGPolicyModelActor(upstream.PolicyModelActor.__ray_metadata__.modified_class):
    """Upstream's policy actor, with our update, checkpoints and checks."""

    actor: Any
    actor_scheduler: Any
    trainer: Any
    strategy: Any
    disable_ds_ckpt: bool
    save_hf_ckpt: bool

    def init_model_from_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model into DeepSpeed, as upstream does; the terminal shows that it runs."""
        strategy = args[0] if args else kwargs["strategy"]
        micro_batches.prepare_strategy(strategy)
        if strategy.args.ds.adam_offload:
            adam.use_host_threads(ranks=strategy.args.actor.num_gpus_per_node)
        with activity.phase(activity.TRAINER, "loading the model into DeepSpeed"):
            return super().init_model_from_pretrained(*args, **kwargs)

    def save_checkpoint(
        self, tag: str, client_states: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Save as upstream does, but the Hugging Face folder first; then prune old folders.

        A run that is killed between the two resumes before this rollout and writes the folder
        again. In upstream's order it resumes after it, and the checkpoint never gets its folder.

        Args:
            tag: name of the checkpoint.
            client_states: the controller's.
            **kwargs: upstream's ``metric_value`` and ``metric_key``.
        """
        disable_ds, save_hf = self.disable_ds_ckpt, self.save_hf_ckpt
        if client_states and not self.strategy.is_rank_0():
            # ZeRO 3 writes a file for each rank. Only the first rank's states are read, and these
            # hold all samples that wait for their update.
            client_states = {k: v for k, v in client_states.items() if k != BUFFER_KEY}
        try:
            if save_hf:
                self.disable_ds_ckpt = True
                super().save_checkpoint(tag, client_states, **kwargs)
            self.disable_ds_ckpt, self.save_hf_ckpt = disable_ds, False
            super().save_checkpoint(tag, client_states, **kwargs)
        finally:
            self.disable_ds_ckpt, self.save_hf_ckpt = disable_ds, save_hf
        if self.save_hf_ckpt and self.strategy.is_rank_0():
            ckpt = self.strategy.args.ckpt
            store.delete_pruned_hf_folders(
                Path(ckpt.path), ckpt.max_num, not ckpt.disable_ds, Path(ckpt.output_dir)
            )

    def token_values(self, indices: list[int]) -> list[dict[str, list[float]] | None]:
        """See :meth:`sg_rlhf.overlay.learner.token_record.TokenRecord.lookup`."""
        values: list[dict[str, list[float]] | None] = self.trainer.token_record.lookup(indices)
        return values

    def set_reference(self, results: PendingLogProbs) -> None:
        """Set the pending reference log-probs of the next update."""
        self.trainer.reference.set_pending(results)

    def join_engines(self) -> None:
        """Rebuild the weight sync's group, after an engine was restarted."""
        trainer = self.trainer
        if not trainer.use_cuda_ipc and torch.distributed.get_rank() == 0:
            trainer._init_vllm_sync_group(self.strategy.args.vllm.sync_backend)

    def resumed_rates(self) -> tuple[float, float, float]:
        """See :func:`resumed_rates`."""
        return resumed_rates(self.actor_scheduler)

    def sync_deadline(self) -> float:
        """Seconds that the engines have for a weight sync; infinity with upstream's sync."""
        args = self.strategy.args
        if not uses_buckets(value_of(args)):
            return float("inf")
        return float(self.trainer.weight_sync.deadline_seconds)

    def prompt_log_probs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs of fixed sequences at temperature 1, for the check of a weight sync.

        A micro-batch has sequences of similar length, at most ``rollout.micro_batch_size``. Every
        rank must be called: under ZeRO-3 a forward pass gathers the parameters.

        Args:
            sequences: token ids.

        Returns:
            For each sequence log p(token t | tokens before t), t from 1.
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
                        ring_attn_group=self.strategy.ring_attn_group,
                    )
                    for i, row in zip(indices, log_probs.float().tolist(), strict=True):
                        results[i] = row[: len(sequences[i]) - 1]
        finally:
            self.actor.temperature = temperature
            self.actor.train()
            # An engine on the same GPU allocates its cache next.
            torch.cuda.empty_cache()
        return results


RemotePolicyModelActor = ray.remote(num_gpus=1)(SGPolicyModelActor)
