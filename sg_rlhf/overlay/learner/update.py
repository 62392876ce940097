"""The update of the policy on one rank: epochs over the replay buffer, micro-batch by micro-batch.

:meth:`~SGActorPPOTrainer.ppo_train` computes the constants of the rollout that the loss needs, then
trains its epochs (twice, over different tokens, for ``sg.update=lopti``).
:meth:`~SGActorPPOTrainer.train_micro_batch` computes the loss, runs backward, and lets DeepSpeed
step at the end of an optimizer step.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import defaultdict
from typing import Any

import torch
from openrlhf.models import PolicyLoss
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.replay_buffer import NaiveReplayBuffer
from ray.actor import ActorHandle
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

from sg_rlhf.algo import lopti
from sg_rlhf.algo.weightings.stare import Stare
from sg_rlhf.algo.weightings.top_entropy import TopEntropy
from sg_rlhf.overlay.checkpoints.strategy import Strategy
from sg_rlhf.overlay.learner import (
    gradient_checks,
    metrics,
    micro_batches,
    nonfinite,
    rollout_constants,
)
from sg_rlhf.overlay.learner.metrics import (
    MicroBatchMetrics,
    PointInTime,
    TokenRecord,
    UpdateLog,
    logged_names,
    sample_metrics,
)
from sg_rlhf.overlay.learner.old_log_probs import RankOldLogProbs
from sg_rlhf.overlay.learner.overlapped_reference import RankReference
from sg_rlhf.overlay.learner.policy_loss import (
    MicroBatchLoss,
    PolicyOutput,
    RolloutConstants,
    loss_batch,
    loss_settings,
    micro_batch_loss,
)
from sg_rlhf.overlay.learner.replay_buffer import (
    BalancedBuffer,
    MicroBatch,
    UpdateBatching,
    batch_on_device,
    policy_forward,
)
from sg_rlhf.overlay.model.log_prob_head import PolicyModel
from sg_rlhf.overlay.weight_sync import log_prob_check
from sg_rlhf.overlay.weight_sync.sync_trainer import SyncTrainer
from sg_rlhf.run_dir import timing_keys
from sg_rlhf.sampling.request_seeds import SeedKey, request_seed


class SGActorPPOTrainer(SyncTrainer):
    """The trainer of one policy rank."""

    def __init__(
        self,
        strategy: Strategy,
        actor: PolicyModel,
        *,
        ema_model: PolicyModel | None,
        actor_optim: Optimizer,
        actor_scheduler: LRScheduler,
        micro_train_batch_size: int,
        vllm_engines: list[ActorHandle] | None = None,
    ) -> None:
        super().__init__(strategy, actor, vllm_engines)
        args = strategy.args
        self.ema_model, self.ema_beta = ema_model, args.train.ema_beta
        self.actor_optim, self.actor_scheduler = actor_optim, actor_scheduler
        self.max_epochs = args.train.max_epochs
        self.aux_loss = args.actor.aux_loss_coef > 1e-8
        correction = args.algo.advantage
        upstream_loss = PolicyLoss(
            clip_eps_low=args.actor.eps_clip_low_high[0],
            clip_eps_high=args.actor.eps_clip_low_high[1],
            dual_clip=args.actor.dual_clip,
            token_level_loss=args.actor.loss_agg_mode == "token-mean",
            policy_loss_type=args.actor.policy_loss_type,
            is_correction_level=correction.is_correction_level,
            is_correction_mode=correction.is_correction_mode,
            is_correction_gating=correction.is_correction_gating,
            is_correction_threshold=correction.is_correction_threshold,
        )
        self.loss_settings = loss_settings(args, upstream_loss)
        self.constants = RolloutConstants()
        self.batching = UpdateBatching(strategy)
        buffer = BalancedBuffer if self.batching.cut_by_controller else NaiveReplayBuffer
        self.replay_buffer = buffer(
            micro_train_batch_size,
            limit=0,
            cpu_offload=True,
            packing_samples=args.ds.packing_samples,
            dynamic_batch=args.train.dynamic_batch_enable,
        )
        self._is_checked = False  # whether the engine's log-probs of this rollout are
        self._log = self._new_log()
        self.token_record = TokenRecord()
        self.reference = RankReference()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        # Of each pass of the optimizer step: its start, the end of the loss, its end.
        self._passes: list[tuple[PointInTime, PointInTime, PointInTime]] = []
        self.skips: nonfinite.RankSkips | None = None
        self._loss_check = nonfinite.LossCheck()
        self._faults = gradient_checks.GradientFaults(
            self.actor_optim, self.actor.model.module.named_parameters
        )
        if self.args.sg.on_nonfinite == "skip":
            self.skips = nonfinite.RankSkips(self.args, self._faults, self.actor_scheduler)
            self.skips.spoil_gradients_of(self.actor.model.module)
        self.old_log_probs = RankOldLogProbs(
            actor, self.replay_buffer, self.batching, args, self.skips
        )
        self._first_step: gradient_checks.UpdateWatch | None = gradient_checks.UpdateWatch(
            self.actor.model.module, self.actor_optim
        )

    def _new_log(self) -> UpdateLog:
        return UpdateLog(self._data_parallel_group)

    @property
    def _data_parallel_group(self) -> ProcessGroup:
        group: ProcessGroup = self.strategy.ds_device_mesh["dp"].get_group()
        return group

    # ---- the update of one rollout

    def ppo_train(self, kl_ctl: float) -> dict[str, Any]:
        """Train on the replay buffer for ``train.max_epochs`` epochs.

        Returns metrics by name, means over all ranks; ``sg_optimizer_steps`` has a row per
        optimizer step. Raises NonFiniteError, or FrozenError if the run's first step did not train
        every tensor.
        """
        self._log = self._new_log()
        self._seconds.clear()
        self.token_record.clear()
        self._is_checked = False
        # Dropout draws the same numbers in a run that was resumed.
        key = SeedKey(self.args.train.seed, "update", self.actor.model.global_steps, 0)
        torch.manual_seed(request_seed(key, torch.distributed.get_rank()))
        metrics.reset_memory_peak()
        self._prepare_rollout(kl_ctl)
        try:
            train = self._train_lopti if self.args.sg.update == "lopti" else self._train_epochs
            status: dict[str, Any] = dict(train())
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
        status |= metrics.max_memory_over_ranks(self.strategy)
        status |= {timing_keys.PREFIX + k: self._seconds[k] for k in timing_keys.OF_THE_RANK}
        status["sg_optimizer_steps"] = self._log.rows
        return status

    def _prepare_rollout(self, kl_ctl: float) -> None:
        """Compute the old log-probs and constants of the whole rollout that the loss needs."""
        started = time.perf_counter()
        if self.old_log_probs.compute_missing():
            self._seconds["update_old_log_probs"] = time.perf_counter() - started
        weighting, items = self.loss_settings.weighting, self.replay_buffer.items
        group = self._data_parallel_group
        self.constants = RolloutConstants(kl_coef=kl_ctl)
        if isinstance(weighting, Stare):
            cuts = rollout_constants.surprisal_cuts(items, group, weighting)
            self.constants = dataclasses.replace(self.constants, surprisal_cuts=cuts)
        if weighting.normalize == "batch_mean":
            mean = rollout_constants.mean_weight(items, group, self.loss_settings, self.constants)
            self.constants = dataclasses.replace(self.constants, mean_weight=mean)
        if isinstance(weighting, TopEntropy):
            steps = self.batching.steps(self.replay_buffer)
            batches = ([items[i] for i in indices] for step in steps for indices in step)
            threshold = rollout_constants.entropy_threshold(
                batches, group, self.actor, weighting, self.args
            )
            self.constants = dataclasses.replace(self.constants, entropy_threshold=threshold)

    def _train_epochs(self) -> dict[str, float]:
        """The epochs over the replay buffer; returns means over micro-batches and ranks."""
        for epoch in range(self.max_epochs):
            progress = tqdm(
                self.batching.epoch(self.replay_buffer),
                desc=f"Train epoch [{epoch + 1}/{self.max_epochs}]",
                disable=not self.strategy.is_rank_0(),
            )
            for micro_batch in progress:
                self.train_micro_batch(micro_batch)
                if micro_batch.is_last:
                    progress.set_postfix(self._log.progress())
        return self._log.pop_means()

    def _train_lopti(self) -> dict[str, float]:
        """Low-probability tokens first, then the others; omits a pass without a token."""
        constants, statuses = self.constants, []
        for name in lopti.PASSES:
            if not rollout_constants.count_lopti_tokens(
                self.replay_buffer.items,
                self._data_parallel_group,
                self.args.sg.lopti_threshold,
                name,
            ):
                continue
            first_row = len(self._log.rows)
            self.constants = dataclasses.replace(constants, lopti_pass=name)
            statuses.append(self._train_epochs())
            for row in self._log.rows[first_row:]:
                row["pass"] = name
        if not statuses:  # no token takes part: a step that is refused or skipped, as always
            return self._train_epochs()
        return {
            key: statistics.fmean(status[key] for status in statuses if key in status)
            for key in statuses[-1]
        }

    # ---- one micro-batch

    def train_micro_batch(self, micro_batch: MicroBatch) -> None:
        """Forward, loss, backward; with the last micro-batch of a step, the optimizer step.

        Only the end of an optimizer step waits for the device.
        """
        engine = self.actor.model
        steps_before = engine.global_steps
        self.actor.train()
        if self.batching.is_variable:
            # ZeRO 1 and 2 would keep the gradient of the last micro-batch alone.
            engine.set_gradient_accumulation_boundary(micro_batch.is_last)
        experience = batch_on_device(micro_batch.samples, self.args)
        experience.info.pop(micro_batches.SAMPLE_INDEX, None)  # not a metric
        started = time.perf_counter()
        self.reference.attach(experience, micro_batch.step, micro_batch.index)
        self._seconds["update_reference_log_probs"] += time.perf_counter() - started
        forward_started = metrics.now()
        needs_old = experience.action_log_probs is None
        output = self._loss(experience, micro_batch)
        loss_done = metrics.now()
        failed = self._loss_check.add(micro_batch.samples, output, experience)
        loss = output.loss
        if self.skips is not None:
            loss = self.skips.spoil_loss(loss, failed, micro_batch.samples)
        if self.args.sg.samples_per_step:
            self.token_record.keep(
                micro_batch.samples,
                log_probs=output.old_log_probs_BT,
                update_log_probs=output.log_probs_BT,
                entropies=output.entropy_BT,
            )
        self.strategy.backward(loss, self.actor, self.actor_optim)
        self._passes.append((forward_started, loss_done, metrics.now()))
        self._log.add(self._metrics(experience, micro_batch, output, failed))
        if micro_batch.is_last:
            self._check_step()
        if micro_batch.is_last or not self.batching.is_variable:
            # With a fixed number of micro-batches DeepSpeed counts them itself.
            self.strategy.optimizer_step(
                self.actor_optim, self.actor, self.actor_scheduler, name="actor"
            )
            if self.ema_model:
                self.strategy.moving_average(self.actor, self.ema_model, self.ema_beta, "cuda")
        if needs_old and self.max_epochs > 1:
            self.old_log_probs.store(micro_batch.samples, output.old_log_probs_BT)
        self._log.set_latest(actor_lr=float(self.actor_scheduler.get_last_lr()[0]))
        if engine.global_steps > steps_before:
            self._after_step()

    def _loss(self, experience: Experience, micro_batch: MicroBatch) -> MicroBatchLoss:
        """The loss of a micro-batch, after the policy's forward pass over it."""
        settings = self.loss_settings
        batch = loss_batch(experience, settings.weighting, micro_batch.denominators)
        log_probs_BT, output = policy_forward(
            self.actor, experience, return_output=True, return_entropy=settings.needs_entropy
        )
        entropy_BT = None
        if settings.needs_entropy:
            entropy_BT = output.entropy[:, -batch.mask_BT.shape[1] :]
        aux_loss = output.aux_loss if self.aux_loss else None
        return micro_batch_loss(
            batch,
            PolicyOutput(log_probs_BT, entropy_BT, aux_loss),
            settings,
            self.constants,
            micro_batch.aux_loss_scale,
        )

    def _metrics(
        self,
        experience: Experience,
        micro_batch: MicroBatch,
        output: MicroBatchLoss,
        failed: torch.Tensor,
    ) -> MicroBatchMetrics:
        step = micro_batch.denominators
        assert step.tokens is not None
        mismatch = torch.zeros(2, dtype=torch.float64, device=failed.device)
        if output.mismatch is not None:
            mismatch = torch.stack(
                [output.mismatch["mismatch_abs"], output.mismatch["mismatch_tokens"]]
            )
        return MicroBatchMetrics(
            means={**sample_metrics(experience), **output.metrics, **output.terms},
            terms=output.terms,
            terms_per_step=micro_batch.count // self.batching.accumulation,
            tokens_per_rank=step.tokens / step.ranks,
            statistics=output.statistics,
            mismatch=mismatch,
            failed=failed,
            num_tokens=micro_batch.num_tokens,
            num_samples=len(micro_batch.samples),
        )

    def _check_step(self) -> None:
        """Read what the step's micro-batches summed, and check it before the optimizer step.

        Raises NonFiniteError, or SyncError if the engine did not sample by the trainer's weights.
        """
        step = self.actor.model.global_steps + 1
        totals = self._log.reduce()
        for started, loss_done, done in self._passes:
            self._seconds["update_forward"] += metrics.seconds(started, loss_done)
            self._seconds["update_backward"] += metrics.seconds(loss_done, done)
        self._passes.clear()
        self._loss_check.finish(totals.failed, step, self.skips)
        if not self._is_checked:
            self._is_checked = True
            if self.vllm_engines is not None and totals.mismatch is not None:
                log_prob_check.check_samples(totals.mismatch, self.args, step)

    def _after_step(self) -> None:
        """After DeepSpeed's step: check that it was taken, and log it.

        Raises NonFiniteError if DeepSpeed skipped it, or TooManySkips.
        """
        engine = self.actor.model
        applied = engine.was_step_applied()
        if self.skips is not None and self.skips.after_step(engine.global_steps, applied):
            self._log.discard_step()
            if self._first_step is not None:
                self._first_step.forget_gradients()
            return
        # DeepSpeed skips a step that is not finite without a message. With fp16 that is how it
        # finds the loss scale; otherwise the batch is damaged.
        if self.args.ds.param_dtype != "fp16" and not applied:
            raise self._faults.error(engine.global_steps)
        grad_norm = float(self.strategy.get_grad_norm(self.actor))
        rate = float(self.actor_scheduler.get_last_lr()[0])
        self._log.set_latest(actor_grad_norm=grad_norm)
        self._log.close_step(engine.global_steps, grad_norm, rate)
        # Only a step that was taken has moved the gradient into the optimizer.
        if self._first_step is not None and applied and grad_norm > 0.0:
            watch, self._first_step = self._first_step, None
            for remark in watch.result():
                print(f"the first optimizer step: {remark}")
