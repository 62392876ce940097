"""A run's metrics and samples in trackio (https://github.com/gradio-app/trackio).

It keeps them on this machine. Install it yourself: no requirements file of this project has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sg_rlhf.overlay.controller.sample_log import TABLE_COLUMNS, table_rows


class TrackioLogger:
    """Has the methods of upstream's loggers."""

    def __init__(self, project: str, name: str) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(project=project, name=name, resume="allow", embed=False)

    def log_train(self, global_step: int, metrics: Mapping[str, Any]) -> None:
        """Log a rollout step's numbers as ``train/NAME``."""
        self._log("train", global_step, metrics)

    def log_eval(self, global_step: int, metrics: Mapping[str, Any]) -> None:
        """Log an evaluation's numbers as ``eval/NAME``."""
        self._log("eval", global_step, metrics)

    def log_samples(self, global_step: int, samples: list[dict[str, Any]]) -> None:
        """Log rows of ``samples.jsonl`` as a table."""
        if samples:
            table = self._trackio.Table(
                columns=list(TABLE_COLUMNS), data=table_rows(global_step, samples)
            )
            self._trackio.log({"train/generated_samples": table}, step=global_step)

    def _log(self, group: str, global_step: int, metrics: Mapping[str, Any]) -> None:
        numbers = {
            f"{group}/{name}": value
            for name, value in metrics.items()
            if isinstance(value, (int, float)) and math.isfinite(value)
        }
        self._trackio.log(numbers, step=global_step)

    def close(self) -> None:
        """Flush and end the run."""
        self._trackio.finish()
