"""Upstream's controller with our run directory, evaluation and checks."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openrlhf.trainer.ppo_trainer as upstream
import ray
import torch
import transformers
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call

from sg_rlhf.common.atomic_io import disk_full_context, write_whole
from sg_rlhf.config import EvalSet
from sg_rlhf.overlay.cluster import locations, placement
from sg_rlhf.overlay.controller import evaluation, wandb_resume
from sg_rlhf.overlay.learner import micro_batches, nonfinite
from sg_rlhf.overlay.reporting import activity, graceful_stop, terminal
from sg_rlhf.overlay.reporting.errors import NonFiniteError, RunStopped, SyncError, Terminated
from sg_rlhf.overlay.reporting.timing import PhaseTimer
from sg_rlhf.overlay.rollout import async_buffer, engine_health
from sg_rlhf.overlay.rollout.engine_pool import START_TIMEOUT, EnginePool
from sg_rlhf.overlay.settings import layout_checks
from sg_rlhf.overlay.settings.async_config import AsyncConfig, async_config
from sg_rlhf.overlay.weight_sync import log_prob_check, sender
from sg_rlhf.run_dir import jsonl_log, timing_keys, weight_versions

#: Response tokens so far, in a checkpoint's states; each is a metric ``progress/...`` too.
TOKENS = "sg_tokens"
#: Upstream's means over the update's micro-batches of what ``rollout/...`` says of the rollout.
LOGGED_SAMPLE_KEYS = ("reward", "correct", "response_length", "truncated")
#: Prompts that an evaluation hands to the engines at a time, which queue what they cannot hold.
EVALUATED = 1024


class SGPPOTrainer(upstream.PPOTrainer.__ray_metadata__.modified_class):
    """Writes the run directory, evaluates before and after, and checks every weight sync."""

    tensorboard_logger: Any
    wandb_logger: Any
    #: Of an asynchronous run.
    _lead: AsyncConfig | None = None
    _rollouts: async_buffer.AsyncRolloutBuffer | None = None
    _partial = False
    #: Response tokens of the run so far, and of the latest rollout.
    _tokens: dict[str, int]
    _in_rollout: int

    def __init__(self, pretrain: str, strategy: Any, *args: Any, **kwargs: Any) -> None:
        self._sg = strategy.args.sg
        self._run_dir = Path(self._sg.run_dir) if self._sg.run_dir else None
        self._probe: list[tuple[list[int], list[bool]]] = []
        self._syncs = 0
        self._sync_deadline: float | None = None
        self._sync_metrics: dict[str, float] = {}
        self._rows: list[dict[str, Any]] = []
        self._samples: list[dict[str, Any]] = []
        self._global_step = self._version = 0
        self._runs: list[Any] = []
        self._evaluated: int | None = None
        self._resumed: dict[str, Any] | None = None
        if self._run_dir is not None and self._sg.wandb != "disabled":
            wandb_resume.resume_run(self._run_dir)
            if self._sg.wandb == "offline":
                wandb_resume.default_to_offline(self._run_dir, always=True)
        # The order of the prompts is drawn by a generator that is seeded here, and that the
        # checkpoints hold. Upstream seeds the ranks alone.
        transformers.set_seed(strategy.args.train.seed)
        with activity.phase(activity.CONTROLLER, "reading the data"):
            super().__init__(pretrain, strategy, *args, **kwargs)
        self._lead = async_config(self.args)
        self._partial = self.args.train.partial_rollout_enable
        self._async_metrics: dict[str, float] = {}
        self._clock = self.samples_generator.clock = self.experience_maker.clock = PhaseTimer(
            tell=self._tell
        )
        sets = [EvalSet(**s) for s in self._sg.eval_sets]
        self._eval_sets = [
            (s, evaluation.dataloader(s, self.args, strategy, self.tokenizer)) for s in sets
        ]
        if self._eval_sets:  # upstream evaluates only if it has a loader
            self.eval_dataloader = self._eval_sets[0][1]
        self._plan = layout_checks.plan(len(self.prompts_dataloader), self.args)
        self._open_loggers()

    def _tell(self, part: str) -> None:
        if self._run_dir is not None:
            of_the_latest = part in timing_keys.EXTRA  # it is through, and is saved or evaluated
            activity.set_status(self._global_step + (not of_the_latest), part)

    def get_max_steps(self) -> int:
        """Optimizer steps of the run; the first thing that upstream asks the trainer.

        Raises:
            UnusablePrompts: the data set does not fill one rollout, or suits another model.
        """
        evaluated = [loader for _, loader in self._eval_sets] or [self.eval_dataloader]
        for loader in (self.prompts_dataloader, *filter(None, evaluated)):
            loader.dataset.check()
        layout_checks.check_prompts(self._plan, self.args)
        return self._plan.optimizer_steps

    # -- logging -------------------------------------------------------------------------------

    def _open_loggers(self) -> None:
        """Take the loggers from upstream, so that they stay open for the last evaluation."""
        self._tensorboard = self.tensorboard_logger
        self._wandb = self.wandb_logger or self._offline_wandb()
        self.tensorboard_logger = self.wandb_logger = None

    def _offline_wandb(self) -> Any:
        if self._sg.wandb == "disabled" or self._run_dir is None:
            return None
        wandb_resume.default_to_offline(self._run_dir)
        return wandb_resume.WandbLogger(self.args)

    def _write(self, name: str, rows: list[dict[str, Any]]) -> None:
        if self._run_dir is not None and rows:
            jsonl_log.append(self._run_dir / name, rows)

    def _log_optimizer_steps(self) -> None:
        for row in self._rows:
            step = row["optimizer_step"]
            steps = ("optimizer_step", "global_step")
            values = {
                k: v for k, v in row.items() if isinstance(v, (int, float)) and k not in steps
            }
            if self._tensorboard:
                for key, value in values.items():
                    self._tensorboard.writer.add_scalar(f"optimizer/{key}", value, step)
            if self._wandb:
                logs = {f"optimizer/{key}": value for key, value in values.items()}
                self._wandb.handle.log({**logs, "optimizer/step": step})

    # -- the loop ------------------------------------------------------------------------------

    def fit(self, global_step: int = 0) -> None:
        """Upstream's loop between an evaluation before the first and one after the last update."""
        engines = EnginePool(self.vllm_engines, self._sg.engine_restarts, self._rejoin_engines)
        self._engines = self.samples_generator.engines = engines
        try:
            with engine_health.monitor(engines, self._sg.engine_timeout, self._run_dir):
                self._fit(global_step)
        finally:  # also where the run is stopped: what was logged is in their files
            for logger in (self._wandb, self._tensorboard):
                # What it cannot write any more must not stand for why the run stopped.
                with contextlib.suppress(OSError):
                    if logger:
                        logger.close()

    def _fit(self, global_step: int) -> None:
        states = self.init_checkpoint_states()
        resumed_at = int(states["global_step"])
        machines = self._machines()
        if self._run_dir is not None:
            locations.save(machines, self._run_dir)
            # A run that starts over makes the evaluation before its first rollout again, too.
            jsonl_log.drop_after(self._run_dir, resumed_at or -1)
            self._write_plan(self._run_dir, machines)
            self._find_lost_evaluation(self._run_dir, states)
        self._global_step = self.samples_generator.step = self._version = resumed_at
        # Of an adaptive KL in the reward (algo.kl.target), which upstream begins anew.
        self.kl_ctl.value = states.get("kl_coefficient", self.kl_ctl.value)
        self._tokens = states.get(TOKENS, {"generated_tokens": 0, "trained_tokens": 0})
        if resumed_at and self.args.train.enable_ema:
            raise RunStopped(
                "train.enable_ema=true: upstream's checkpoints do not hold the moving average, "
                "which would begin anew; set it to false"
            )
        if self._lead is None and states.get(async_buffer.BUFFER_KEY, {}).get("units"):
            raise RunStopped(
                "train.async_enable=false: the checkpoint holds prompts that were drawn ahead, "
                "which would not be trained; set it to true"
            )
        self._clock.take()  # what was before the first rollout is none of it
        if self._sg.eval_at_start and not resumed_at:
            self._evaluate_now(0)
        if graceful_stop.stop_requested(self._run_dir):
            raise Terminated("before the first rollout")
        if self._lead is not None:
            self._sample_ahead(self._lead, states)
        super().fit(global_step)
        if self._plan.rollouts and not self._global_step:
            raise RunStopped(
                "nothing was trained: algo.dynamic_filtering_enable=true left fewer than "
                f"rollout.batch_size={self.args.rollout.batch_size} of {self._plan.prompts} "
                "prompts in every epoch"
            )
        if self._sg.eval_at_end:
            self._evaluate_now(self._global_step)

    def _sample_ahead(self, lead: AsyncConfig, states: dict[str, Any]) -> None:
        generator = self.samples_generator

        def sample(unit: async_buffer.PromptBatch, answer: Any) -> None:
            generator.sample_ahead(unit, answer, self._engines, **self.generate_kwargs)

        epochs = self.args.train.num_episodes - states["episode"]
        rollouts = async_buffer.AsyncRolloutBuffer(
            lead, self.prompts_dataloader, epochs, sample, self._engines.ranks
        )
        if loader := states.get("data_loader_state_dict"):  # upstream loads it after its first sync
            rollouts.restore({**states.get(async_buffer.BUFFER_KEY, {}), "loader": loader})
        self._rollouts = generator.ahead = rollouts

    @contextlib.contextmanager
    def _using_ranks(self) -> Iterator[None]:
        """Threads that sample ahead replace no engine meanwhile."""
        rollouts = self._rollouts
        with rollouts.ranks if rollouts is not None else contextlib.nullcontext():
            yield

    def _machines(self) -> dict[str, dict[str, Any]]:
        groups = {
            "policy rank": self.actor_model_group,
            "reference rank": self.reference_model_group,
            "critic rank": self.critic_model_group,
            "reward rank": self.reward_model_group,
        }
        actors = {who: group._actor_handlers for who, group in groups.items() if group is not None}
        places = locations.query_locations({**actors, "rollout engine": self.vllm_engines or []})
        return locations.group_by_node({locations.CONTROLLER: [locations.this_process()], **places})

    def _write_plan(self, run_dir: Path, machines: dict[str, dict[str, Any]]) -> None:
        remarks = [self._plan.remark()] if self._plan.remark() else []
        if len(machines) > 1:
            remarks += locations.format_lines(machines)
        plan = {"rollouts": self._plan.rollouts, "remarks": remarks}
        write_whole(run_dir / terminal.PLAN, json.dumps(plan))
        for remark in remarks:
            print(remark)  # the terminal with sg.verbose, where there is no bar to read the plan

    def train_step(self, rollout_samples: Any, global_step: int) -> tuple[dict[str, Any], int]:
        """One training step: experience, update, weight sync; keeps its optimizer rows for the log.

        Args:
            rollout_samples: upstream's samples of one response each.
            global_step: training steps before this one.

        Returns:
            The row of ``metrics.jsonl``, and the number of this step.
        """
        self.experience_maker.rollout = global_step
        self._begin_sampling_ahead(rollout_samples, global_step)
        in_rollout = sum(int(sample.action_mask.sum()) for sample in rollout_samples)
        with self._using_ranks():
            status = self._train_on(rollout_samples, global_step)
        step = global_step + 1
        for name in LOGGED_SAMPLE_KEYS:
            status.pop(name, None)
        status.update(self._async_metrics)
        status.update(self._count_tokens(in_rollout, status))
        self._clock.between("logging")  # upstream writes the row into its log next
        self._global_step = self.samples_generator.step = step
        self._rows = [{"global_step": step, **row} for row in status.pop("sg_optimizer_steps", [])]
        if self.experience_maker.waiting_share is not None:
            status["batches/waiting_share"] = self.experience_maker.waiting_share
        if self.experience_maker.empty_responses:
            status["rollout/empty_responses"] = float(self.experience_maker.empty_responses)
        status.update(self._sync_metrics)
        status["engines/replaced"] = self._engines.newly_replaced()
        return status, step

    def _train_on(self, rollout_samples: list[Any], global_step: int) -> dict[str, Any]:
        """What upstream's ``train_step`` does, except that no rank gets another one's samples.

        Upstream assigns dynamic batches to ranks once more, by length over the whole rollout. Its
        first optimizer step then has the longest and the shortest samples.
        """
        args = self.args
        experiences = self.experience_maker.make_experience_batch(rollout_samples)
        first = experiences[0]
        text = self.tokenizer.decode(first.sequences[0], skip_special_tokens=True)
        generated = [text, float(first.info["reward"][0])]
        upstream.logger.info(f"Sample: {generated}")
        rollout_stats = self._compute_rollout_stats(experiences)
        if args.train.dynamic_batch_enable and not micro_batches.is_balanced(args):
            experiences = upstream.balance_experiences(experiences, args)
        appended = self.actor_model_group.async_run_method_batch(
            method_name="append", experience=experiences
        )
        if self.critic_model_group is not None:
            appended += self.critic_model_group.async_run_method_batch(
                method_name="append", experience=experiences
            )
        ray.get(appended)
        status = self.ppo_train(global_step)
        if self.vllm_engines is not None:
            self.broadcast_to_vllm()
        if "kl" in status:
            samples = args.rollout.batch_size * args.rollout.n_samples_per_prompt
            self.kl_ctl.update(status["kl"], samples)
        return {**status, **rollout_stats, "generated_samples": generated}

    def _count_tokens(self, in_rollout: int, status: dict[str, Any]) -> dict[str, float]:
        """The ``progress/`` values of a rollout's row."""
        left_out = self.samples_generator.take_filtered()
        left_out += int(self._async_metrics.get(weight_versions.DROPPED_TOKENS, 0))
        added = {
            "generated_tokens": in_rollout + left_out,
            "trained_tokens": int(status.get("sg/n_tokens", 0)),
        }
        self._in_rollout = in_rollout
        self._tokens = {name: count + added[name] for name, count in self._tokens.items()}
        return {f"progress/{name}": float(count) for name, count in self._tokens.items()}

    def _begin_sampling_ahead(self, samples: list[Any], global_step: int) -> None:
        """Have the engines sample while the ranks compute."""
        self._runs = [sample.weight_runs for sample in samples]
        rollouts = self._rollouts
        if rollouts is None or self._lead is None:
            return
        self._async_metrics = weight_versions.staleness(
            async_buffer.version_runs_and_lengths(samples),
            global_step,
            self._lead.bound,
            rollouts.take_dropped(),
        )
        rollouts.ask(global_step, global_step + 1)

    def _with_rollouts_ahead(self, client_states: Any) -> dict[str, Any]:
        """What a checkpoint keeps of the controller, the prompts that were drawn ahead too."""
        rollouts = self._rollouts
        if rollouts is not None:  # what was filtered out meanwhile is not sampled again
            generated = self._tokens["generated_tokens"] + self.samples_generator.take_filtered()
            self._tokens = self._tokens | {"generated_tokens": generated}
        states = {
            **(client_states or {}), "kl_coefficient": self.kl_ctl.value, TOKENS: self._tokens
        }  # fmt: skip
        if rollouts is None or not client_states:
            return states
        kept = rollouts.state()
        return {
            **states,
            "data_loader_state_dict": kept.pop("loader"),
            async_buffer.BUFFER_KEY: kept,
        }

    def save_logs_and_checkpoints(
        self, global_step: int, logs_dict: Any = None, client_states: Any = None
    ) -> None:
        """Write the step's rows, then let upstream save its checkpoint."""
        # Here the rollout's time ends: what follows is the next one's.
        logs_dict = {**(logs_dict or {}), **self._clock.take()}
        seconds = logs_dict[timing_keys.PREFIX + timing_keys.TOTAL]
        logs_dict["perf/tokens_per_second"] = self._in_rollout / max(seconds, 1e-9)
        self._clock.between()
        with self._clock.part("logging"):
            logs = {k: v for k, v in logs_dict.items() if k != "generated_samples"}
            row = {"global_step": global_step, "time": time.time(), **logs}
            self._write(jsonl_log.METRICS, [row])
            self._write(jsonl_log.OPTIMIZER_STEPS, self._rows)
            self._write(
                jsonl_log.SAMPLES, [{"global_step": global_step, **s} for s in self._samples]
            )
            with disk_full_context(Path(self.args.logger.tensorboard_dir or self._run_dir or ".")):
                self._log_optimizer_steps()
                if global_step % self.args.logger.logging_steps == 0:
                    for logger in (self._wandb, self._tensorboard):
                        if logger:
                            logger.log_train(global_step, logs_dict)
        client_states = self._with_rollouts_ahead(client_states)
        ending = graceful_stop.stop_requested(self._run_dir)
        with self._clock.part("checkpoint"), self._saving_every_step(ending):
            super().save_logs_and_checkpoints(global_step, logs_dict, client_states)
        if ending:
            raise Terminated(f"after rollout {global_step}")

    @contextlib.contextmanager
    def _saving_every_step(self, wanted: bool) -> Iterator[None]:
        ckpt = self.args.ckpt
        planned = ckpt.save_steps
        ckpt.save_steps = 1 if wanted else planned
        try:
            yield
        finally:
            ckpt.save_steps = planned

    def save_best_checkpoint(
        self, eval_metrics: Any, global_step: int, client_states: Any = None
    ) -> None:
        """Upstream's, timed."""
        client_states = self._with_rollouts_ahead(client_states)
        with self._clock.part("checkpoint"):
            super().save_best_checkpoint(eval_metrics, global_step, client_states)

    def _compute_rollout_stats(self, experiences: list[Any]) -> dict[str, float]:
        with self._clock.part("logging"):
            stats: dict[str, float] = super()._compute_rollout_stats(experiences)
            correct = [e.info["correct"] for e in experiences if "correct" in e.info]
            if correct:
                stats["rollout/accuracy"] = torch.cat(correct).float().mean().item()
            size = self.args.rollout.n_samples_per_prompt
            if size > 1:
                stats["rollout/frac_reward_zero_std"] = _share_without_signal(experiences, size)
            self._keep_samples(experiences)
        # Upstream sends the samples to the ranks next.
        self._clock.between("hand_over")
        return stats

    def ppo_train(self, global_steps: int) -> dict[str, Any]:
        """Upstream's, timed."""
        self._clock.between()
        with self._clock.part("ppo_train"):
            if self.experience_maker.reference is not None:
                # Not waited for: a rank does what it is told in this order.
                self.actor_model_group.async_run_method(
                    method_name="expect_reference", results=self.experience_maker.reference
                )
            status: dict[str, Any] = super().ppo_train(global_steps)
        self._version = global_steps + 1
        with self._clock.part("logging"):
            if self._sg.on_nonfinite == "skip":
                self._log_nonfinite(status, global_steps + 1)
            self._fill_in_log_probs()
        return status

    def _log_nonfinite(self, status: dict[str, Any], global_step: int) -> None:
        rows = nonfinite.take(status, list(self.experience_maker.left_out))
        self._write(jsonl_log.NONFINITE, [{"global_step": global_step, **row} for row in rows])
        if nonfinite.STOP in status:
            raise NonFiniteError(status[nonfinite.STOP])

    def _fill_in_log_probs(self) -> None:
        """Into the kept samples, from the ranks, where the update's passes computed them."""
        waiting = [sample for sample in self._samples if sample["log_probs"] is None]
        if not waiting:
            return
        sequences = [sample.pop("sequence") for sample in waiting]
        of_ranks = ray.get(
            self.actor_model_group.async_run_method(
                method_name="sampled_log_probs", sequences=sequences
            )
        )
        for sample, found in zip(waiting, zip(*of_ranks, strict=True), strict=True):
            log_probs: list[float] = next((values for values in found if values is not None), [])
            sample["log_probs"] = [round(v, 5) for v in log_probs]

    def _keep_samples(self, experiences: list[Any]) -> None:
        """Keep a few rollouts for ``samples.jsonl`` and for the sync probe."""
        self._samples, self._probe = [], []
        places = [(e, i) for e in experiences for i in range(len(e.sequences))]
        places.sort(key=lambda place: place[0].index[place[1]])  # by prompts, not by lengths
        for e, i in _spread(places, self._sg.samples_per_step):
            self._samples.append(self._sample(e, i))
        # vLLM takes no prompt that fills its context: it could not sample behind it.
        fitting = [
            (e, i)
            for e, i in places
            if int(e.attention_mask[i].sum()) < self.args.data.max_len and e.action_mask[i].any()
        ]
        for e, i in _spread(fitting, log_prob_check.CHECKED_SEQUENCES):
            valid = e.attention_mask[i].bool()
            is_response = e.action_mask[i].bool()[valid[1:]]
            self._probe.append((e.sequences[i][valid].tolist(), is_response.tolist()))

    def _sample(self, e: Any, i: int) -> dict[str, Any]:
        mask = e.action_mask[i].bool()
        tokens = e.sequences[i][1:][mask].tolist()
        dialogue = self._dialogue(e, i)
        log_probs = None if e.action_log_probs is None else e.action_log_probs[i][mask].tolist()
        sequence = e.sequences[i][e.attention_mask[i].bool()].tolist()
        runs = self._runs[e.index[i]] if self._lead is not None else None
        return {
            "prompt": e.prompts[i],
            "label": e.labels[i],
            "response": self.tokenizer.decode(tokens, skip_special_tokens=False),
            **({"dialogue": dialogue} if dialogue else {}),
            "reward": float(e.info["reward"][i]),
            "correct": float(e.info["correct"][i]) if "correct" in e.info else None,
            "advantage": float(e.advantages[i][mask][0]) if bool(mask.any()) else 0.0,
            "tokens": [self.tokenizer.decode([t]) for t in tokens],
            **({"weight_versions": runs} if runs else {}),
            "log_probs": log_probs and [round(v, 5) for v in log_probs],
            **({"sequence": sequence} if log_probs is None else {}),
        }

    def _dialogue(self, e: Any, i: int) -> str:
        """The response with what an environment wrote between its parts; "" if nothing is."""
        written = torch.where(e.action_mask[i].bool())[0]
        if not len(written) or int(written[-1] - written[0]) + 1 == len(written):
            return ""
        tokens = e.sequences[i][1:][written[0] : written[-1] + 1]
        return str(self.tokenizer.decode(tokens.tolist(), skip_special_tokens=False))

    # -- evaluation ----------------------------------------------------------------------------

    def _find_lost_evaluation(self, run_dir: Path, states: dict[str, Any]) -> None:
        """Upstream saves a checkpoint, then evaluates: a kill in between loses the evaluation."""
        step = int(states["global_step"])
        if any(
            row["global_step"] == step for row in jsonl_log.read(run_dir / jsonl_log.EVALUATIONS)
        ):
            self._evaluated = step
        elif step and step % self.args.eval.steps == 0:
            self._resumed = states  # broadcast_to_vllm gives the engines its weights first

    def _evaluate_resumed(self) -> None:
        """The evaluation that the interrupted run lost, and the best checkpoint by it."""
        states, self._resumed = self._resumed, None
        if states is not None:
            logs = self._evaluate_now(int(states["global_step"]))
            self.save_best_checkpoint(logs, int(states["global_step"]), dict(states))

    def _evaluate_now(self, global_step: int) -> dict[str, float]:
        if not self.eval_dataloader or self._evaluated == global_step:
            return {}
        return self.evaluate(
            global_step,
            **{
                **self.generate_kwargs,
                "temperature": self.args.eval.temperature,
                "n_samples_per_prompt": self.args.eval.n_samples_per_prompt,
            },
        )

    def evaluate(self, global_step: int, **generate_kwargs: Any) -> dict[str, float]:
        """Run upstream's evaluation, with accuracies (see the module ``evaluation``)."""
        with self._clock.part("evaluation"):
            return self._evaluate_and_log(global_step, generate_kwargs)

    def _evaluate_and_log(
        self, global_step: int, generate_kwargs: dict[str, Any]
    ) -> dict[str, float]:
        started = time.time()
        rollout = self.args.rollout
        # Upstream sends this many prompts at a time and waits for the slowest of them.
        trained_on, rollout.batch_size = rollout.batch_size, max(EVALUATED, rollout.batch_size)
        try:
            with activity.phase(activity.CONTROLLER, "evaluating"):
                logs: dict[str, float] = (
                    self._evaluate_sets(global_step, generate_kwargs)
                    if self._eval_sets
                    else super().evaluate(global_step, **generate_kwargs)
                )
        finally:
            rollout.batch_size = trained_on
        self._evaluated = global_step
        settings = ("temperature", "n_samples_per_prompt")
        row = {
            "global_step": global_step,
            **({} if self._eval_sets else {key: generate_kwargs[key] for key in settings}),
            "seconds": time.time() - started,
            **logs,
        }
        if replaced := self._engines.newly_replaced():  # the last one has no rollout behind it
            row["engines/replaced"] = replaced
        self._write(jsonl_log.EVALUATIONS, [row])
        for logger in (self._wandb, self._tensorboard):
            if logger:
                logger.log_eval(global_step, logs)
        return logs

    def _evaluate_sets(self, global_step: int, generate_kwargs: dict[str, Any]) -> dict[str, float]:
        by_set = {}
        for eval_set, loader in self._eval_sets:
            self.eval_dataloader = self.samples_generator.eval_dataloader = loader
            settings = {**generate_kwargs, **evaluation.sampling(eval_set)}
            self.samples_generator.purpose = f"eval/{eval_set.name}"
            try:
                by_set[eval_set.name] = super().evaluate(global_step, **settings)
            finally:
                self.samples_generator.purpose = "rollout"
        return evaluation.combine(by_set)

    # -- weight sync ---------------------------------------------------------------------------

    def broadcast_to_vllm(self) -> None:
        """The weight sync, then the check that engine and trainer are one policy."""
        rollouts = self._rollouts
        if rollouts is not None and not self._partial:
            with self._clock.part("generation"):
                rollouts.drain()
        with (
            self._using_ranks(),
            self._clock.part("broadcast"),
            activity.phase(activity.CONTROLLER, "syncing weights"),
        ):
            self._send_weights()
        self._sync_metrics = {}
        self._evaluate_resumed()
        if not self._probe:  # a resumed run syncs before its first rollout
            return
        self._syncs += 1
        every = self._sg.sync_check_every
        if self._syncs % every == 0 if every else self._syncs == 1:
            with self._clock.part("sync_check"):
                self._sync_metrics = self._check_sync()

    def _send_weights(self) -> None:
        """As upstream, which leaves the engines' cache asleep, but with an end to the waiting.

        Raises:
            EngineLost: an engine died and may not be replaced.
            SyncError: the engines or the trainer did not finish in time.
        """
        self._engines.check()
        if self.args.vllm.enable_sleep:
            woken = [engine.wake_up.remote(tags=["weights"]) for engine in self.vllm_engines]
            self._get(woken, "an engine did not wake up for it")
        self._send_to_engines()

    def _rejoin_engines(self) -> None:
        """Connect the engines anew, one of which is, and give them the policy's weights."""
        joined = self.actor_model_group.async_run_method(method_name="join_engines")
        self._get(joined, "the engines were not connected to the trainer again", START_TIMEOUT)
        self._send_to_engines()

    def _send_to_engines(self) -> None:
        if self._partial:
            batch_vllm_engine_call(self.vllm_engines, "pause_generation")
        sent = self.actor_model_group.async_run_method(method_name="broadcast_to_vllm")
        self._get(sent, "a rank of the policy did not finish it")
        if self._lead is not None:
            batch_vllm_engine_call(self.vllm_engines, "weights_are", self._version)
        if self._partial:
            batch_vllm_engine_call(self.vllm_engines, "resume_generation")

    def _get(self, references: list[Any], otherwise: str, most: float = math.inf) -> None:
        if self._sync_deadline is None:
            deadlines = self.actor_model_group.async_run_method(method_name="sync_deadline")
            self._sync_deadline = sender.GRACE_SECONDS + max(ray.get(deadlines))
        deadline = min(self._sync_deadline, most)
        try:
            ray.get(references, timeout=None if deadline == math.inf else deadline)
        except ray.exceptions.GetTimeoutError:
            raise SyncError(
                f"weight sync: {otherwise} within {deadline:g} s (logs/); raise sg.sync_timeout if "
                "it is that slow"
            ) from None

    def _check_sync(self) -> dict[str, float]:
        with self._using_ranks():
            return log_prob_check.check(
                self.actor_model_group, self._engines, self._probe, self.args, self._syncs
            )


def _share_without_signal(experiences: list[Any], size: int) -> float:
    """Of the groups of ``size`` responses, those whose rewards are all equal."""
    groups: defaultdict[int, list[float]] = defaultdict(list)
    for e in experiences:
        for place, reward in zip(e.index, e.info["reward"].tolist(), strict=True):
            groups[place // size].append(reward)
    return sum(len(set(rewards)) == 1 for rewards in groups.values()) / len(groups)


def _spread(places: list[Any], wanted: int) -> list[Any]:
    """Up to ``wanted`` of them at equal distances: neighbours answer the same prompt."""
    wanted = min(wanted, len(places))
    return [places[k * len(places) // wanted] for k in range(wanted)]


#: Upstream starts the controller with ``PPOTrainer.remote(...)``.
RemotePPOTrainer = SimpleNamespace(
    remote=functools.partial(placement.start_controller, ray.remote(SGPPOTrainer))
)
