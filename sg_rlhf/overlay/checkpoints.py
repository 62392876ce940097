"""Checkpoints: what is kept, in which order it goes, and what a resumed optimizer holds.

A save writes ``ckpt.path/_actor/{tag}`` to resume from and, with ``ckpt.save_hf``, a plain Hugging
Face folder ``ckpt.path/{tag}_hf`` to evaluate; tags are ``global_step20`` and, where an evaluation
chooses, ``best_global_step20``. Upstream counts the first kind alone, so that the second fills the
disk, and deletes before it saves, which can leave nothing to resume from.
"""

from __future__ import annotations

import functools
import gc
import re
import shutil
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TAG = re.compile(r"(best_)?global_step(\d+)")
_FOLDER_OF_WEIGHTS = re.compile(rf"({_TAG.pattern})_hf")
#: What DeepSpeed's offloading leaves in an optimizer's state beside the moments themselves.
_OFFLOAD_BUFFER = "_offload_buffer"


@dataclass(frozen=True)
class Saved:
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
        found = _TAG.fullmatch(self.tag)
        assert found is not None, self.tag
        return int(found[2])


def superseded(
    saved: Iterable[Saved], keep: int, max_bytes: float, needed: Collection[str]
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


def superseded_weights(
    tags: Iterable[str], keep: int, resumable: Collection[str] | None
) -> list[str]:
    """Tags whose ``_hf`` folder goes: a folder stays as long as the checkpoint of its tag does.

    Args:
        tags: of all ``_hf`` folders.
        keep: how many regular ones may stay.
        resumable: tags of the checkpoints that are kept; None where none are written, and the
            newest folders stay.
    """
    found = [Saved(tag) for tag in tags]
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
    """``DeepspeedStrategy.save_ckpt`` that keeps what a resumed run would start from.

    Makes room first, as upstream does, so that ``max_num`` checkpoints are on the disk at most; but
    the one that the file ``latest`` names goes after the new one is whole. Upstream deletes it
    before with ``ckpt.max_num=1``, or where its metric is the worst.
    """
    from openrlhf.utils.distributed_util import torch_dist_barrier_and_cuda_sync

    folder = Path(save_dir)
    tag = tag or f"global_step{model.global_steps}"

    def make_room(keep: int, besides: str = "") -> None:
        saved = [s for s in saved_in(folder, self._read_ckpt_metric) if s.tag != besides]
        for old in superseded(saved, keep, max_mem * 1024**3, {_latest(folder), str(tag)}):
            shutil.rmtree(folder / old)
            self.print(f"deleted checkpoint {folder / old}")

    if self.is_rank_0():
        folder.mkdir(parents=True, exist_ok=True)
        make_room(max_num if tag.startswith("best") else max_num - 1, besides=tag)
    torch_dist_barrier_and_cuda_sync()
    model.save_checkpoint(
        save_dir, tag=tag, client_state=client_state or {}, save_latest=save_latest
    )
    if self.is_rank_0():
        self._write_ckpt_metric(str(folder / tag), metric_value, metric_key=metric_key)
        make_room(max_num)
    gc.collect()


def saved_in(folder: Path, metric_of: Callable[[str], float | None]) -> list[Saved]:
    """The checkpoints of a folder; nothing else in it is one."""
    return [
        Saved(path.name, metric_of(str(path)), _size(path))
        for path in folder.iterdir()
        if path.is_dir() and _TAG.fullmatch(path.name)
    ]


def delete_superseded_weights(
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
    gone = superseded_weights(tags, keep, kept)
    for tag in gone:
        shutil.rmtree(tags[tag])
    return [tags[tag].name for tag in gone]


def without_offload_buffers(original: Callable[..., Any]) -> Callable[..., Any]:
    """``DeepspeedStrategy.load_ckpt`` after which the optimizer's moments can leave the GPU.

    ZeRO-3's offloading (``ds.enable_sleep``) keeps its buffer in host memory as one more tensor of
    the optimizer's state. A checkpoint has it too, and torch loads every such tensor to the device
    of the parameter: from then on the moments are "offloaded" into a buffer on the GPU. Without the
    key DeepSpeed makes a new one in host memory.
    """

    @functools.wraps(original)
    def load(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = original(self, model, *args, **kwargs)
        forget_offload_buffers(model.optimizer)
        return loaded

    return load


def forget_offload_buffers(optimizer: Any) -> int:
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


def _latest(folder: Path) -> str:
    """The checkpoint that a resumed run starts from; "" without one."""
    named = folder / "latest"
    return named.read_text().strip() if named.is_file() else ""


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
