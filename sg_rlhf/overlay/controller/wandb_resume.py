"""One wandb run for one run directory, however often the run is started."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from openrlhf.utils import logging_utils as upstream

from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.overlay.controller.sample_table import COLUMNS, table_rows

#: In the run directory: the id of its run in wandb.
FILE = "wandb_run_id"


class WandbLogger(upstream.WandbLogger):
    """Upstream's logger, with a table of samples for each rollout.

    Upstream logs the samples of all earlier rollouts again, so files, upload and time of a run of N
    rollouts grow with N squared.
    """

    def log_train(self, global_step: int, logs_dict: dict[str, Any]) -> None:
        """Log a rollout's metrics, without its sample."""
        numbers = {k: v for k, v in logs_dict.items() if k != "generated_samples"}
        super().log_train(global_step, numbers)

    def log_samples(self, global_step: int, samples: list[dict[str, Any]]) -> None:
        """Log rows of ``samples.jsonl`` as the table ``train/generated_samples``."""
        if samples:
            table = self.handle.Table(columns=list(COLUMNS), data=table_rows(global_step, samples))
            self.handle.log({"train/generated_samples": table})


def default_to_offline(run_dir: Path, always: bool = False) -> None:
    """Without a key, keep wandb's files in the run directory and send nothing.

    Args:
        always: with a key as well (``sg.wandb=offline``).
    """
    without_key = not os.environ.get("WANDB_API_KEY") and os.environ.get("WANDB_MODE") != "disabled"
    if always or without_key:
        os.environ["WANDB_MODE"] = "offline"
    os.environ.setdefault("WANDB_DIR", str(run_dir))
    os.environ.setdefault("WANDB_SILENT", "true")


def resume_run(run_dir: Path) -> None:
    """Make wandb resume the run of this directory; its id is kept in the directory.

    An exported ``WANDB_RUN_ID`` has precedence. Offline, each start writes a folder with the same
    id, and ``wandb sync`` joins them.
    """
    if os.environ.get("WANDB_RUN_ID"):
        return
    file = run_dir / FILE
    if not file.is_file():
        write_whole(file, uuid.uuid4().hex[:12] + "\n")
    os.environ["WANDB_RUN_ID"] = file.read_text().strip()
    os.environ.setdefault("WANDB_RESUME", "allow")
