"""Loads a checkpoint on another number of ranks than wrote it.

Each ZeRO rank holds a shard of every flat buffer: master weights, Adam's moments, and with ZeRO-3
also the frozen weights. DeepSpeed refuses another number of ranks. Its universal checkpoint doubles
the size on disk, gives all parameter groups the first one's settings and loses frozen weights.

Here DeepSpeed loads as usual, but each file that it reads is assembled in memory from the shards
that were written. No value is computed, so every value is bit-equal.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sg_rlhf.overlay.checkpoints import consensus, manifest
from sg_rlhf.overlay.checkpoints.shards import (
    SavedLayout,
    ShardRange,
    count_ranks,
    incompatibility,
    overlapping_ranges,
    part_of_group,
    written_by,
    zero3_shards,
    zero12_shards,
)
from sg_rlhf.overlay.reporting.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from torch import Tensor

#: Name of the buffer of master weights; the other buffers have the moments' names.
_MASTER = "master"


@contextlib.contextmanager
def load_resharded(model: DeepSpeedEngine, checkpoint: Path) -> Iterator[str]:
    """Within this context the engine loads a checkpoint of any number of ranks; on every rank.

    Yields the change of ranks, in words; "" for the same number. Raises CheckpointError.
    """
    views = consensus.all_gather_objects(manifest.names(checkpoint))
    written = written_by(itertools.chain.from_iterable(views))
    if written is None:
        yield ""
        return
    ranks, tensor_parallel = model.seq_dp_world_size, max(model.autotp_size(), model.mp_world_size)
    error = incompatibility(written, ranks, tensor_parallel, model.zero_optimization_stage())
    if error is not None:
        raise CheckpointError(f"checkpoint {checkpoint}: {error}")
    if written.ranks == ranks:
        yield ""
        return
    files = {*written.parts.values(), *written.models.values()}
    if len(written.parts) < written.ranks or any(not files <= set(view) for view in views):
        raise CheckpointError(
            f"checkpoint {checkpoint}: written by {count_ranks(written.ranks)}, and now there are "
            f"{ranks}, and a machine lacks files of it: put all files on each machine, or set "
            "actor.num_nodes and actor.num_gpus_per_node as they were"
        )
    reader, names = ReshardingReader(model, checkpoint, written), model._get_all_ckpt_names
    engine = model.checkpoint_engine
    # A rank that did not write has no file of its own: the reader assembles its contents.
    first = checkpoint / written.models[0] if written.models else None
    model.checkpoint_engine = reader
    if first is not None:
        model._get_all_ckpt_names = lambda *_: [str(first)]
    try:
        yield f"written by {count_ranks(written.ranks)}, loaded by {count_ranks(ranks)}"
    finally:
        model.checkpoint_engine = engine
        if first is not None:
            model._get_all_ckpt_names = names


@dataclass(frozen=True)
class _Keys:
    """Keys of a rank's master weights and optimizer state in its file."""

    master: str
    optimizer: str


_ZERO_3 = _Keys("fp32_flat_groups", "optimizer_state_dict")
_ZERO_12 = _Keys("single_partition_of_fp32_groups", "base_optimizer_state")


class ReshardingReader:
    """Replaces DeepSpeed's checkpoint engine: files as this rank would have written them."""

    def __init__(self, model: DeepSpeedEngine, checkpoint: Path, written: SavedLayout) -> None:
        import torch

        self._model, self._checkpoint, self._written = model, checkpoint, written
        self._engine = model.checkpoint_engine
        self._is_zero_3 = bool(written.models)
        self._rank = torch.distributed.get_rank(group=model.optimizer.dp_process_group)
        self._ranks = model.seq_dp_world_size
        self._saved_shapes: list[Mapping[str, Any]] = []

    def load(self, path: str, map_location: str | None = None) -> dict[str, Any]:
        """A file's contents; DeepSpeed loads the model's file first."""
        if path.endswith("_model_states.pt"):
            return self._model_states(path, map_location)
        return {"optimizer_state_dict": self._optimizer_states()}

    def _model_states(self, path: str, map_location: str | None) -> dict[str, Any]:
        states: dict[str, Any] = self._engine.load(path, map_location=map_location)
        self._saved_shapes = states["param_shapes"]
        states["dp_world_size"] = self._ranks
        # With ZeRO-1 and 2 each rank has whole frozen weights.
        if self._is_zero_3 and states.get("frozen_param_fragments"):
            states["frozen_param_fragments"] = self._frozen(states)
        return states

    def _frozen(self, rank_0: dict[str, Any]) -> dict[str, Any]:
        shapes = rank_0["frozen_param_shapes"]
        groups = [{name: shape.numel()} for name, shape in shapes.items()]
        target = zero3_shards(groups, self._rank, self._ranks)
        fragments = {
            name: fragment.new_zeros(-(-shapes[name].numel() // self._ranks))
            for name, fragment in rank_0["frozen_param_fragments"].items()
        }
        for rank in range(self._written.ranks):
            pairs = overlapping_ranges(zero3_shards(groups, rank, self._written.ranks), target)
            if not pairs:
                continue
            states = rank_0 if rank == 0 else self._read(self._written.models[rank])
            saved = states["frozen_param_fragments"]
            for source, to in pairs:
                _copy(saved[source.tensor].flatten(), source, fragments[to.tensor], to)
        return fragments

    def _read(self, name: str) -> dict[str, Any]:
        loaded: dict[str, Any] = self._engine.load(str(self._checkpoint / name), map_location="cpu")
        return loaded

    def _optimizer_states(self) -> dict[str, Any]:
        saved, now = (
            [{name: shape.numel() for name, shape in group.items()} for group in groups]
            for groups in (self._saved_shapes, self._model._get_zero_param_shapes())
        )
        self._check_same_parameters(saved, now)
        keys = _ZERO_3 if self._is_zero_3 else _ZERO_12
        target = self._shards(now, self._rank, self._ranks)
        sizes = self._sizes(now, self._ranks)
        states, buffers = {}, {}
        for rank in range(self._written.ranks):
            pairs = overlapping_ranges(self._shards(saved, rank, self._written.ranks), target)
            # The first rank's file also has the values that are the same on all ranks.
            if rank and not pairs:
                continue
            rank_states = self._read(self._written.parts[rank])["optimizer_state_dict"]
            written = self._buffers(rank_states, keys, self._sizes(saved, self._written.ranks))
            if rank == 0:
                states = rank_states
                buffers = {
                    name: [tensors[0].new_zeros(size) for size in sizes]
                    for name, tensors in written.items()
                }
            for name, tensors in written.items():
                for source, to in pairs:
                    _copy(tensors[source.buffer], source, buffers[name][to.buffer], to)
        return self._assembled(states, keys, buffers, saved, now)

    def _shards(self, groups: list[dict[str, int]], rank: int, ranks: int) -> list[ShardRange]:
        if self._is_zero_3:
            return zero3_shards(groups, rank, ranks)
        return zero12_shards(groups, rank, ranks, self._alignment)

    def _sizes(self, groups: list[dict[str, int]], ranks: int) -> list[int]:
        if self._is_zero_3:
            return [sum(-(-numel // ranks) for numel in group.values()) for group in groups]
        return [part_of_group(sum(group.values()), ranks, self._alignment) for group in groups]

    @property
    def _alignment(self) -> int:
        return int(self._model.optimizer.nccl_start_alignment_factor)

    def _check_same_parameters(
        self, saved: list[dict[str, int]], now: list[dict[str, int]]
    ) -> None:
        # ZeRO-3 splits groups by a rank's number of elements: other ranks may split elsewhere.
        if self._is_zero_3:
            same = _all(saved) == _all(now)
        else:
            same = [list(group.items()) for group in saved] == [list(g.items()) for g in now]
        if not same:
            raise CheckpointError(
                f"checkpoint {self._checkpoint}: written by {count_ranks(self._written.ranks)}, "
                "and its trainable parameters are not this model's: start with the model and the "
                "ds.lora.* that it was written with"
            )

    def _buffers(
        self, states: dict[str, Any], keys: _Keys, sizes: list[int]
    ) -> dict[str, list[Tensor]]:
        """Name -> one flat tensor per buffer of a rank's file; no host buffers of offloading."""
        state = states[keys.optimizer]["state"]
        names = [name for name, value in state.get(0, {}).items() if _is_moment(name, value)]
        moments = {name: [state[i][name] for i in range(len(sizes))] for name in names}
        other = [n for n, tensors in moments.items() if [t.numel() for t in tensors] != sizes]
        if other:
            raise CheckpointError(
                f"checkpoint {self._checkpoint}: written by {count_ranks(self._written.ranks)} in "
                f"a way that {self._ranks} cannot load (its {other[0]} has another size than its "
                "weights): set actor.num_nodes and actor.num_gpus_per_node as they were"
            )
        return {_MASTER: list(states[keys.master]), **moments}

    def _assembled(
        self,
        states: dict[str, Any],
        keys: _Keys,
        buffers: dict[str, list[Tensor]],
        saved: list[dict[str, int]],
        now: list[dict[str, int]],
    ) -> dict[str, Any]:
        """The first rank's file with this rank's buffers."""
        group_of = {name: i for i, group in enumerate(saved) for name in group}
        optimizer = states[keys.optimizer]
        moments = [name for name in buffers if name != _MASTER]
        shared = [_shared(optimizer["state"].get(group_of[next(iter(group))], {})) for group in now]
        new_states = {
            i: rest | {name: buffers[name][i] for name in moments} for i, rest in enumerate(shared)
        }
        groups = [dict(group) for group in optimizer["param_groups"]]
        if self._is_zero_3:
            param_group_of = self._model.optimizer.sub_group_to_group_id
            for index, group in enumerate(groups):
                group["params"] = [i for i in range(len(now)) if param_group_of[i] == index]
        return states | {
            keys.master: buffers[_MASTER],
            keys.optimizer: optimizer | {"state": new_states, "param_groups": groups},
            "partition_count": self._ranks if self._is_zero_3 else [self._ranks] * len(now),
        }


def _all(groups: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return {name: numel for group in groups for name, numel in group.items()}


def _is_moment(name: str, value: object) -> bool:
    # The step count is a tensor of no dimension.
    return getattr(value, "ndim", 0) == 1 and not name.endswith("_offload_buffer")


def _shared(state: Mapping[str, Any]) -> dict[str, Any]:
    """The step count: a copy, since buffers cut from one would count in the same tensor."""
    return {
        name: copy.deepcopy(value)
        for name, value in state.items()
        if getattr(value, "ndim", 0) == 0
    }


def _copy(source: Tensor, shard: ShardRange, target: Tensor, to: ShardRange) -> None:
    target.narrow(0, to.offset, to.numel).copy_(source.narrow(0, shard.offset, shard.numel))
