"""The names of checkpoints on the disk: which count, in which order, and how one gets its name.

A folder is written as ``.NAME.partial`` beside its final place and renamed when it is whole. So
what has a final name is whole, and what has another is a leftover of a save that was interrupted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path

from sg_rlhf.common.atomic_io import sync_folder, write_whole
from sg_rlhf.data_io.model_folder import ADAPTER_CONFIG

TAG = re.compile(r"(best_)?global_step(\d+)")
#: The file that names the checkpoint of the last save.
LATEST = "latest"
_LEFTOVER = re.compile(rf"\.({TAG.pattern}(?:_hf)?)\.(partial|replaced)")
#: Without it nothing reads a Hugging Face folder.
_CONFIG = "config.json"


def temp_path(path: Path) -> Path:
    """Where a folder is written before it has its name."""
    return path.with_name(f".{path.name}.partial")


def _backup_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def step_of(tag: str) -> int:
    """The rollout after which a checkpoint was saved."""
    found = TAG.fullmatch(tag)
    assert found is not None, tag
    return int(found[2])


def latest_tag(folder: Path) -> str:
    """The checkpoint of the last save; "" without one."""
    named = folder / LATEST
    return named.read_text(errors="replace").strip() if named.is_file() else ""


def write_latest(folder: Path, tag: str) -> None:
    """Name the checkpoint to resume from.

    Raises:
        OSError: it cannot be written; the name that was there is still there.
    """
    write_whole(folder / LATEST, tag, sync=True)


def resume_candidates(folder: Path) -> list[str]:
    """Tags to resume from, the best choice first: the last save, then from the newest.

    The checkpoint of an evaluation was saved after the plain one of the same rollout. What the file
    ``latest`` names is among them though it be gone, so that somebody says so.
    """
    if not folder.is_dir():
        return []
    tags = [p.name for p in folder.iterdir() if TAG.fullmatch(p.name) and p.is_dir()]
    tags.sort(key=lambda tag: (step_of(tag), tag.startswith("best")), reverse=True)
    named = latest_tag(folder)
    first = [named] if TAG.fullmatch(named) else []
    return [*first, *(tag for tag in tags if tag != named)]


def publish(written: Path, final: Path) -> None:
    """Give a folder that is whole its name. One of that name goes, and only then.

    Raises:
        OSError: the disk refuses; one of the two is whole, see :func:`remove_leftovers`.
    """
    sync_folder(written)
    aside = _backup_path(final)
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    written.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def remove(path: Path) -> None:
    """Delete a folder that has its name: that first, as what is half deleted is not whole."""
    leftover = temp_path(path)
    shutil.rmtree(leftover, ignore_errors=True)
    path.rename(leftover)
    shutil.rmtree(leftover)


def remove_incomplete(folder: Path) -> list[str]:
    """Delete what interrupted saves left in a folder of checkpoints.

    Returns:
        The names of what was deleted. A checkpoint that was about to be replaced has its own back.
    """
    gone = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        found = _LEFTOVER.fullmatch(path.name)
        if found is None:
            continue
        if path.name.endswith(".replaced") and not (folder / found[1]).exists():
            with contextlib.suppress(FileNotFoundError):  # another rank was faster
                path.rename(folder / found[1])
        else:
            shutil.rmtree(path, ignore_errors=True)
            gone.append(path.name)
    return gone


def temp_model_path(final: Path) -> Path:
    """Where a plain Hugging Face folder is written before it has its name.

    Inside a folder that is there already, which may be a mount or a link; else beside it.
    """
    return final / temp_path(final).name if final.is_dir() else temp_path(final)


def tidy_model(final: Path) -> None:
    """Correct what the libraries write into a plain Hugging Face folder.

    safetensors gives its files to their owner alone: they get the mode that the umask gives. Of
    LoRA adapters peft writes sets, whose order changes from run to run: they are sorted. Its README
    is an empty template with a path of this machine: it is deleted.
    """
    written = temp_model_path(final)
    probe = written / ".mode"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for path in written.rglob("*"):
        if path.is_file():
            path.chmod(mode)
    adapters = written / ADAPTER_CONFIG
    if adapters.is_file():
        settings = json.loads(adapters.read_text())
        for key, value in settings.items():
            if isinstance(value, list) and all(isinstance(each, str) for each in value):
                settings[key] = sorted(value)
        adapters.write_text(json.dumps(settings, indent=2) + "\n")
        (written / "README.md").unlink(missing_ok=True)


def sync_model(final: Path) -> None:
    """Bring the files of a plain Hugging Face folder to the disk.

    Raises:
        OSError: they do not fit, which some file systems say only now.
    """
    for path in temp_model_path(final).rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def publish_model(final: Path) -> None:
    """Give a plain Hugging Face folder that is whole its name.

    What else is in a folder of that name stays: it may be a folder of the user's, or have the
    checkpoints in it. There, files take the place of those of their names, and ``config.json``,
    without which nobody takes the folder for a model, goes first and comes last.

    Raises:
        OSError: the disk refuses; what has the name is whole, or has no ``config.json``.
    """
    written = temp_model_path(final)
    if written.parent != final:
        publish(written, final)
        return
    (final / _CONFIG).unlink(missing_ok=True)
    sync_folder(final)
    for path in sorted(written.rglob("*"), key=lambda path: path.name == _CONFIG):
        target = final / path.relative_to(written)
        if path.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
    sync_folder(final)
    shutil.rmtree(written)


def remove_partial_model(final: Path) -> None:
    """Delete what an interrupted save of a plain folder left, beside it or in it."""
    for path in (temp_path(final), final / temp_path(final).name):
        shutil.rmtree(path, ignore_errors=True)
