"""Names of checkpoint folders, and how a folder gets its final name.

A folder is written as ``.NAME.partial`` next to its final path and renamed when it is complete. So
every folder with a final name is complete; the others are left over from interrupted saves.
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
    """The temporary path at which a folder is written."""
    return path.with_name(f".{path.name}.partial")


def _backup_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def step_of(tag: str) -> int:
    """The rollout step after which a checkpoint was saved."""
    match = TAG.fullmatch(tag)
    assert match is not None, tag
    return int(match[2])


def latest_tag(folder: Path) -> str:
    """The tag of the last save; "" without one."""
    latest = folder / LATEST
    return latest.read_text(errors="replace").strip() if latest.is_file() else ""


def write_latest(folder: Path, tag: str) -> None:
    """Write the tag to resume from; on an OSError the earlier tag is unchanged."""
    write_whole(folder / LATEST, tag, sync=True)


def resume_candidates(folder: Path) -> list[str]:
    """Tags to resume from: the last save, even without a folder, then from newest to oldest.

    Of one rollout step, the best checkpoint was saved after the regular one.
    """
    if not folder.is_dir():
        return []
    tags = [p.name for p in folder.iterdir() if TAG.fullmatch(p.name) and p.is_dir()]
    tags.sort(key=lambda tag: (step_of(tag), tag.startswith("best")), reverse=True)
    latest = latest_tag(folder)
    first = [latest] if TAG.fullmatch(latest) else []
    return [*first, *(tag for tag in tags if tag != latest)]


def publish(written: Path, final: Path) -> None:
    """Rename a complete folder to its final name; delete an earlier one. Raises OSError.

    After an error one of the two is complete, see :func:`remove_incomplete`.
    """
    sync_folder(written)
    backup = _backup_path(final)
    if final.exists():
        shutil.rmtree(backup, ignore_errors=True)
        final.rename(backup)
    written.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(backup, ignore_errors=True)


def remove(path: Path) -> None:
    """Delete a complete folder. It is renamed first: half deleted it is no longer complete."""
    leftover = temp_path(path)
    shutil.rmtree(leftover, ignore_errors=True)
    path.rename(leftover)
    shutil.rmtree(leftover)


def remove_incomplete(folder: Path) -> list[str]:
    """Delete what interrupted saves left; a checkpoint about to be replaced gets its name back."""
    deleted = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _LEFTOVER.fullmatch(path.name)
        if match is None:
            continue
        if path.name.endswith(".replaced") and not (folder / match[1]).exists():
            with contextlib.suppress(FileNotFoundError):  # another rank was faster
                path.rename(folder / match[1])
        else:
            shutil.rmtree(path, ignore_errors=True)
            deleted.append(path.name)
    return deleted


def temp_model_path(final: Path) -> Path:
    """Where a Hugging Face folder is written: inside ``final`` if that exists, else next to it."""
    return final / temp_path(final).name if final.is_dir() else temp_path(final)


def tidy_model(final: Path) -> None:
    """Correct the access rights, the order of sets and the README that libraries write."""
    written = temp_model_path(final)
    probe = written / ".mode"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    # safetensors makes files readable by their owner only.
    for path in written.rglob("*"):
        if path.is_file():
            path.chmod(mode)
    # peft writes sets in an order that changes from run to run, and as README an empty template
    # with a path of this machine.
    adapters = written / ADAPTER_CONFIG
    if adapters.is_file():
        settings = json.loads(adapters.read_text())
        for key, value in settings.items():
            if isinstance(value, list) and all(isinstance(each, str) for each in value):
                settings[key] = sorted(value)
        adapters.write_text(json.dumps(settings, indent=2) + "\n")
        (written / "README.md").unlink(missing_ok=True)


def sync_model(final: Path) -> None:
    """Sync a folder to disk: some file systems report a full disk only now."""
    for path in temp_model_path(final).rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def publish_model(final: Path) -> None:
    """Move a complete Hugging Face folder to its final path; raises OSError.

    Other files in an existing folder stay: it may be a user's, or have the checkpoints. There
    ``config.json``, without which nothing reads the folder as a model, is deleted first and written
    last.
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
    """Delete what an interrupted save of a Hugging Face folder left, next to it or in it."""
    for path in (temp_path(final), final / temp_path(final).name):
        shutil.rmtree(path, ignore_errors=True)
