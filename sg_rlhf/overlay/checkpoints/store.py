"""Checkpoints: how they are saved and loaded, what is kept, and what a resumed optimizer holds.

A save writes ``ckpt.path/_actor/{tag}`` to resume from and, with ``ckpt.save_hf``, a plain Hugging
Face folder ``ckpt.path/{tag}_hf`` to evaluate; tags are ``global_step20`` and, where an evaluation
chooses, ``best_global_step20``. Each is written beside its place, brought to the disk and renamed
(:mod:`sg_rlhf.overlay.checkpoints.paths`); the first has a manifest, which a resumed run asks
(:mod:`sg_rlhf.overlay.checkpoints.consensus`). Upstream counts the first kind alone, so that the
second fills the disk, and deletes before it saves, which can leave nothing to resume from.
"""

from __future__ import annotations

import functools
import gc
import json
import re
import shutil
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sg_rlhf.common.atomic_io import disk_full_context, write_whole
from sg_rlhf.overlay.checkpoints import consensus, reshard
from sg_rlhf.overlay.checkpoints import paths as folders
from sg_rlhf.overlay.reporting.errors import CheckpointError

_FOLDER_OF_WEIGHTS = re.compile(rf"({folders.TAG.pattern})_hf")
#: What DeepSpeed's offloading leaves in an optimizer's state beside the moments themselves.
_OFFLOAD_BUFFER = "_offload_buffer"

#: Called on every rank with the folder of a save before it is hashed: what they write there, under
#: names with ``rank{rank}`` where each rank writes its own, is part of the checkpoint.
on_save: list[Callable[[Path], None]] = []
#: Called on every rank with the folder of the checkpoint that was loaded.
on_load: list[Callable[[Path], None]] = []


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint on the disk.

    Attributes:
        metric: of the evaluation before it; None without one.
        size: bytes.
    """

    tag: str
    metric: float | None = None
    size: int = 0

    @property
    def is_best(self) -> bool:
        """Whether an evaluation chose it."""
        return self.tag.startswith("best")

    @property
    def step(self) -> int:
        """The rollout after which it was saved."""
        return folders.step_of(self.tag)


def to_prune(
    saved: Iterable[CheckpointInfo], keep: int, max_bytes: float, needed: Collection[str]
) -> list[str]:
    """Tags that go, in upstream's order: without a metric first, then the worst, then the oldest.

    Args:
        saved: all checkpoints of a folder.
        keep: how many regular ones may stay; a best one is not counted, and the latest of them
            stays.
        max_bytes: of all of them together; regular ones go until it holds.
        needed: never go.
    """
    saved = list(saved)
    best = sorted((s for s in saved if s.is_best), key=lambda s: s.step)
    regular = [s for s in saved if not s.is_best]
    gone = [s for s in best[:-1] if s.tag not in needed]
    total, left = sum(s.size for s in saved) - sum(s.size for s in gone), len(regular)
    for one in sorted(regular, key=lambda s: (s.metric is not None, s.metric or 0.0, s.step)):
        if left <= keep and total <= max_bytes:
            break
        if one.tag not in needed:
            gone.append(one)
            total, left = total - one.size, left - 1
    return [s.tag for s in gone]


def hf_folders_to_prune(
    tags: Iterable[str], keep: int, resumable: Collection[str] | None
) -> list[str]:
    """Tags whose ``_hf`` folder goes: a folder stays as long as the checkpoint of its tag does.

    Args:
        tags: of all ``_hf`` folders.
        keep: how many regular ones may stay.
        resumable: tags of the checkpoints that are kept; None where none are written, and the
            newest folders stay.
    """
    found = [CheckpointInfo(tag) for tag in tags]
    best = sorted((s for s in found if s.is_best), key=lambda s: s.step)
    regular = [s for s in found if not s.is_best]
    # A folder without its checkpoint is the first to go, but only when there are too many.
    regular.sort(key=lambda s: (resumable is None or s.tag in resumable, s.step))
    return [s.tag for s in (*best[:-1], *regular[: max(0, len(regular) - keep)])]


def save(
    self: Any,
    model: Any,
    save_dir: str,
    tag: str | None = None,
    max_num: int = 3,
    max_mem: int = 1000,
    client_state: Any = None,
    save_latest: bool = True,
    metric_value: Any = None,
    metric_key: Any = None,
) -> None:
    """``DeepspeedStrategy.save_ckpt`` that never leaves half a checkpoint, nor none.

    Makes room first, as upstream does, so that ``max_num`` checkpoints are on the disk at most; but
    the one that the file ``latest`` names goes after the new one is whole. Upstream deletes it
    before with ``ckpt.max_num=1``, or where its metric is the worst.

    Raises:
        OSError: the disk is full, or refuses; what was there before is still there.
    """
    from openrlhf.utils.distributed_util import torch_dist_barrier_and_cuda_sync

    folder = Path(save_dir)
    tag = tag or f"global_step{model.global_steps}"
    written = folders.temp_path(folder / tag)

    def make_room(keep: int, besides: str = "") -> None:
        saved = [s for s in saved_in(folder, self._read_ckpt_metric) if s.tag != besides]
        for old in to_prune(saved, keep, max_mem * 1024**3, {folders.latest_tag(folder), str(tag)}):
            folders.remove(folder / old)
            self.print(f"deleted checkpoint {folder / old}")

    try:
        with disk_full_context(folder / tag):
            if self.is_rank_0():
                folder.mkdir(parents=True, exist_ok=True)
                make_room(max_num if tag.startswith("best") else max_num - 1, besides=tag)
            # What is being deleted looks like a leftover: two ranks would take it from each other.
            torch_dist_barrier_and_cuda_sync()
            folders.remove_incomplete(folder)
            torch_dist_barrier_and_cuda_sync()
            model.save_checkpoint(
                save_dir, tag=written.name, client_state=client_state or {}, save_latest=False
            )
            for write in on_save:
                write(written)
            if self.is_rank_0():
                self._write_ckpt_metric(str(written), metric_value, metric_key=metric_key)
                _announce_manifest(Path(self._get_ckpt_metric_path(str(written))))
            consensus.finalize(written, folder / tag)
    except Exception:
        # Now and not at the next save: what it takes may be all the room that the run's log needs.
        shutil.rmtree(written, ignore_errors=True)
        raise
    if self.is_rank_0():
        if save_latest:
            folders.write_latest(folder, tag)
        make_room(max_num)
    gc.collect()


def _announce_manifest(metric: Path) -> None:
    found = json.loads(metric.read_text())
    write_whole(metric, json.dumps(found | {consensus.MANIFEST_WRITTEN: True}))


def saved_in(folder: Path, metric_of: Callable[[str], float | None]) -> list[CheckpointInfo]:
    """The checkpoints of a folder; nothing else in it is one."""
    return [
        CheckpointInfo(path.name, metric_of(str(path)), _size(path))
        for path in folder.iterdir()
        if path.is_dir() and folders.TAG.fullmatch(path.name)
    ]


def delete_pruned_weights(
    folder: Path, keep: int, resumable: bool, output_dir: Path | None = None
) -> list[str]:
    """Delete ``_hf`` folders in ``ckpt.path`` that :func:`superseded_weights` names.

    Args:
        folder: ``ckpt.path``.
        keep: ``ckpt.max_num``.
        resumable: whether checkpoints to resume from are written too.
        output_dir: of the final model, which stays wherever it is.

    Returns:
        The names of the deleted folders.
    """
    tags = {
        found[1]: path
        for path in folder.iterdir()
        if path.is_dir()
        and (found := _FOLDER_OF_WEIGHTS.fullmatch(path.name))
        and (output_dir is None or path.resolve() != output_dir.resolve())
    }
    beside = folder / "_actor"
    kept = {path.name for path in beside.iterdir()} if resumable and beside.is_dir() else None
    gone = hf_folders_to_prune(tags, keep, kept)
    for tag in gone:
        folders.remove(tags[tag])
    return [tags[tag].name for tag in gone]


def load_newest_intact(original: Callable[..., Any]) -> Callable[..., Any]:
    """``DeepspeedStrategy.load_ckpt`` of the newest checkpoint that is whole, on all ranks, however
    many wrote it (:mod:`sg_rlhf.overlay.checkpoints.reshard`).

    ZeRO-3's offloading (``ds.enable_sleep``) keeps its buffer in host memory as one more tensor of
    the optimizer's state. A checkpoint has it too, and torch loads every such tensor to the device
    of the parameter: from then on the moments are "offloaded" into a buffer on the GPU. Without the
    key DeepSpeed makes a new one in host memory.

    Raises:
        CheckpointError: no checkpoint is whole, or DeepSpeed does not load it.
    """

    @functools.wraps(original)
    def load(self: Any, model: Any, load_dir: str, tag: Any = None, *args: Any, **more: Any) -> Any:
        # A universal checkpoint is one that the user converted, under a name of its own.
        chosen = None
        if tag is None and not model.load_universal_checkpoint():
            tag = chosen = consensus.select_intact(Path(load_dir))
        if tag is None:
            loaded = original(self, model, load_dir, tag, *args, **more)
        else:
            with reshard.load_resharded(model, Path(load_dir) / tag) as what:
                if what:
                    consensus.say(f"checkpoint {tag}: {what}")
                loaded = original(self, model, load_dir, tag, *args, **more)
        if chosen is not None and loaded[0] is None:
            raise CheckpointError(
                f"checkpoint {Path(load_dir) / chosen}: DeepSpeed finds nothing to load in it"
            )
        drop_offload_buffers(model.optimizer)
        for read in on_load if tag is not None else ():
            read(Path(load_dir) / tag)
        return loaded

    return load


def atomic_save_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """``DeepspeedStrategy.save_model`` whose folder has its name when it is whole.

    Raises:
        OSError: the disk is full, or refuses; what was there before is still there.
    """

    @functools.wraps(original)
    def save_model(self: Any, model: Any, tokenizer: Any, output_dir: Any, **more: Any) -> None:
        final = Path(output_dir)
        try:
            with disk_full_context(final):
                if self.is_rank_0():
                    folders.remove_partial_model(final)
                # Others may look when the folder has its name already: they write nothing there.
                original(self, model, tokenizer, str(folders.temp_model_path(final)), **more)
                if self.is_rank_0():
                    folders.tidy_model(final)
                    folders.sync_model(final)
        except Exception:
            if self.is_rank_0():
                folders.remove_partial_model(final)
            raise
        if self.is_rank_0():
            folders.publish_model(final)

    return save_model


def drop_offload_buffers(optimizer: Any) -> int:
    """Drop the buffers from a DeepSpeed optimizer's state; returns how many there were.

    Args:
        optimizer: ZeRO's, around a ``torch.optim.Optimizer``, or that itself.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    dropped = 0
    for state in inner.state.values():
        for key in [key for key in state if str(key).endswith(_OFFLOAD_BUFFER)]:
            del state[key]
            dropped += 1
    return dropped


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
