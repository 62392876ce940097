"""The update of the policy on one rank: epochs over the replay buffer, micro-batch by micro-batch.

:class:`SGActorPPOTrainer` replaces the loop of upstream's ``ActorPPOTrainer``:

1. :meth:`~SGActorPPOTrainer.ppo_train` computes the constants of the rollout that the loss needs,
   then trains its epochs (twice, over different tokens, for ``sg.update=lopti``);
2. :class:`sg_rlhf.overlay.learner.replay_buffer.UpdateBatching` cuts an epoch into micro-batches;
3. :meth:`~SGActorPPOTrainer.train_micro_batch` computes log-probs, policy loss, KL loss and
   entropy bonus, runs backward, and lets DeepSpeed step at the end of an optimizer step;
4. :mod:`sg_rlhf.overlay.learner.metrics` logs it.

The constructor, the model and DeepSpeed's engine are upstream's.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from openrlhf.models.utils import masked_mean
from tqdm import tqdm

from sg_rlhf.algo import lopti
from sg_rlhf.algo.weightings.top_entropy import TopEntropy
from sg_rlhf.overlay.learner import (
    gradient_check,
    memory,
    micro_batches,
    nonfinite,
    parameter_update_check,
    rollout_constants,
)
from sg_rlhf.overlay.learner.metrics import (
    MicroBatchMetrics,
    StepLog,
    UpdateMeans,
    logged_names,
    sample_metrics,
)
from sg_rlhf.overlay.learner.old_log_probs import RankOldLogProbs
from sg_rlhf.overlay.learner.overlapped_reference import RankReference
from sg_rlhf.overlay.learner.policy_loss import (
    PolicyLossWithStatistics,
    kl_dispatcher,
    token_context,
)
from sg_rlhf.overlay.learner.replay_buffer import (
    BalancedBuffer,
    MicroBatch,
    UpdateBatching,
    batch_on_device,
    policy_forward,
)
from sg_rlhf.overlay.learner.sync_trainer import SyncTrainer
from sg_rlhf.overlay.learner.token_record import TokenRecord
from sg_rlhf.overlay.weight_sync import log_prob_check
from sg_rlhf.run_dir import timing_keys
from sg_rlhf.sampling.request_seeds import SeedKey, request_seed

#: Log-probs of an experience, which upstream multiplies by the action mask.
_LOG_PROB_FIELDS = ("action_log_probs", "base_action_log_probs", "rollout_log_probs")


class SGActorPPOTrainer(SyncTrainer):
    """The trainer of one policy rank."""

    actor_loss_fn: Any
    replay_buffer: Any

    def __init__(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(strategy, *args, **kwargs)
        self.actor_loss_fn = PolicyLossWithStatistics(self.actor_loss_fn, strategy.args)
        self._kl = kl_dispatcher(strategy.args, self.actor_loss_fn)
        self._weighting = self.actor_loss_fn.weighting
        self.batching = UpdateBatching(strategy)
        if self.batching.cut_by_controller:
            buffer = self.replay_buffer
            self.replay_buffer = BalancedBuffer(
                buffer.sample_batch_size, buffer.limit, buffer.cpu_offload, buffer.packing_samples
            )
        self._is_checked = False  # whether the engine's log-probs of this rollout are
        self._entropy_threshold: float | None = None
        self._entropy_BT: torch.Tensor | None = None  # of the latest micro-batch
        if "entropy" in self._weighting.reads:
            self.actor.register_forward_hook(self._keep_entropy)
        self._log = StepLog(strategy)
        self.old_log_probs = RankOldLogProbs(self)
        self.token_record = TokenRecord()
        self.reference = RankReference()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.skips: nonfinite.RankSkips | None = None
        self._faults = gradient_check.GradientFaults(self.actor_optim, self._named_parameters)
        if self.args.sg.on_nonfinite == "skip":
            self.skips = nonfinite.RankSkips(self.args, self._faults, self.actor_scheduler)
            self.actor_loss_fn.on_nonfinite = self.skips.report_loss
            self.skips.spoil_gradients_of(self.actor.model.module)
        self._first_step = (
            parameter_update_check.UpdateWatch(self.actor.model.module, self.actor_optim)
            if self.args.sg.check_trained
            else None
        )

    def _named_parameters(self) -> Iterable[tuple[str, Any]]:
        return self.actor.model.module.named_parameters()

    # ---- the update of one rollout

    def ppo_train(self, kl_ctl: float) -> dict[str, Any]:
        """Train on the replay buffer for ``train.max_epochs`` epochs.

        Args:
            kl_ctl: coefficient of the KL loss.

        Returns:
            Metrics of the update by name, means over all ranks; ``sg_optimizer_steps`` has the rows
            of its optimizer steps.

        Raises:
            NonFiniteError: a loss or gradient is not finite, and ``sg.on_nonfinite=stop``.
            FrozenError: the run's first optimizer step did not train every tensor.
        """
        self._log = StepLog(self.strategy)
        self._seconds.clear()
        self.token_record.clear()
        self.actor_loss_fn.mismatch.zero_()
        self._is_checked = False
        # Dropout draws the same numbers in a run that was resumed.
        key = SeedKey(self.args.train.seed, "update", self.actor.model.global_steps, 0)
        torch.manual_seed(request_seed(key, torch.distributed.get_rank()))
        memory.reset_peak()
        self._prepare_rollout()
        try:
            train = self._train_lopti if self.args.sg.update == "lopti" else self._train_epochs
            status = train(kl_ctl)
        except nonfinite.TooManySkips as error:
            # Not raised: the controller writes the rows before it stops the run.
            status = {nonfinite.STOP: str(error)}
        self.reference.clear()
        if self.skips is not None:
            status |= self.skips.pop_rows()
        norms = [row["actor_grad_norm"] for row in self._log.rows]
        if norms:
            status["actor_grad_norm_mean"] = statistics.fmean(norms)
            status["actor_grad_norm_max"] = max(norms)
            status["actor_grad_norm_std"] = statistics.pstdev(norms)
            # Where both have a mean, the one that upstream logs stays.
            status = logged_names(self._log.statistics.metrics()) | status
        status |= memory.max_over_ranks(self.strategy)
        status |= {timing_keys.PREFIX + k: self._seconds[k] for k in timing_keys.OF_THE_RANK}
        status["sg_optimizer_steps"] = self._log.rows
        return status

    def _prepare_rollout(self) -> None:
        """Compute the old log-probs and constants of the whole rollout that the loss needs."""
        started = time.perf_counter()
        if self.old_log_probs.compute_missing():
            self._seconds["update_old_log_probs"] = time.perf_counter() - started
        if self._weighting.normalize == "batch_mean":
            self.actor_loss_fn.mean_weight = rollout_constants.mean_weight(self, self._weighting)
        if isinstance(self._weighting, TopEntropy):
            batches = itertools.chain.from_iterable(self.batching.steps(self.replay_buffer))
            self._entropy_threshold = rollout_constants.entropy_threshold(
                self, self._weighting, batches
            )

    def _train_epochs(self, kl_ctl: float) -> dict[str, Any]:
        """The epochs over the replay buffer; returns means over micro-batches and ranks."""
        means = UpdateMeans(self.strategy)
        for epoch in range(self.max_epochs):
            progress = tqdm(
                self.batching.epoch(self.replay_buffer),
                desc=f"Train epoch [{epoch + 1}/{self.max_epochs}]",
                disable=not self.strategy.is_rank_0(),
            )
            for micro_batch in progress:
                metrics = self.train_micro_batch(micro_batch, kl_ctl)
                progress.set_postfix(means.add(metrics))
        return means.result()

    def _train_lopti(self, kl_ctl: float) -> dict[str, Any]:
        """Low-probability tokens first, then the others; omits a pass without a token."""
        loss_fn = self.actor_loss_fn
        statuses = []
        for name in lopti.PASSES:
            if not rollout_constants.count_lopti_tokens(self, name):
                continue
            first_row, loss_fn.lopti_pass = len(self._log.rows), name
            try:
                statuses.append(self._train_epochs(kl_ctl))
            finally:
                loss_fn.lopti_pass = None
            for row in self._log.rows[first_row:]:
                row["pass"] = name
        if not statuses:  # no token takes part: a step that is refused or skipped, as always
            return self._train_epochs(kl_ctl)
        return {
            key: statistics.fmean(status[key] for status in statuses if key in status)
            for key in statuses[-1]
        }

    # ---- one micro-batch

    def train_micro_batch(self, micro_batch: MicroBatch, kl_ctl: float) -> MicroBatchMetrics:
        """Forward, loss, backward; with the last micro-batch of a step, the optimizer step.

        Args:
            micro_batch: the next one of the epoch.
            kl_ctl: coefficient of the KL loss.
        """
        engine = self.actor.model
        steps_before = engine.global_steps
        self.actor.train()
        if self.batching.is_variable:
            # ZeRO 1 and 2 would keep the gradient of the last micro-batch alone.
            engine.set_gradient_accumulation_boundary(micro_batch.is_last)
        experience = self._load(micro_batch)
        started = time.perf_counter()
        needs_old = experience.action_log_probs is None
        loss, losses = self._loss(experience, micro_batch, kl_ctl)
        if self.args.sg.samples_per_step:
            # Before backward: the device has just been waited for.
            self.token_record.keep(
                micro_batch.samples,
                log_probs=self.actor_loss_fn.old_log_probs_BT,
                update_log_probs=self.actor_loss_fn.log_probs_BT,
                entropies=self._entropy_BT,
            )
        if self.skips is not None and self.skips.loss_failed:
            loss = loss * math.nan
        self.strategy.backward(loss, self.actor, self.actor_optim)
        if micro_batch.is_last and not self._is_checked:
            self._is_checked = True
            if self.vllm_engines is not None:  # a replayed rollout may be of any weights
                self._check_samples()
        if micro_batch.is_last or not self.batching.is_variable:
            # With a fixed number of micro-batches DeepSpeed counts them itself.
            self.strategy.optimizer_step(
                self.actor_optim, self.actor, self.actor_scheduler, name="actor"
            )
            if self.ema_model:
                self.strategy.moving_average(self.actor, self.ema_model, self.ema_beta, "cuda")
        if needs_old:
            self.old_log_probs.store(micro_batch.samples, self.actor_loss_fn.old_log_probs_BT)
        metrics = self._metrics(experience, micro_batch, losses)
        if engine.global_steps > steps_before:
            self._after_step(metrics)
        # On CUDA what backward still computes is counted where it is next waited for.
        loss_done = self.actor_loss_fn.finished_at
        self._seconds["update_forward"] += loss_done - started
        self._seconds["update_backward"] += time.perf_counter() - loss_done
        return metrics

    def _check_samples(self) -> None:
        """Before the rollout's first optimizer step: the engine sampled by the trainer's weights.

        Raises:
            SyncError: it did not.
        """
        difference, tokens = self.actor_loss_fn.mismatch.tolist()
        totals = self.strategy.all_reduce({"difference": difference, "tokens": tokens})
        if totals["tokens"]:
            mean = totals["difference"] / totals["tokens"]
            log_prob_check.check_samples(mean, self.args, self.actor.model.global_steps + 1)

    def _load(self, micro_batch: MicroBatch) -> Any:
        """The micro-batch as one experience on the device; sets the loss's context."""
        experience = batch_on_device(micro_batch.samples, self.args)
        started = time.perf_counter()
        self.reference.attach(experience, micro_batch.step, micro_batch.index)
        self._seconds["update_reference_log_probs"] += time.perf_counter() - started
        loss_fn = self.actor_loss_fn
        loss_fn.prompts = experience.prompts
        loss_fn.step = self.actor.model.global_steps + 1
        indices = experience.info.pop(micro_batches.SAMPLE_INDEX, ())  # not a metric
        if self.skips is not None:
            self.skips.begin(indices)
        # A NaN at a masked position survives a product with the mask.
        for name in _LOG_PROB_FIELDS:
            if (values := getattr(experience, name)) is not None:
                setattr(experience, name, values.masked_fill(experience.action_mask == 0, 0.0))
        loss_fn.context = dataclasses.replace(
            token_context(experience, self._weighting), entropy_threshold=self._entropy_threshold
        )
        return experience

    def _loss(
        self, experience: Any, micro_batch: MicroBatch, kl_ctl: float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """loss = policy loss + kl_ctl * KL loss - entropy_coef * entropy + aux loss.

        Each term is this micro-batch's share of the optimizer step's mean, times ranks and
        accumulation, by which DeepSpeed divides. ``actor.loss_agg_mode`` chooses the mean of the
        policy loss. KL and entropy have the mean over tokens, as upstream's, but with
        ``prompt-mean`` also that over prompts, as Eq. 5 has the KL. Puts the metrics of the loss
        into ``experience.info``.

        Returns:
            The scalar to run backward from, and its terms by metric name.
        """
        args, mask_BT, info = self.args, experience.action_mask, experience.info
        log_probs_BT, output = policy_forward(
            self, experience, return_output=True, return_entropy=args.actor.entropy_coef is not None
        )
        self._entropy_BT = None
        policy_loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio = self.actor_loss_fn(
            log_probs_BT,
            experience.action_log_probs,
            experience.advantages,
            action_mask=mask_BT,
            rollout_log_probs=experience.rollout_log_probs,
            denominators=micro_batch.denominators,
        )
        loss, losses = policy_loss, {"policy_loss": policy_loss.detach()}
        info["ppo_clip_ratio"], info["ppo_kl"] = clip_ratio.detach(), ppo_kl.detach()
        if vllm_kl is not None:
            info["vllm_kl"], info["is_filter_ratio"] = vllm_kl.detach(), is_filter_ratio.detach()
        if args.algo.kl.use_loss:
            kl_BT, difference_BT = self._kl_of_tokens(log_probs_BT, experience)
            kl_loss = micro_batch.denominators.mean(kl_BT, mask_BT)
            losses["kl"] = kl_loss.detach()
            info["kl"] = losses["kl"]
            info["logprobs_diff"] = masked_mean(difference_BT, mask_BT).detach()
            loss = loss + kl_loss * kl_ctl
        if args.sg.kl_to_engine > 0:
            kl_BT = self._kl(log_probs_BT, experience.rollout_log_probs, kl_estimator="k3")
            engine_kl = micro_batch.denominators.mean(kl_BT, mask_BT)
            losses["engine_kl"] = engine_kl.detach()
            loss = loss + engine_kl * args.sg.kl_to_engine
        if self.aux_loss:
            aux_loss = output.aux_loss * args.actor.aux_loss_coef
            loss = loss + aux_loss * micro_batch.aux_loss_scale
        if args.actor.entropy_coef is not None:
            entropy_BT = self._entropy_BT = output.entropy[:, -mask_BT.shape[1] :]
            entropy = micro_batch.denominators.mean(entropy_BT, mask_BT)
            losses["entropy_loss"] = entropy.detach()
            if args.actor.entropy_coef != 0:
                loss = loss - entropy * args.actor.entropy_coef
        return loss, losses

    def _kl_of_tokens(
        self, log_probs_BT: torch.Tensor, experience: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The KL estimate and log pi - log pi_ref of each response token, both [B, T]."""
        settings = self.args.algo.kl
        if settings.init_coef <= 0:
            return torch.zeros_like(log_probs_BT), torch.zeros_like(log_probs_BT)
        reference_BT = experience.base_action_log_probs
        kl_BT = self._kl(
            log_probs_BT,
            reference_BT,
            log_probs_old=experience.action_log_probs,
            kl_estimator=settings.estimator,
            unbiased_gradient=settings.unbiased_gradient,
        )
        return kl_BT, log_probs_BT.float() - reference_BT.float()

    def _metrics(
        self, experience: Any, micro_batch: MicroBatch, losses: dict[str, torch.Tensor]
    ) -> MicroBatchMetrics:
        """The micro-batch's metrics; adds its loss terms to the optimizer step's row."""
        num_tokens = int(experience.action_mask.sum())
        if self.skips is not None and self.skips.loss_failed:
            num_tokens = 0
        # The row has their mean over the step's micro-batches: undo the share of each.
        per_step = micro_batch.count // self.batching.accumulation
        self._log.add_micro_batch(
            {name: float(loss) * per_step if num_tokens else 0.0 for name, loss in losses.items()}
        )
        means = {**sample_metrics(experience), **losses}
        if num_tokens:
            # From a share of the step's mean to the mean over this micro-batch's tokens.
            step = micro_batch.denominators
            assert step.tokens is not None
            tokens_per_rank = float(step.tokens) / step.ranks
            means |= {k: loss * tokens_per_rank / num_tokens for k, loss in losses.items()}
        latest = {"actor_lr": float(self.actor_scheduler.get_last_lr()[0])}
        return MicroBatchMetrics(means, latest, num_tokens, len(experience.action_mask))

    def _after_step(self, metrics: MicroBatchMetrics) -> None:
        """After DeepSpeed's step: check that it was taken, and log it.

        Raises:
            NonFiniteError: DeepSpeed skipped it.
            TooManySkips: see :class:`sg_rlhf.overlay.learner.nonfinite.RankSkips`.
        """
        engine = self.actor.model
        applied = engine.was_step_applied()
        if self.skips is not None and self.skips.after_step(engine.global_steps, applied):
            self._log.discard_step()
            self.actor_loss_fn.pop_statistics()
            if self._first_step is not None:
                self._first_step.forget_gradients()
            return
        # DeepSpeed skips a step that is not finite without a message. With fp16 that is how it
        # finds the loss scale; otherwise the batch is damaged.
        if self.args.ds.param_dtype != "fp16" and not applied:
            raise self._faults.error(engine.global_steps)
        grad_norm = float(self.strategy.get_grad_norm(self.actor))
        metrics.latest["actor_grad_norm"] = grad_norm
        self._log.close_step(
            engine.global_steps,
            grad_norm,
            metrics.latest["actor_lr"],
            self.actor_loss_fn.pop_statistics(),
        )
        # Only a step that was taken has moved the gradient into the optimizer.
        if self._first_step is not None and applied and grad_norm > 0.0:
            watch, self._first_step = self._first_step, None
            for remark in watch.result():
                print(f"the first optimizer step: {remark}")

    def _keep_entropy(self, _module: Any, _inputs: Any, outputs: Any) -> None:
        """Forward hook: pass the entropies to the loss that follows."""
        entropy = getattr(outputs[1], "entropy", None) if isinstance(outputs, tuple) else None
        if entropy is not None:
            loss_fn = self.actor_loss_fn
            tokens = loss_fn.context.advantages.shape[1]
            loss_fn.context = dataclasses.replace(
                loss_fn.context, entropy=entropy.detach()[:, -tokens:]
            )
