"""One run of wandb for one run directory, however often it is started."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from sg_rlhf.common.files import write_whole

#: In the run directory: the id of its run in wandb.
FILE = "wandb_run_id"


def go_on(run_dir: Path) -> None:
    """Have wandb go on with the directory's run, or begin it under an id that is kept there.

    An id that the user exported (``WANDB_RUN_ID``) wins. Offline, the parts of a run are folders
    of one id, which ``wandb sync`` puts together.
    """
    if os.environ.get("WANDB_RUN_ID"):
        return
    file = run_dir / FILE
    if not file.is_file():
        write_whole(file, uuid.uuid4().hex[:12] + "\n")
    os.environ["WANDB_RUN_ID"] = file.read_text().strip()
    os.environ.setdefault("WANDB_RESUME", "allow")
