"""One wandb run for one run directory, however often the run is started."""

from __future__ import annotations

import os
import shlex
import uuid
from argparse import Namespace
from pathlib import Path
from typing import Any

import wandb
from openrlhf.utils import logging_utils as upstream

from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.common.redaction import redact_text
from sg_rlhf.common.text import single_line, truncate
from sg_rlhf.overlay.controller.sample_log import TABLE_COLUMNS, table_rows
from sg_rlhf.overlay.reporting import activity

#: In the run directory: the id of its run in wandb.
FILE = "wandb_run_id"
#: W&B waits 90 s at the start, and without a limit at the end, by default.
LIMITS = {
    "WANDB_INIT_TIMEOUT": "30",
    "WANDB_FINISH_TIMEOUT": "300",
    "WANDB_FINISH_TIMEOUT_RAISES": "true",
}


class WandbLogger(upstream.WandbLogger):  # type: ignore[misc]  # upstream has no types
    """Upstream's logger, with a table of samples per rollout; upstream logs earlier ones again."""

    def __init__(self, args: Namespace) -> None:
        """Start the run, offline if W&B's server does not answer or refuses the key."""
        for name, value in LIMITS.items():
            os.environ.setdefault(name, value)
        try:
            super().__init__(args)
        except wandb.Error as error:
            if os.environ.get("WANDB_MODE") == "offline":
                raise
            wandb.teardown()  # else the settings of the failed start stay
            default_to_offline(Path(args.sg.run_dir or "."), always=True)
            super().__init__(args)
            reason = truncate(redact_text(single_line(error)), 200)
            _show(
                f"W&B did not start online ({reason}); this start is logged offline. Upload it "
                f"later: {self._sync()}; or set sg.wandb=offline"
            )

    def _sync(self) -> str:
        """The command that uploads the files of this start."""
        return f"wandb sync {shlex.quote(str(Path(self.handle.run.dir).parent))}"

    def close(self) -> None:
        """End the run; without a network its rest stays in the run directory."""
        sync = self._sync()
        try:
            super().close()
        except TimeoutError:
            _show(f"W&B did not take the rest of the run in time. Upload it: {sync}")

    def log_train(self, global_step: int, logs_dict: dict[str, Any]) -> None:
        """Log a rollout's metrics, without its sample."""
        numbers = {k: v for k, v in logs_dict.items() if k != "generated_samples"}
        super().log_train(global_step, numbers)

    def log_samples(self, global_step: int, samples: list[dict[str, Any]]) -> None:
        """Log rows of ``samples.jsonl`` as the table ``train/generated_samples``."""
        if samples:
            table = self.handle.Table(
                columns=list(TABLE_COLUMNS), data=table_rows(global_step, samples)
            )
            self.handle.log({"train/generated_samples": table})


def _show(line: str) -> None:
    activity.show_message(activity.CONTROLLER, line)


def default_to_offline(run_dir: Path, always: bool = False) -> None:
    """Without a key, keep wandb's files in the run directory and send nothing."""
    without_key = not os.environ.get("WANDB_API_KEY") and os.environ.get("WANDB_MODE") != "disabled"
    if always or without_key:
        os.environ["WANDB_MODE"] = "offline"
    os.environ.setdefault("WANDB_DIR", str(run_dir))
    os.environ.setdefault("WANDB_SILENT", "true")


def resume_run(run_dir: Path) -> None:
    """Make wandb resume the run whose id the directory keeps; ``WANDB_RUN_ID`` has precedence."""
    if os.environ.get("WANDB_RUN_ID"):
        return
    file = run_dir / FILE
    if not file.is_file():
        write_whole(file, uuid.uuid4().hex[:12] + "\n")
    os.environ["WANDB_RUN_ID"] = file.read_text().strip()
    os.environ.setdefault("WANDB_RESUME", "allow")
