"""What the ranks of a model agree on: that a checkpoint is written, and which one they load.

Every function without a leading underscore must be called by every rank. Ranks that share a file
system share the reading; where each machine has a disk of its own, each has a manifest there.
"""

from __future__ import annotations

import json
import socket
import uuid
from pathlib import Path
from typing import Any

from sg_rlhf.overlay.checkpoints import manifest
from sg_rlhf.overlay.checkpoints import paths as folders
from sg_rlhf.overlay.reporting import activity
from sg_rlhf.overlay.reporting.errors import CheckpointError

#: In ``metric.json`` of a checkpoint that has a manifest: one without it is no older one then.
MANIFEST_WRITTEN = "manifest"


def finalize(written: Path, final: Path) -> None:
    """Hash a checkpoint that all ranks have written, and give it its name.

    Each rank reads what it wrote. The lowest rank of those that share a file system writes the
    manifest: rank 0, or one a machine where each writes to a disk of its own.

    Args:
        written: the folder as DeepSpeed has left it.
        final: its name from now on.

    Raises:
        OSError: the disk is full, or refuses.
    """
    token = _all_gather_objects(_write_token(written))[0]
    # A network's file system lists a folder from what it remembers, but asks its server for a name
    # that is new. So files are known by those who wrote them, too.
    key = "shared" if (written / token).exists() else socket.gethostname()
    views = _all_gather_objects((key, manifest.names(written)))
    ranks = [rank for rank, (of, _) in enumerate(views) if of == key]
    mine = _rank()
    present = {name for rank in ranks for name in views[rank][1]} - {token}
    share = manifest.assign_files(present, len(ranks))[ranks.index(mine)]
    found = _all_gather_objects(manifest.hash_files(written, share, sync=True))
    if mine == ranks[0]:
        (written / token).unlink(missing_ok=True)
        manifest.write(written, {k: v for rank in ranks for k, v in found[rank].items()})
        folders.publish(written, final)
    _all_gather_objects(None)


def _write_token(written: Path) -> str:
    token = f".{uuid.uuid4().hex}"
    if _rank() == 0:
        (written / token).touch()
    return token


def _rank() -> int:
    import torch

    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _all_gather_objects(mine: Any) -> list[Any]:
    """What each rank has, in order; every rank must call it."""
    import torch

    if not torch.distributed.is_initialized():
        return [mine]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    return found


def select_intact(folder: Path) -> str | None:
    """The newest checkpoint that is whole; the file ``latest`` names it from then on.

    Every rank must call it, and gets the same. A critic takes what its policy took, which looked at
    both.

    Returns:
        Its tag; None in a folder without any.

    Raises:
        CheckpointError: there are some, and none is whole; with what is wrong with each.
    """
    policy = folder.parent / "_actor"
    if folder.name == "_critic" and policy.is_dir():
        return str(_all_gather_objects(folders.latest_tag(policy))[0]) or None
    critic = folder.parent / "_critic"
    with_critic = _all_gather_objects(
        folder.name == "_actor" and bool(folders.resume_candidates(critic))
    )[0]
    wrong: list[str] = []
    tags: list[str] = _all_gather_objects(folders.resume_candidates(folder))[0]
    for tag in tags:
        with activity.phase(activity.TRAINER, f"reading checkpoint {tag}"):
            found = _problem(folder / tag) or (_problem(critic / tag) if with_critic else None)
        if found is None:
            if wrong and _rank() == 0:
                _say(f"checkpoint {'; '.join(wrong)}; resuming from {tag}")
                folders.write_latest(folder, tag)
            _all_gather_objects(None)
            return tag
        wrong.append(f"{folder / tag}: {found}")
    if wrong:
        raise CheckpointError(
            f"no checkpoint is whole: {'; '.join(wrong)}; put a copy of one back, or begin again "
            "in another --run-dir"
        )
    return None


def names(checkpoint: Path) -> list[list[str]]:
    """The files of a checkpoint that each rank sees, by rank; every rank must call it."""
    return _all_gather_objects(manifest.names(checkpoint))


def _problem(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, None if it is whole; the same on every rank.

    Ranks with the same manifest share a file system, and the reading.
    """
    expected: dict[str, manifest.Entry] | None = None
    wrong: str | None = None
    try:
        expected = manifest.read(checkpoint)
    except manifest.InvalidManifest as error:
        wrong = str(error)
    if not checkpoint.is_dir():
        wrong = "the folder is missing"
    elif wrong is None and expected is None and _expects_manifest(checkpoint):
        wrong = f"{manifest.NAME} is missing"
    text = None if expected is None else manifest.render(expected)
    views = _all_gather_objects(text)
    if text is None and wrong is None and any(views):
        wrong = f"{manifest.NAME} is missing on {socket.gethostname()}"
    elif expected is not None:
        ranks = [rank for rank, of in enumerate(views) if of == text]
        share = manifest.assign_files(expected, len(ranks))[ranks.index(_rank())]
        wrong = manifest.first_mismatch(checkpoint, expected, share)
    first = next((of for of in _all_gather_objects(wrong) if of is not None), None)
    if first is None and text is None and _rank() == 0:
        _say(f"checkpoint {checkpoint.name} has no {manifest.NAME}, as older ones: not checked")
    return first


def _expects_manifest(checkpoint: Path) -> bool:
    try:
        return bool(json.loads((checkpoint / "metric.json").read_bytes()).get(MANIFEST_WRITTEN))
    except (OSError, ValueError, AttributeError):
        return False


def say(text: str) -> None:
    """On the terminal, and in the log of the first rank's process."""
    if _rank() == 0:
        _say(text)


def _say(text: str) -> None:
    """On the terminal, and in the log of this process."""
    print(text, flush=True)
    with activity.phase(activity.TRAINER, text):
        pass
