"""A home folder for the caches of a user who cannot write to one, as in many containers."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from sg_rlhf.common.resources import nearest_existing

#: Set once HOME is replaced. Workers get both.
VARIABLE = "SG_HOME"


def writable(folder: Path) -> bool:
    """Whether this user can make files in a folder, or make the folder first."""
    there = nearest_existing(folder)
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def ensure() -> None:
    """Set HOME to a folder of this user below TMPDIR if the caches in HOME are not writable.

    ``datasets``, PyTorch, Triton, vLLM and others write to it. Call it before they are imported.
    """
    home = os.path.expanduser("~")
    if home != "~" and writable(Path(home) / ".cache"):
        return
    hub = Path(home) / ".cache" / "huggingface"
    try:
        replacement = _own_folder()
    except OSError:  # no place for temporary files either: what needs one says so
        return
    if hub.is_dir() and writable(hub):  # mounted on its own
        os.environ.setdefault("HF_HOME", str(hub))
    os.environ["HOME"] = os.environ[VARIABLE] = replacement
    print(
        f"HOME={home} is not writable: caches go to {replacement}. Set HOME or HF_HOME to a folder "
        "of yours to keep them",
        file=sys.stderr,
    )


def replaced() -> str:
    """The folder that stands for HOME; "" if HOME is the user's own."""
    return os.environ.get(VARIABLE, "")


def _own_folder() -> str:
    """The same folder in every run, so that a model is downloaded once."""
    folder = Path(tempfile.gettempdir()) / f"sg_rlhf-home-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()  # anyone can make a folder in /tmp, or a link
        if folder.is_symlink() or found.st_uid != os.getuid() or not writable(folder):
            return tempfile.mkdtemp(prefix="sg_rlhf-home-")
    return str(folder)
