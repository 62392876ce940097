"""All ranks agree that a checkpoint is written, and which one they load.

Every rank must call every public function. The ranks share the hashing and need one file system:
DeepSpeed loads a checkpoint only where it finds the files of all ranks.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sg_rlhf.overlay.checkpoints import manifest, paths
from sg_rlhf.overlay.reporting import activity
from sg_rlhf.overlay.reporting.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


def finalize(written: Path, final: Path) -> None:
    """Hash a checkpoint that all ranks have written, write its manifest and rename it.

    Raises CheckpointError if a rank does not see the folder, and OSError.
    """
    token = all_gather_objects(_write_token(written))[0]
    # A network file system may list a folder from a cache, but asks its server for a new name. So
    # the token is looked up by name, and the files are those that any rank sees.
    if not all(all_gather_objects((written / token).exists())):
        raise CheckpointError(
            f"checkpoint {final}: not every rank sees this folder: set ckpt.path to a folder on a "
            "file system that all machines share"
        )
    listings = all_gather_objects(manifest.names(written))
    names = {name for listing in listings for name in listing} - {token}
    mine = manifest.assign_files(names, len(listings))[_rank()]
    entries = all_gather_objects(manifest.hash_files(written, mine, sync=True))
    if _rank() == 0:
        (written / token).unlink(missing_ok=True)
        manifest.write(written, {k: v for hashed in entries for k, v in hashed.items()})
        paths.publish(written, final)
    all_gather_objects(None)


def _write_token(written: Path) -> str:
    token = f".{uuid.uuid4().hex}"
    if _rank() == 0:
        (written / token).touch()
    return token


def _rank() -> int:
    import torch

    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _world_size() -> int:
    import torch

    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def all_gather_objects(mine: T, group: ProcessGroup | None = None) -> list[T]:
    """The object of every rank of the group, on every rank, in the order of ranks."""
    import torch

    if not torch.distributed.is_initialized():
        return [mine]
    ranks = torch.distributed.get_world_size(group=group)
    if ranks == 1:
        return [mine]
    per_rank = [mine] * ranks
    torch.distributed.all_gather_object(per_rank, mine, group=group)
    return per_rank


def select_intact(folder: Path) -> str | None:
    """Name the newest intact checkpoint in ``latest``; its tag, None if there are no checkpoints.

    Raises CheckpointError if there are checkpoints and none is intact, with the error of each.
    """
    errors: list[str] = []
    tags: list[str] = all_gather_objects(paths.resume_candidates(folder))[0]
    for tag in tags:
        with activity.phase(activity.TRAINER, f"reading checkpoint {tag}"):
            error = _error_in(folder / tag)
        if error is None:
            if errors:
                report(f"checkpoint {'; '.join(errors)}; resuming from {tag}")
            if errors and _rank() == 0:
                paths.write_latest(folder, tag)
            all_gather_objects(None)
            return tag
        errors.append(f"{folder / tag}: {error}")
    if errors:
        raise CheckpointError(
            f"no checkpoint is intact: {'; '.join(errors)}; restore one from a copy, or start "
            "in another --run-dir"
        )
    return None


def _error_in(checkpoint: Path) -> str | None:
    """The first error in a checkpoint, None if intact; each rank reads its share of the files."""
    error: str | None = None
    expected: dict[str, manifest.Entry] | None = None
    try:
        expected = manifest.read(checkpoint)
    except manifest.InvalidManifest as invalid:
        error = str(invalid)
    if not checkpoint.is_dir():
        error = "the folder is missing"
    elif expected is None and error is None:
        error = f"{manifest.NAME} is missing"
    if expected is not None and error is None:
        mine = manifest.assign_files(expected, _world_size())[_rank()]
        error = manifest.first_mismatch(checkpoint, expected, mine)
    return next((e for e in all_gather_objects(error) if e is not None), None)


def report(text: str) -> None:
    """Print a line on the terminal and in the log of the first rank's process."""
    if _rank() == 0:
        print(text, flush=True)
        with activity.phase(activity.TRAINER, text):
            pass
