"""The training loop of a run: generate, score, update, sync weights, log, save, evaluate.

:meth:`SGPPOTrainer._train` is the loop, :meth:`SGPPOTrainer.train_step` one rollout step. The
package's docstring lists the steps with the module of each.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openrlhf.trainer.ppo_trainer as upstream
import ray
import transformers
from openrlhf.trainer.ppo_utils.experience import balance_experiences

from sg_rlhf.algo.advantages import WITHIN_PROMPTS
from sg_rlhf.config import EvalSet
from sg_rlhf.config.derived.async_config import async_config
from sg_rlhf.overlay.cluster import placement
from sg_rlhf.overlay.controller import (
    evaluation,
    mixed_scripts,
    run_start,
    wandb_resume,
)
from sg_rlhf.overlay.controller.controller_state import ControllerState
from sg_rlhf.overlay.controller.engine_sync import EngineSync
from sg_rlhf.overlay.controller.evaluation_loop import EvaluationLoop
from sg_rlhf.overlay.controller.metric_log import MetricLog
from sg_rlhf.overlay.controller.rollout_stats import rollout_stats
from sg_rlhf.overlay.controller.sample_log import SampleLog
from sg_rlhf.overlay.learner import nonfinite
from sg_rlhf.overlay.learner.micro_batches import is_balanced
from sg_rlhf.overlay.reporting import activity, graceful_stop
from sg_rlhf.overlay.reporting.errors import NonFiniteError, RunStopped, Terminated
from sg_rlhf.overlay.reporting.timing import PhaseTimer
from sg_rlhf.overlay.rollout import async_buffer, engine_monitor
from sg_rlhf.overlay.settings import rollout_plan, worker_settings
from sg_rlhf.overlay.settings.lookup import value_of
from sg_rlhf.overlay.weight_sync import log_prob_check
from sg_rlhf.run_dir import jsonl_log, timing_keys, weight_versions

#: Metrics of the update that ``rollout/...`` has for the whole rollout.
LOGGED_SAMPLE_KEYS = ("reward", "correct", "response_length", "truncated")


class SGPPOTrainer(upstream.PPOTrainer.__ray_metadata__.modified_class):
    """Upstream's controller with a training loop of our own.

    Upstream's constructor builds the tokenizer, the data loaders, the samples generator and the
    experience maker; its ``ppo_train`` and ``save_best_checkpoint`` are used as they are.
    """

    def __init__(self, pretrain: str, strategy: Any, *args: Any, **kwargs: Any) -> None:
        self._sg = strategy.args.sg
        self._run_dir = Path(self._sg.run_dir) if self._sg.run_dir else None
        if self._run_dir is not None and self._sg.wandb != "disabled":
            wandb_resume.resume_run(self._run_dir)
            if self._sg.wandb == "offline":
                wandb_resume.default_to_offline(self._run_dir, always=True)
        # Seeds the order of the prompts, whose generator state is in the checkpoints. Upstream
        # seeds the ranks only.
        transformers.set_seed(strategy.args.train.seed)
        with activity.phase(activity.CONTROLLER, "reading the data"):
            super().__init__(pretrain, strategy, *args, **kwargs)
        self._global_step = 0
        self._tokens_in_rollout = 0
        self._staleness: dict[str, float] = {}
        self._sync_metrics: dict[str, float] = {}
        self._optimizer_steps: list[dict[str, Any]] = []
        self._async_config = async_config(value_of(self.args))
        self._buffer: async_buffer.AsyncRolloutBuffer | None = None
        self._state = ControllerState(self.samples_generator, self.kl_ctl)
        self._engine_start: engine_monitor.StartMonitor | None = None
        self._clock = self.samples_generator.clock = self.experience_maker.clock = PhaseTimer(
            on_change=self._report_section
        )
        self._log = MetricLog(self.args, self._run_dir, self.tensorboard_logger, self.wandb_logger)
        self._sample_log = SampleLog(self.args, self.tokenizer)
        sets = [EvalSet(**settings) for settings in self._sg.eval_sets]
        self._evaluation = EvaluationLoop(
            self.args,
            [(s, evaluation.dataloader(s, self.args, strategy, self.tokenizer)) for s in sets],
            self.eval_dataloader,
            self.samples_generator,
            self.generate_kwargs,
            self._clock,
            self._log,
        )
        self._plan = rollout_plan.plan(len(self.prompts_dataloader), self.args)

    def _report_section(self, section: str) -> None:
        # The extra sections belong to the rollout before.
        rollout = self._global_step + (section not in timing_keys.EXTRA)
        activity.set_status(rollout, section)

    def get_max_steps(self) -> int:
        """Optimizer steps of the run. Upstream calls this first, before it starts the ranks.

        Raises:
            UnusablePrompts: the data set does not fill one rollout, or suits another model.
        """
        for loader in (self.prompts_dataloader, *self._evaluation.loaders):
            loader.dataset.check()
        rollout_plan.check_prompts(self._plan, self.args)
        if self.vllm_engines:
            self._engine_start = engine_monitor.StartMonitor(
                self.vllm_engines,
                self.actor_model_group._actor_handlers,
                self._run_dir,
                worker_settings.start_seconds(self._sg.engine_timeout),
            )
        return self._plan.optimizer_steps

    # -- the loop ------------------------------------------------------------------------------

    def fit(self, global_step: int = 0) -> None:
        """Train, with an evaluation before the first and after the last update.

        Args:
            global_step: unused; a resumed run takes it from its checkpoint.
        """
        if self._engine_start is not None:
            self._engine_start.stop()
        self._sync = EngineSync(self.args, self.actor_model_group, self.vllm_engines or [])
        self._engines = self.samples_generator.engines = self._sync.pool
        self._evaluation.pop_replacement_count = self._engines.pop_replacement_count
        try:
            with engine_monitor.monitor(self._engines, self._sg.engine_timeout, self._run_dir):
                self._fit()
        finally:  # also if the run is stopped
            self._log.close()

    def _fit(self) -> None:
        states = self.init_checkpoint_states()
        resumed_at = int(states["global_step"])
        repeats_evaluation = False
        if self._run_dir is not None:
            run_start.prepare_run_dir(
                self._run_dir,
                resumed_at,
                self._plan,
                run_start.processes(self),
                self._rate_remarks() if resumed_at else (),
            )
            repeats_evaluation = self._evaluation.was_interrupted(self._run_dir, resumed_at)
        self._restore(states)
        self._clock.pop_row()  # the first rollout's row starts here
        if self._sg.eval_at_start and not resumed_at:
            self._evaluation.run(0)
        if graceful_stop.stop_requested(self._run_dir):
            raise Terminated("before the first rollout")
        if self._async_config is not None:
            self._buffer = self.samples_generator.start_async(
                self._async_config, states, self._engines, self.generate_kwargs
            )
        if resumed_at:
            self.broadcast_to_vllm()
            if repeats_evaluation:
                metrics = self._evaluation.run(resumed_at)
                self.save_best_checkpoint(metrics, resumed_at, dict(states))
            if states["data_loader_state_dict"]:
                self.prompts_dataloader.load_state_dict(states["data_loader_state_dict"])
        self._train(states["episode"], states["total_consumed_prompts"])
        if self._plan.rollouts and not self._global_step:
            raise RunStopped(
                "nothing was trained: algo.dynamic_filtering_enable=true left fewer than "
                f"rollout.batch_size={self.args.rollout.batch_size} of {self._plan.prompts} "
                "prompts in every epoch"
            )
        self._evaluation.run(self._global_step)

    def _rate_remarks(self) -> list[str]:
        rank = self.actor_model_group._actor_handlers[0]
        rates = ray.get(rank.resumed_rates.remote())
        return run_start.rate_remarks(self.args, rates, self._plan.optimizer_steps)

    def _train(self, first_episode: int, consumed_prompts: int) -> None:
        """Run rollout steps until the last epoch is over.

        Args:
            first_episode: epoch to start with.
            consumed_prompts: prompts read from the data set so far.
        """
        for episode in range(first_episode, self.args.train.num_episodes):
            is_over = False
            while not is_over:
                samples, pass_rate, drawn, is_over = self.samples_generator.generate_samples(
                    **self.generate_kwargs
                )
                consumed_prompts += drawn
                if not samples:
                    continue
                metrics, step = self.train_step(samples, self._global_step)
                if self.args.algo.dynamic_filtering_enable:
                    metrics["dynamic_filtering_pass_rate"] = pass_rate
                client_states = {
                    "episode": episode,
                    "global_step": step,
                    "total_consumed_prompts": consumed_prompts,
                    "data_loader_state_dict": self.prompts_dataloader.state_dict(),
                }
                self.save_logs_and_checkpoints(step, metrics, client_states)
                if self._evaluation.is_due(step):
                    eval_metrics = self._evaluation.run(step)
                    self.save_best_checkpoint(eval_metrics, step, client_states)

    def train_step(self, rollout_samples: Any, global_step: int) -> tuple[dict[str, Any], int]:
        """Score a rollout, update the policy on it and sync the weights.

        Args:
            rollout_samples: experiences of one sample each, in the order of the prompts.
            global_step: rollouts trained before.

        Returns:
            Metrics of the step, with ``generated_samples`` (text and reward of one sample) for
            TensorBoard and W&B, and the number of rollouts trained.
        """
        self._tokens_in_rollout = sum(int(s.action_mask.sum()) for s in rollout_samples)
        self._submit_next_rollouts(rollout_samples, global_step)
        maker = self.experience_maker
        maker.rollout = global_step
        # A thread of the async buffer must not restart an engine meanwhile: that calls the ranks.
        with self._engines.trainer_lock:
            experiences = maker.make_experience_batch(rollout_samples)
            with self._clock.section("logging"):
                stats = self._log_rollout(rollout_samples, experiences)
            with self._clock.section("hand_over"):
                self._send_to_ranks(experiences)
            metrics = self.ppo_train(global_step)
            log_prob_check.warn_of_mismatch(metrics, self.args, global_step + 1)
            self._sync.version = global_step + 1
            if self.vllm_engines is not None:
                self.broadcast_to_vllm()
        if "kl" in metrics:
            self.kl_ctl.update(metrics["kl"], int(stats["rollout/num_samples"]))
        self._optimizer_steps = [
            {"global_step": global_step + 1, **row} for row in metrics.pop("sg_optimizer_steps", [])
        ]
        dropped = int(self._staleness.get(weight_versions.DROPPED_TOKENS, 0))
        progress = self._state.count_tokens(
            self._tokens_in_rollout + dropped, int(metrics.get("sg/n_tokens", 0))
        )
        for name in LOGGED_SAMPLE_KEYS:
            metrics.pop(name, None)
        metrics |= stats | self._staleness | progress | self._sync_metrics
        if maker.idle_fraction is not None:
            metrics["batches/waiting_share"] = maker.idle_fraction
        if maker.empty_responses:
            metrics["rollout/empty_responses"] = float(maker.empty_responses)
        metrics["engines/replaced"] = self._engines.pop_replacement_count()
        self._global_step = self.samples_generator.step = global_step + 1
        return metrics, self._global_step

    def _log_rollout(self, rollout_samples: list[Any], experiences: list[Any]) -> dict[str, Any]:
        """Keep samples for ``samples.jsonl``.

        Returns:
            Statistics of the samples by metric name, with ``generated_samples``.
        """
        in_groups = self.args.algo.advantage.estimator in WITHIN_PROMPTS
        group = self.args.rollout.n_samples_per_prompt if in_groups else 1
        stats: dict[str, Any] = rollout_stats(experiences, group)
        responses = self._sample_log.some_responses(experiences)
        stats[mixed_scripts.METRIC] = mixed_scripts.mixed_script_frac(responses)
        without_text = self._sample_log.frac_tokens_without_text(experiences)
        stats["rollout/frac_tokens_without_text"] = without_text
        version_runs = [sample.weight_runs for sample in rollout_samples]
        self._sample_log.collect(
            experiences, version_runs if self._async_config is not None else None
        )
        return stats | {"generated_samples": self._sample_log.example(experiences)}

    def _send_to_ranks(self, experiences: list[Any]) -> None:
        if self.args.train.dynamic_batch_enable and not is_balanced(self.args):
            experiences = balance_experiences(experiences, self.args)
        groups = [g for g in (self.actor_model_group, self.critic_model_group) if g is not None]
        references = []
        for group in groups:
            references += group.async_run_method_batch(method_name="append", experience=experiences)
        ray.get(references)

    def ppo_train(self, global_steps: int) -> dict[str, Any]:
        """Update the policy on the ranks' samples; see :mod:`sg_rlhf.overlay.learner`."""
        with self._clock.section("ppo_train"):
            if self.experience_maker.reference is not None:
                # Not waited for: a rank runs its calls in order.
                self.actor_model_group.async_run_method(
                    method_name="set_reference", results=self.experience_maker.reference
                )
            metrics: dict[str, Any] = super().ppo_train(global_steps)
        with self._clock.section("logging"):
            if self._sg.on_nonfinite == "skip":
                self._log_nonfinite(metrics, global_steps + 1)
            self._sample_log.add_update_values(self.actor_model_group)
        return metrics

    def _log_nonfinite(self, metrics: dict[str, Any], global_step: int) -> None:
        rows = nonfinite.collect_rows(metrics, list(self.experience_maker.skipped_rows))
        self._log.write(jsonl_log.NONFINITE, [{"global_step": global_step, **row} for row in rows])
        if nonfinite.STOP in metrics:
            raise NonFiniteError(metrics[nonfinite.STOP])

    def broadcast_to_vllm(self) -> None:
        """Sync the weights, then check that engines and trainer have the same policy."""
        if self._buffer is not None and not self.args.train.partial_rollout_enable:
            with self._clock.section("generation"):
                self._buffer.drain()
        with self._sync.pool.trainer_lock:
            with (
                self._clock.section("broadcast"),
                activity.phase(activity.CONTROLLER, "syncing weights"),
            ):
                self._sync.send()
            self._sync_metrics = {}
            batch = self._sample_log.check_batch  # empty when a resumed run syncs at its start
            if batch and (sequences := self._sync.sequences_to_check()):
                with self._clock.section("sync_check"):
                    self._sync_metrics = self._sync.check(batch, sequences)

    # -- asynchronous rollouts -----------------------------------------------------------------

    def _submit_next_rollouts(self, samples: list[Any], global_step: int) -> None:
        """Let the engines generate while the ranks train on these samples."""
        if self._buffer is None or self._async_config is None:
            return
        self._staleness = weight_versions.staleness(
            async_buffer.version_runs_and_lengths(samples),
            global_step,
            self._async_config.max_staleness,
            self._buffer.pop_dropped_tokens(),
        )
        self._buffer.submit(global_step, global_step + 1)

    # -- logs and checkpoints ------------------------------------------------------------------

    def save_logs_and_checkpoints(
        self, global_step: int, logs_dict: Any = None, client_states: Any = None
    ) -> None:
        """Log a rollout step, and save a checkpoint if one is due or the run is to stop.

        Args:
            global_step: rollouts trained so far.
            logs_dict: metrics of the step.
            client_states: upstream's state of the controller, for the checkpoint.

        Raises:
            Terminated: the run was asked to stop.
        """
        # The next row's time starts here.
        metrics = {**(logs_dict or {}), **self._clock.pop_row()}
        seconds = metrics[timing_keys.PREFIX + timing_keys.TOTAL]
        metrics["perf/tokens_per_second"] = self._tokens_in_rollout / max(seconds, 1e-9)
        with self._clock.section("logging"):
            self._log.log_step(global_step, metrics, self._optimizer_steps, self._sample_log.rows)
        is_stopping = graceful_stop.stop_requested(self._run_dir)
        if is_stopping or global_step % self.args.ckpt.save_steps == 0:
            self._save_checkpoint(global_step, client_states or {})
        if is_stopping:
            raise Terminated(f"after rollout {global_step}")

    def _save_checkpoint(self, global_step: int, client_states: dict[str, Any]) -> None:
        """Save a checkpoint of every trained model, under upstream's tag and states."""
        client_states = {
            **self._state.add_to(client_states),
            "best_eval_metric_key": self.best_eval_metric_key,
            "best_eval_metric_value": self.best_eval_metric_value,
            "latest_eval_metric_value": self._latest_eval_metric_value,
        }
        settings = {
            "tag": f"global_step{global_step}",
            "metric_value": self._latest_eval_metric_value,
            "metric_key": (
                client_states.get("checkpoint_metric_key") or self.best_eval_metric_key or None
            ),
        }
        with self._clock.section("checkpoint"):
            references = self.actor_model_group.async_run_method(
                method_name="save_checkpoint", client_states=client_states, **settings
            )
            if self.critic_model_group is not None:
                references += self.critic_model_group.async_run_method(
                    method_name="save_checkpoint", **settings
                )
            ray.get(references)

    def save_best_checkpoint(
        self, eval_metrics: Any, global_step: int, client_states: Any = None
    ) -> None:
        """Save a checkpoint if the metric of ``ckpt.best_metric_key`` is the best so far.

        Args:
            eval_metrics: of the evaluation.
            global_step: rollouts trained so far.
            client_states: upstream's state of the controller.
        """
        client_states = self._state.add_to(client_states or {})
        with self._clock.section("checkpoint"):
            super().save_best_checkpoint(eval_metrics, global_step, client_states)

    # -- the start of a run --------------------------------------------------------------------

    def _restore(self, states: dict[str, Any]) -> None:
        """Set the controller's state from a checkpoint's, or from that of a new run."""
        run_start.check_resumable(self.args, states)
        self.restore_best_checkpoint_state(states)
        self._global_step = self.samples_generator.step = self._sync.version = int(
            states["global_step"]
        )
        self._state.restore(states)


#: Upstream starts the controller with ``PPOTrainer.remote(...)``.
RemotePPOTrainer = SimpleNamespace(
    remote=functools.partial(placement.start_controller, ray.remote(SGPPOTrainer))
)
