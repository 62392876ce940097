"""The training loop: :meth:`Controller.fit`; :meth:`Controller.train_step` is one rollout step.

The package's docstring lists the steps with the module of each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
import transformers
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController, FixedKLController
from openrlhf.trainer.ray.launcher import RayActorGroup
from openrlhf.utils import get_tokenizer
from ray.actor import ActorHandle

from sg_rlhf.algo.advantages import WITHIN_PROMPTS
from sg_rlhf.config.derived.async_config import async_config
from sg_rlhf.overlay.checkpoints.strategy import Strategy
from sg_rlhf.overlay.controller import evaluation_loop, prompt_dataset, run_start, wandb_resume
from sg_rlhf.overlay.controller.controller_state import ControllerState
from sg_rlhf.overlay.controller.engine_sync import EngineSync
from sg_rlhf.overlay.controller.metric_log import MetricLog
from sg_rlhf.overlay.controller.rollout_stats import (
    MIXED_SCRIPTS,
    mixed_script_frac,
    rollout_stats,
)
from sg_rlhf.overlay.controller.sample_log import SampleLog
from sg_rlhf.overlay.learner import nonfinite
from sg_rlhf.overlay.learner.experience_maker import ExperienceMaker, ScoredRollout
from sg_rlhf.overlay.reporting import activity, graceful_stop
from sg_rlhf.overlay.reporting.errors import NonFiniteError, RunStopped, Terminated
from sg_rlhf.overlay.reporting.timing import PhaseTimer
from sg_rlhf.overlay.rollout import async_buffer, engine_monitor
from sg_rlhf.overlay.rollout.generator import SamplesGenerator
from sg_rlhf.overlay.settings import rollout_plan
from sg_rlhf.overlay.settings.lookup import value_of
from sg_rlhf.overlay.weight_sync import log_prob_check
from sg_rlhf.run_dir import jsonl_log, timing_keys, weight_versions

#: Metrics of the update that ``rollout/...`` has for the whole rollout.
LOGGED_SAMPLE_KEYS = ("reward", "correct", "response_length", "truncated")


class Controller:
    """The Ray actor that runs the training loop. It holds no model.

    ``reference`` is None without a KL, ``reward`` with a reward function or an agent.
    """

    def __init__(
        self,
        strategy: Strategy,
        policy: RayActorGroup,
        reference: RayActorGroup | None,
        reward: RayActorGroup | None,
        engines: list[ActorHandle],
    ) -> None:
        args = self.args = strategy.args
        self._run_dir = Path(args.sg.run_dir) if args.sg.run_dir else None
        self._policy, self._engine_handles = policy, engines
        self._processes = run_start.processes(policy, reference, reward, engines)
        if self._run_dir is not None and args.sg.wandb != "disabled":
            wandb_resume.resume_run(self._run_dir)
            if args.sg.wandb == "offline":
                wandb_resume.default_to_offline(self._run_dir, always=True)
        # Seeds the order of the prompts, whose generator state is in the checkpoints.
        transformers.set_seed(args.train.seed)
        with activity.phase(activity.CONTROLLER, "reading the data"):
            tokenizer = get_tokenizer(
                args.actor.model_name_or_path,
                None,
                "left",
                strategy,
                use_fast=not args.data.disable_fast_tokenizer,
            )
            self._prompts = prompt_dataset.training_loader(strategy, tokenizer)
            eval_prompts = evaluation_loop.read_prompts(strategy, tokenizer)
        kl, initial = args.algo.kl, args.algo.kl.init_coef
        self._kl_controller = (
            AdaptiveKLController(initial, kl.target, kl.horizon)
            if kl.target
            else FixedKLController(initial)
        )
        self._clock = PhaseTimer(on_change=self._report_section)
        self._generator = SamplesGenerator(args, self._prompts, tokenizer)
        self._generator.clock = self._clock
        self._experience_maker = ExperienceMaker(
            args,
            policy,
            reference,
            reward,
            self._kl_controller,
            tokenizer.pad_token_id,
            self._clock,
        )
        self._log = MetricLog(args, self._run_dir)
        self._sample_log = SampleLog(args, tokenizer)
        self._evaluation = evaluation_loop.EvaluationLoop(
            args, *eval_prompts, self._generator, self._clock, self._log
        )
        self._state = ControllerState(
            self._generator, self._kl_controller, args.ckpt.best_metric_key
        )
        self._plan = rollout_plan.plan(len(self._prompts), args)
        self._async_config = async_config(value_of(args))
        self._buffer: async_buffer.AsyncRolloutBuffer | None = None
        self._global_step = 0  # rollouts trained so far
        self._staleness: dict[str, float] = {}
        self._sync_metrics: dict[str, float] = {}

    def _report_section(self, section: str) -> None:
        # The extra sections belong to the rollout before.
        rollout = self._global_step + (section not in timing_keys.EXTRA)
        activity.set_status(rollout, section)

    def prepare(self) -> int:
        """Check the prompts; the number of optimizer steps. Raises UnusablePrompts."""
        for loader in (self._prompts, *self._evaluation.loaders):
            loader.dataset.check()
        rollout_plan.check_prompts(self._plan, self.args)
        return self._plan.optimizer_steps

    # -- the loop ------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train, with an evaluation before the first and after the last update."""
        self._sync = EngineSync(self.args, self._policy, self._engine_handles)
        self._engines = self._generator.engines = self._sync.pool
        self._evaluation.pop_replacement_count = self._engines.pop_replacement_count
        try:
            with engine_monitor.monitor(self._engines, self.args.sg.engine_timeout, self._run_dir):
                states = self._start_or_resume()
                self._train(states["episode"], states["total_consumed_prompts"])
                self._evaluation.run(self._global_step)
        finally:  # also if the run is stopped
            self._log.close()

    def _start_or_resume(self) -> dict[str, Any]:
        """Restore a checkpoint, prepare the run directory, and make the first evaluation."""
        states = self._client_states()
        resumed_at = int(states["global_step"])
        repeats_evaluation = False
        if self._run_dir is not None:
            run_start.prepare_run_dir(
                self._run_dir,
                resumed_at,
                self._plan,
                self._processes,
                self._rate_remarks() if resumed_at else (),
            )
            repeats_evaluation = self._evaluation.was_interrupted(self._run_dir, resumed_at)
        run_start.check_resumable(self.args, states)
        self._state.restore(states)
        self._global_step = self._generator.step = self._sync.version = resumed_at
        self._clock.pop_row()  # the first rollout's row starts here
        if self.args.sg.eval_at_start and not resumed_at:
            self._evaluation.run(0)
        if graceful_stop.stop_requested(self._run_dir):
            raise Terminated("before the first rollout")
        if self._async_config is not None:
            self._buffer = self._generator.start_async(self._async_config, states, self._engines)
        if resumed_at:
            self._sync_weights()
            if repeats_evaluation:
                metrics = self._evaluation.run(resumed_at)
                self._save_if_best(metrics, dict(states))
            if states["data_loader_state_dict"]:
                self._prompts.load_state_dict(states["data_loader_state_dict"])
        return states

    def _client_states(self) -> dict[str, Any]:
        if self.args.ckpt.load_enable and (Path(self.args.ckpt.path) / "_actor").exists():
            loaded: dict[str, Any] = self._call_ranks("get_checkpoint_states")[0]
            return loaded
        return {
            "episode": 0,
            "global_step": 0,
            "total_consumed_prompts": 0,
            "data_loader_state_dict": {},
        }

    def _rate_remarks(self) -> list[str]:
        rates = ray.get(self._policy._actor_handlers[0].resumed_rates.remote())
        return run_start.rate_remarks(self.args, rates, self._plan.optimizer_steps)

    def _train(self, first_episode: int, consumed_prompts: int) -> None:
        """Run rollout steps until the last epoch is over; raises RunStopped, Terminated."""
        for episode in range(first_episode, self.args.train.num_episodes):
            is_over = False
            while not is_over:
                rollout = self._generator.generate_samples()
                consumed_prompts += rollout.prompts_drawn
                is_over = rollout.is_epoch_over
                if not rollout.samples:
                    continue
                metrics, optimizer_steps = self.train_step(rollout.samples)
                if self.args.algo.dynamic_filtering_enable:
                    metrics["dynamic_filtering_pass_rate"] = rollout.pass_rate
                client_states = {
                    "episode": episode,
                    "global_step": self._global_step,
                    "total_consumed_prompts": consumed_prompts,
                    "data_loader_state_dict": self._prompts.state_dict(),
                }
                self._log_and_save(metrics, optimizer_steps, client_states)
                if self._evaluation.is_due(self._global_step):
                    eval_metrics = self._evaluation.run(self._global_step)
                    self._save_if_best(eval_metrics, client_states)
        if self._plan.rollouts and not self._global_step:
            raise RunStopped(
                "nothing was trained: algo.dynamic_filtering_enable=true left fewer than "
                f"rollout.batch_size={self.args.rollout.batch_size} of {self._plan.prompts} "
                "prompts in every epoch"
            )

    # -- one rollout step ----------------------------------------------------------------------

    def train_step(self, samples: list[Experience]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Score a rollout, update the policy on it and sync the weights.

        Returns metrics, with ``generated_samples`` (text and reward of one sample) for TensorBoard
        and W&B; and a row per optimizer step.
        """
        self._tokens_in_rollout = sum(int(s.action_mask.sum()) for s in samples)
        self._submit_next_rollouts(samples)
        # A thread of the async buffer must not restart an engine meanwhile: that calls the ranks.
        with self._engines.trainer_lock:
            scored = self._experience_maker.score(samples, self._global_step)
            with self._clock.section("logging"):
                stats = self._log_rollout(samples, scored.micro_batches)
            with self._clock.section("hand_over"):
                self._send_to_ranks(scored.micro_batches)
            metrics = self._update_policy(scored)
            log_prob_check.warn_of_mismatch(metrics, self.args, self._global_step + 1)
            self._sync.version = self._global_step + 1
            self._sync_weights()
        if "kl" in metrics:
            self._kl_controller.update(metrics["kl"], int(stats["rollout/num_samples"]))
        self._global_step += 1
        self._generator.step = self._global_step
        optimizer_steps = [
            {"global_step": self._global_step, **row}
            for row in metrics.pop("sg_optimizer_steps", [])
        ]
        for name in LOGGED_SAMPLE_KEYS:
            metrics.pop(name, None)
        progress = self._state.count_tokens(
            self._tokens_in_rollout, int(metrics.get("sg/n_tokens", 0))
        )
        metrics |= stats | self._staleness | progress | self._sync_metrics
        if scored.idle_fraction is not None:
            metrics["batches/waiting_share"] = scored.idle_fraction
        if scored.empty_responses:
            metrics["rollout/empty_responses"] = float(scored.empty_responses)
        metrics["engines/replaced"] = self._engines.pop_replacement_count()
        return metrics, optimizer_steps

    def _submit_next_rollouts(self, samples: list[Experience]) -> None:
        """In an asynchronous run, let the engines generate while the ranks train on these."""
        if self._buffer is None or self._async_config is None:
            return
        self._staleness = weight_versions.staleness(
            async_buffer.version_runs_and_lengths(samples),
            self._global_step,
            self._async_config.max_staleness,
        )
        self._buffer.submit(self._global_step, self._global_step + 1)

    def _log_rollout(
        self, samples: list[Experience], experiences: list[Experience]
    ) -> dict[str, Any]:
        """Keep samples for ``samples.jsonl``."""
        in_groups = self.args.algo.advantage.estimator in WITHIN_PROMPTS
        group = self.args.rollout.n_samples_per_prompt if in_groups else 1
        stats: dict[str, Any] = rollout_stats(experiences, group)
        responses = self._sample_log.some_responses(experiences)
        stats[MIXED_SCRIPTS] = mixed_script_frac(responses)
        without_text = self._sample_log.frac_tokens_without_text(experiences)
        stats["rollout/frac_tokens_without_text"] = without_text
        version_runs = [sample.weight_runs for sample in samples]
        self._sample_log.collect(
            experiences, version_runs if self._async_config is not None else None
        )
        return stats | {"generated_samples": self._sample_log.example(experiences)}

    def _send_to_ranks(self, experiences: list[Experience]) -> None:
        ray.get(self._policy.async_run_method_batch(method_name="append", experience=experiences))

    def _update_policy(self, rollout: ScoredRollout) -> dict[str, Any]:
        """Update on the samples that the ranks have; NonFiniteError for too many skipped steps."""
        sleeps = self.args.ds.enable_sleep
        with self._clock.section("ppo_train"):
            if sleeps:
                self._call_ranks("reload_states")
            if rollout.pending_reference is not None:
                # Not waited for: a rank runs its calls in order.
                self._policy.async_run_method(
                    method_name="set_reference", results=rollout.pending_reference
                )
            metrics: dict[str, Any] = {}
            for of_rank in self._call_ranks("update", kl_coefficient=self._kl_controller.value):
                metrics |= of_rank
            if sleeps:
                self._call_ranks("offload_states")
        with self._clock.section("logging"):
            if self.args.sg.on_nonfinite == "skip":
                rows = nonfinite.collect_rows(metrics, rollout.masked_rows)
                step = self._global_step + 1
                self._log.write(jsonl_log.NONFINITE, [{"global_step": step, **r} for r in rows])
                if nonfinite.STOP in metrics:
                    raise NonFiniteError(metrics[nonfinite.STOP])
            self._sample_log.add_update_values(self._policy)
        return metrics

    def _call_ranks(self, method: str, **kwargs: Any) -> list[Any]:
        """Results of a method of all policy ranks."""
        results: list[Any] = ray.get(self._policy.async_run_method(method_name=method, **kwargs))
        return results

    def _sync_weights(self) -> None:
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

    # -- logs and checkpoints ------------------------------------------------------------------

    def _log_and_save(
        self,
        metrics: dict[str, Any],
        optimizer_steps: list[dict[str, Any]],
        client_states: dict[str, Any],
    ) -> None:
        """Log a rollout step, save a checkpoint if due; raises Terminated if the run is to stop."""
        metrics = metrics | self._clock.pop_row()  # the next row's time starts here
        seconds = metrics[timing_keys.PREFIX + timing_keys.TOTAL]
        metrics["perf/tokens_per_second"] = self._tokens_in_rollout / max(seconds, 1e-9)
        with self._clock.section("logging"):
            self._log.log_step(self._global_step, metrics, optimizer_steps, self._sample_log.rows)
        is_stopping = graceful_stop.stop_requested(self._run_dir)
        every = self.args.ckpt.save_steps
        if is_stopping or (every > 0 and self._global_step % every == 0):
            self._save_checkpoint("global_step", client_states)
        if is_stopping:
            raise Terminated(f"after rollout {self._global_step}")

    def _save_if_best(self, eval_metrics: dict[str, float], client_states: dict[str, Any]) -> None:
        """Save a checkpoint if the metric of ``ckpt.best_metric_key`` is the best so far."""
        if self._state.is_best(eval_metrics):
            self._save_checkpoint("best_global_step", client_states)

    def _save_checkpoint(self, name: str, client_states: dict[str, Any]) -> None:
        """Save a checkpoint of the policy."""
        with self._clock.section("checkpoint"):
            self._call_ranks(
                "save_checkpoint",
                tag=f"{name}{self._global_step}",
                client_states=self._state.add_to(client_states),
                metric_value=self._state.latest_metric,
                metric_key=self._state.metric_key or None,
            )
