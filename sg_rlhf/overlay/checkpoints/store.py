"""Saves, loads and prunes checkpoints.

A save writes ``ckpt.path/_actor/{tag}`` to resume from and, with ``ckpt.save_hf``, a plain Hugging
Face folder ``ckpt.path/{tag}_hf`` to evaluate. Tags are ``global_step20`` and, for the best
evaluation, ``best_global_step20``. Each folder is written under a temporary name, synced to disk
and renamed (:mod:`.paths`). Upstream writes under the final name, deletes before it saves, and does
not prune the second kind.
"""

from __future__ import annotations

import gc
import re
import shutil
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sg_rlhf.common.atomic_io import disk_full_context
from sg_rlhf.overlay.checkpoints import consensus, paths, reshard
from sg_rlhf.overlay.reporting.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from openrlhf.utils.deepspeed import DeepspeedStrategy

_HF_FOLDER = re.compile(rf"({paths.TAG.pattern})_hf")
#: Suffix of the buffers that DeepSpeed's offloading adds to an optimizer's state.
_OFFLOAD_BUFFER = "_offload_buffer"


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint on the disk: its evaluation's metric (None without one) and size in bytes."""

    tag: str
    metric: float | None = None
    size: int = 0

    @property
    def is_best(self) -> bool:
        """Whether it was saved for the best evaluation."""
        return self.tag.startswith("best")

    @property
    def step(self) -> int:
        """The rollout step after which it was saved."""
        return paths.step_of(self.tag)


def to_prune(
    saved: Iterable[CheckpointInfo], keep: int, max_bytes: float, needed: Collection[str]
) -> list[str]:
    """Checkpoints to delete; the latest best one stays. First without a metric, worst, oldest."""
    saved = list(saved)
    best = sorted((s for s in saved if s.is_best), key=lambda s: s.step)
    regular = [s for s in saved if not s.is_best]
    pruned = [s for s in best[:-1] if s.tag not in needed]
    total, count = sum(s.size for s in saved) - sum(s.size for s in pruned), len(regular)
    for info in sorted(regular, key=lambda s: (s.metric is not None, s.metric or 0.0, s.step)):
        if count <= keep and total <= max_bytes:
            break
        if info.tag not in needed:
            pruned.append(info)
            total, count = total - info.size, count - 1
    return [s.tag for s in pruned]


def hf_folders_to_prune(
    tags: Iterable[str], keep: int, resumable: Collection[str] | None
) -> list[str]:
    """The ``_hf`` folders to delete: those whose tag is not ``resumable``, or (None) the oldest."""
    infos = [CheckpointInfo(tag) for tag in tags]
    best = sorted((s for s in infos if s.is_best), key=lambda s: s.step)
    regular = [s for s in infos if not s.is_best]
    # Folders without a checkpoint are deleted first, but only when there are too many.
    regular.sort(key=lambda s: (resumable is None or s.tag in resumable, s.step))
    return [s.tag for s in (*best[:-1], *regular[: max(0, len(regular) - keep)])]


def save(
    strategy: DeepspeedStrategy,
    model: DeepSpeedEngine,
    save_dir: str,
    tag: str | None = None,
    max_num: int = 3,
    max_mem: int = 1000,
    client_state: dict[str, Any] | None = None,
    save_latest: bool = True,
    metric_value: float | None = None,
    metric_key: str | None = None,
) -> None:
    """Save a checkpoint: a kill never leaves half of one, nor none.

    Prunes first, as upstream does, so that at most ``max_num`` checkpoints are on the disk. The one
    named in ``latest`` is deleted only after the new one is complete. ``max_mem``: GiB of all.

    Raises CheckpointError if the ranks do not share the folder, and OSError.
    """
    from openrlhf.utils.distributed_util import torch_dist_barrier_and_cuda_sync

    folder = Path(save_dir)
    tag = tag or f"global_step{model.global_steps}"
    written = paths.temp_path(folder / tag)

    def prune(keep: int, ignore: str = "") -> None:
        saved = [s for s in saved_in(folder, strategy._read_ckpt_metric) if s.tag != ignore]
        for old in to_prune(saved, keep, max_mem * 1024**3, {paths.latest_tag(folder), str(tag)}):
            paths.remove(folder / old)
            strategy.print(f"deleted checkpoint {folder / old}")

    try:
        with disk_full_context(folder / tag):
            if strategy.is_rank_0():
                folder.mkdir(parents=True, exist_ok=True)
                prune(max_num if tag.startswith("best") else max_num - 1, ignore=tag)
            # A folder under deletion looks like a leftover of a killed save: delete it only once.
            torch_dist_barrier_and_cuda_sync()
            paths.remove_incomplete(folder)
            torch_dist_barrier_and_cuda_sync()
            model.save_checkpoint(
                save_dir, tag=written.name, client_state=client_state or {}, save_latest=False
            )
            if strategy.is_rank_0():
                strategy._write_ckpt_metric(str(written), metric_value, metric_key=metric_key)
            consensus.finalize(written, folder / tag)
    except Exception:
        # At once and not at the next save: the run's log may need the space.
        shutil.rmtree(written, ignore_errors=True)
        raise
    if strategy.is_rank_0():
        if save_latest:
            paths.write_latest(folder, tag)
        prune(max_num)
    gc.collect()


def saved_in(folder: Path, metric_of: Callable[[str], float | None]) -> list[CheckpointInfo]:
    """The checkpoints in a folder."""
    return [
        CheckpointInfo(path.name, metric_of(str(path)), _size(path))
        for path in folder.iterdir()
        if path.is_dir() and paths.TAG.fullmatch(path.name)
    ]


def delete_pruned_hf_folders(
    folder: Path, keep: int, resumable: bool, output_dir: Path | None = None
) -> list[str]:
    """Delete the ``_hf`` folders in ``ckpt.path`` that :func:`hf_folders_to_prune` chooses."""
    tags = {
        match[1]: path
        for path in folder.iterdir()
        if path.is_dir()
        and (match := _HF_FOLDER.fullmatch(path.name))
        and (output_dir is None or path.resolve() != output_dir.resolve())
    }
    policy = folder / "_actor"
    kept = {path.name for path in policy.iterdir()} if resumable and policy.is_dir() else None
    pruned = hf_folders_to_prune(tags, keep, kept)
    for tag in pruned:
        paths.remove(tags[tag])
    return [tags[tag].name for tag in pruned]


def load_newest_intact(
    load: Callable[..., Any],
    model: DeepSpeedEngine,
    load_dir: str,
    tag: str | None = None,
    **kwargs: Any,
) -> Any:
    """Load the newest intact checkpoint, or ``tag``, on all ranks; raises CheckpointError.

    ZeRO-3's offloading (``ds.enable_sleep``) saves its host buffers with the optimizer's state, and
    torch would load them to the GPU: without them DeepSpeed allocates new ones in host memory.
    """
    # A universal checkpoint is one that the user converted, under another name.
    chosen = None
    if tag is None and not model.load_universal_checkpoint():
        tag = chosen = consensus.select_intact(Path(load_dir))
    if tag is None:
        loaded = load(model, load_dir, tag, **kwargs)
    else:
        with reshard.load_resharded(model, Path(load_dir) / tag) as change:
            if change:
                consensus.report(f"checkpoint {tag}: {change}")
            loaded = load(model, load_dir, tag, **kwargs)
    if chosen is not None and loaded[0] is None:
        raise CheckpointError(
            f"checkpoint {Path(load_dir) / chosen}: DeepSpeed found nothing to load"
        )
    drop_offload_buffers(model.optimizer)
    return loaded


def save_model(write: Callable[[str], None], final: Path, is_rank_0: bool) -> None:
    """Save a model's folder, which gets its name once complete; on every rank. Raises OSError."""
    try:
        with disk_full_context(final):
            if is_rank_0:
                paths.remove_partial_model(final)
            # Other ranks may evaluate the path after the rename: they write nothing there.
            write(str(paths.temp_model_path(final)))
            if is_rank_0:
                paths.tidy_model(final)
                paths.sync_model(final)
    except Exception:
        if is_rank_0:
            paths.remove_partial_model(final)
        raise
    if is_rank_0:
        paths.publish_model(final)


def drop_offload_buffers(optimizer: Any) -> int:
    """Delete offloading's host buffers from an optimizer's state."""
    inner = getattr(optimizer, "optimizer", optimizer)
    dropped = 0
    for state in inner.state.values():
        for key in [key for key in state if str(key).endswith(_OFFLOAD_BUFFER)]:
            del state[key]
            dropped += 1
    return dropped


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
