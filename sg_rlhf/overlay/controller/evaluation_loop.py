"""Evaluations during training: when they run, on which sets, and where their results go."""

from __future__ import annotations

import dataclasses
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerBase

from sg_rlhf.config import EvalSet
from sg_rlhf.overlay.checkpoints.strategy import Strategy
from sg_rlhf.overlay.controller import evaluation, prompt_dataset
from sg_rlhf.overlay.controller.metric_log import MetricLog
from sg_rlhf.overlay.reporting import activity
from sg_rlhf.overlay.reporting.timing import PhaseTimer
from sg_rlhf.overlay.rollout.generator import SamplesGenerator
from sg_rlhf.overlay.rollout.samples import Sampling
from sg_rlhf.run_dir import jsonl_log


def read_prompts(
    strategy: Strategy, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[tuple[EvalSet, StatefulDataLoader]], StatefulDataLoader | None]:
    """(settings, loader) of each of ``sg.eval_sets``; the loader of ``eval.dataset`` or None."""
    args = strategy.args

    def loader(dataset: str, limit: int | None) -> StatefulDataLoader:
        rows = prompt_dataset.read_prompts(dataset, None, strategy, dataset_split=args.eval.split)
        return prompt_dataset.loader(rows, limit, strategy, tokenizer)

    sets = [EvalSet(**settings) for settings in args.sg.eval_sets]
    if sets or not args.eval.dataset:
        return [(eval_set, loader(eval_set.dataset, eval_set.limit)) for eval_set in sets], None
    return [], loader(args.eval.dataset, args.data.max_samples)


class EvaluationLoop:
    """Evaluates the engines' current weights on ``sets``, else on the prompts of ``loader``."""

    def __init__(
        self,
        args: Namespace,
        sets: list[tuple[EvalSet, StatefulDataLoader]],
        loader: StatefulDataLoader | None,
        generator: SamplesGenerator,
        clock: PhaseTimer,
        log: MetricLog,
    ) -> None:
        self._args, self._sets, self._loader = args, sets, loader
        self._generator = generator
        self._clock, self._log = clock, log
        self._latest_step: int | None = None
        #: Counts the engines that were replaced since the last call.
        self.pop_replacement_count: Callable[[], int] = lambda: 0

    @property
    def loaders(self) -> list[StatefulDataLoader]:
        """Of the prompts of every set."""
        loaders = [loader for _, loader in self._sets] or [self._loader]
        return [loader for loader in loaders if loader is not None]

    def is_due(self, global_step: int) -> bool:
        """Whether the recipe evaluates after this rollout step."""
        every = self._args.eval.steps
        return bool(self.loaders) and every > 0 and global_step % every == 0

    def was_interrupted(self, run_dir: Path, resumed_at: int) -> bool:
        """Whether a kill after a checkpoint has lost the evaluation of its step."""
        rows = jsonl_log.read(run_dir / jsonl_log.EVALUATIONS)
        if any(row["global_step"] == resumed_at for row in rows):
            self._latest_step = resumed_at
            return False
        return bool(resumed_at) and self.is_due(resumed_at)

    def run(self, global_step: int) -> dict[str, float]:
        """Evaluate and log; the metrics by name (:mod:`.evaluation`), {} without prompts."""
        if not self.loaders or self._latest_step == global_step:
            return {}
        with (
            self._clock.section("evaluation"),
            activity.phase(activity.CONTROLLER, "evaluating"),
        ):
            started = time.time()
            settings: dict[str, Any] = {}
            if self._sets:
                metrics = self._evaluate_sets()
            else:
                settings = {
                    "temperature": self._args.eval.temperature,
                    "n_samples_per_prompt": self._args.eval.n_samples_per_prompt,
                }
                sampling = dataclasses.replace(self._generator.sampling, **settings)
                metrics = self._evaluate(self._loader, "rollout", sampling)
            row = {
                "global_step": global_step,
                **settings,
                "seconds": time.time() - started,
                **metrics,
            }
            if replaced := self.pop_replacement_count():  # no rollout follows the last evaluation
                row["engines/replaced"] = replaced
            self._log.log_evaluation(row, metrics)
        self._latest_step = global_step
        return metrics

    def _evaluate_sets(self) -> dict[str, float]:
        return evaluation.combine(
            {
                eval_set.name: self._evaluate(
                    loader,
                    f"eval/{eval_set.name}",
                    evaluation.sampling_of(eval_set, self._generator.sampling),
                )
                for eval_set, loader in self._sets
            }
        )

    def _evaluate(
        self, loader: StatefulDataLoader, namespace: str, sampling: Sampling
    ) -> dict[str, float]:
        samples = self._generator.generate_eval_samples(loader, sampling, namespace)
        return evaluation.compute_eval_metrics(loader, samples, sampling.n_samples_per_prompt)
