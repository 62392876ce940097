"""Rows of a run's log files, TensorBoard, W&B and trackio."""

from __future__ import annotations

import contextlib
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from openrlhf.utils.logging_utils import TensorboardLogger

from sg_rlhf.common.atomic_io import disk_full_context
from sg_rlhf.overlay.controller import wandb_resume
from sg_rlhf.overlay.controller.trackio_log import TrackioLogger
from sg_rlhf.overlay.reporting import activity
from sg_rlhf.run_dir import alerts, jsonl_log


class MetricLog:
    """Writes ``metrics.jsonl`` and its siblings, upstream's two loggers and trackio's."""

    def __init__(self, args: Namespace, run_dir: Path | None) -> None:
        self._args, self._run_dir = args, run_dir
        wandb = tensorboard = None
        if args.logger.wandb.key:
            wandb = wandb_resume.WandbLogger(args)
        elif args.sg.wandb != "disabled" and run_dir is not None:
            wandb_resume.default_to_offline(run_dir)
            wandb = wandb_resume.WandbLogger(args)
        if args.logger.tensorboard_dir:
            tensorboard = TensorboardLogger(args)
        trackio = None
        if args.sg.trackio and run_dir is not None:
            trackio = TrackioLogger(args.logger.wandb.project, run_dir.resolve().name)
        self._tensorboard, self._wandb, self._trackio = tensorboard, wandb, trackio
        #: What the alerts need of the rows so far.
        self._rows: list[alerts.Row] | None = None

    def write(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Append rows to a file of the run directory."""
        if self._run_dir is not None and rows:
            jsonl_log.append(self._run_dir / name, rows)

    def log_step(
        self,
        global_step: int,
        metrics: dict[str, Any],
        optimizer_steps: list[dict[str, Any]],
        samples: list[dict[str, Any]],
    ) -> None:
        """Log one rollout step."""
        numbers = {k: v for k, v in metrics.items() if k != "generated_samples"}
        alert_metrics = self._alerts(numbers)
        numbers, metrics = {**numbers, **alert_metrics}, {**metrics, **alert_metrics}
        row = {"global_step": global_step, "time": time.time(), **numbers}
        self.write(jsonl_log.METRICS, [row])
        self.write(jsonl_log.OPTIMIZER_STEPS, optimizer_steps)
        self.write(jsonl_log.SAMPLES, [{"global_step": global_step, **s} for s in samples])
        with disk_full_context(Path(self._args.logger.tensorboard_dir or self._run_dir or ".")):
            self._log_optimizer_steps(optimizer_steps)
            if global_step % self._args.logger.logging_steps == 0:
                for logger in self._loggers():
                    logger.log_train(global_step, metrics)
                for logger in (self._wandb, self._trackio):
                    if logger:
                        logger.log_samples(global_step, samples)

    def _loggers(self) -> list[Any]:
        loggers = (self._wandb, self._tensorboard, self._trackio)
        return [logger for logger in loggers if logger]

    def _alerts(self, numbers: dict[str, Any]) -> dict[str, float]:
        """The step's ``alerts/*``; each alert that begins is printed."""
        if self._rows is None:  # not in __init__: a resumed run cuts its rows first
            file = self._run_dir / jsonl_log.METRICS if self._run_dir is not None else None
            self._rows = alerts.needed(jsonl_log.read(file)) if file and file.exists() else []
        before = self._rows[-1] if self._rows else {}
        rows = [*self._rows, numbers]
        active = alerts.check(rows)
        for alert in alerts.begun(before, active):
            activity.show_message(activity.CONTROLLER, f"alert: {alert.message}")
        metrics = alerts.metrics(active)
        self._rows = alerts.needed([*rows[:-1], {**numbers, **metrics}])
        return metrics

    def _log_optimizer_steps(self, rows: list[dict[str, Any]]) -> None:
        steps = ("optimizer_step", "global_step")
        for row in rows:
            values = {
                k: v for k, v in row.items() if isinstance(v, (int, float)) and k not in steps
            }
            step = row["optimizer_step"]
            if self._tensorboard:
                for key, value in values.items():
                    self._tensorboard.writer.add_scalar(f"optimizer/{key}", value, step)
            if self._wandb:
                logs = {f"optimizer/{key}": value for key, value in values.items()}
                self._wandb.handle.log({**logs, "optimizer/step": step})

    def log_evaluation(self, row: dict[str, Any], metrics: dict[str, float]) -> None:
        """Log an evaluation."""
        self.write(jsonl_log.EVALUATIONS, [row])
        for logger in self._loggers():
            logger.log_eval(row["global_step"], metrics)

    def close(self) -> None:
        """Close the loggers."""
        for logger in self._loggers():
            with contextlib.suppress(OSError):  # must not hide why the run stopped
                logger.close()
