"""A checkpoint of one number of ranks, loaded on another.

Each rank of ZeRO holds a part of every flat buffer: master weights, Adam's moments, and with ZeRO-3
the frozen weights too. DeepSpeed loads a part on the rank that wrote it and refuses another number
of them. Its own way around, a universal checkpoint, takes twice the checkpoint's size on the disk,
gives all groups of parameters the first one's settings (its weight decay) and forgets what is
frozen. Here DeepSpeed loads as ever, and each file that it asks for is put together in memory of
the parts that were written: numbers are copied and none is computed, so that each is bit-equal.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sg_rlhf.overlay.checkpoints import consensus
from sg_rlhf.overlay.reporting.errors import CheckpointError

_PART = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
#: What a rank's buffer of master weights is called here, beside the moments' own names.
_MASTER = "master"


class ShardRange(NamedTuple):
    """A run of a tensor's elements that a rank has in one of its flat buffers.

    Attributes:
        tensor: a parameter, or a whole group of them.
        start: the first element in it.
        numel: how many.
        buffer: which of the rank's buffers.
        offset: where in that.
    """

    tensor: str
    start: int
    numel: int
    buffer: int
    offset: int


class SavedLayout(NamedTuple):
    """Who wrote a checkpoint.

    Attributes:
        ranks: ZeRO ranks, over which weights or moments are spread.
        tensor_parallel: ranks that share each layer.
        parts: rank -> its file of the optimizer.
        models: rank -> its file of the model; empty where one rank wrote it for all (ZeRO-1 and 2).
    """

    ranks: int
    tensor_parallel: int
    parts: dict[int, str]
    models: dict[int, str]


def written_by(names: Iterable[str]) -> SavedLayout | None:
    """Who wrote a checkpoint, by its files; None for one that is not ZeRO's."""
    names = sorted(names)
    parts = [(int(m[1]), int(m[2]), m[0]) for m in map(_PART.fullmatch, names) if m]
    models = [(int(m[1]), m[0]) for m in map(_MODEL.fullmatch, names) if m and not int(m[2])]
    if not parts:
        return None
    return SavedLayout(
        ranks=1 + max(rank for rank, _, _ in parts),
        tensor_parallel=1 + max(shard for _, shard, _ in parts),
        parts={rank: name for rank, shard, name in parts if shard == 0},
        models=dict(models),
    )


def zero3_shards(groups: Sequence[Mapping[str, int]], rank: int, ranks: int) -> list[ShardRange]:
    """What a rank has under ZeRO-3: of each parameter one part, which is padded at its end.

    Args:
        groups: a buffer each: parameter -> elements, in the buffer's order.
        rank: whose pieces.
        ranks: that share each parameter.
    """
    pieces = []
    for buffer, group in enumerate(groups):
        offset = 0
        for name, numel in group.items():
            part = -(-numel // ranks)
            own = min(part, numel - rank * part)
            if own > 0:
                pieces.append(ShardRange(name, rank * part, own, buffer, offset))
            offset += part
    return pieces


def zero12_shards(
    groups: Sequence[Mapping[str, int]], rank: int, ranks: int, alignment: int
) -> list[ShardRange]:
    """What a rank has under ZeRO-1 and 2: of each group, all in a row, one part.

    Args:
        groups: as of :func:`by_parameter`.
        rank: whose pieces.
        ranks: that share each group.
        alignment: a part's elements are a multiple of it.
    """
    pieces = []
    for buffer, group in enumerate(groups):
        total = sum(group.values())
        part = part_of_group(total, ranks, alignment)
        own = min(part, total - rank * part)
        if own > 0:
            pieces.append(ShardRange(f"group {buffer}", rank * part, own, buffer, 0))
    return pieces


def part_of_group(total: int, ranks: int, alignment: int) -> int:
    """Elements of a rank's part of a group under ZeRO-1 and 2, the padding among them."""
    return -(-total // (ranks * alignment)) * alignment


def overlapping_ranges(
    source: Iterable[ShardRange], target: Iterable[ShardRange]
) -> list[tuple[ShardRange, ShardRange]]:
    """Pairs of the same elements, as they lie at one rank and at another."""
    of_tensor = defaultdict(list)
    for piece in source:
        of_tensor[piece.tensor].append(piece)
    pairs = []
    for to in target:
        for of in of_tensor[to.tensor]:
            first = max(of.start, to.start)
            last = min(of.start + of.numel, to.start + to.numel)
            if first < last:
                pairs.append((_from(of, first, last), _from(to, first, last)))
    return pairs


def _from(piece: ShardRange, first: int, last: int) -> ShardRange:
    offset = piece.offset + first - piece.start
    return piece._replace(start=first, numel=last - first, offset=offset)


def incompatibility(
    written: SavedLayout, ranks: int, tensor_parallel: int, stage: int
) -> str | None:
    """Why a checkpoint cannot be loaded by these ranks, in one line; None if it can."""
    if bool(written.models) != (stage == 3):
        was = "3" if written.models else "1 or 2"
        return f"it was written with ds.zero_stage={was}, and now it is {stage}: set it back"
    before, now = (written.ranks, written.tensor_parallel), (ranks, tensor_parallel)
    if before != now and max(written.tensor_parallel, tensor_parallel) > 1:
        return (
            f"it was written by {_layout(*before)}, and now there are {_layout(*now)}: with tensor "
            "parallelism neither may change; set actor.num_nodes, actor.num_gpus_per_node and "
            "ds.tensor_parallel_size as they were"
        )
    return None


def _layout(ranks: int, tensor_parallel: int) -> str:
    return f"{_count(ranks)} with ds.tensor_parallel_size={tensor_parallel}"


def _count(ranks: int) -> str:
    return f"{ranks} rank" if ranks == 1 else f"{ranks} ranks"


@contextlib.contextmanager
def load_resharded(model: Any, checkpoint: Path) -> Iterator[str]:
    """While it lasts, the engine loads a checkpoint of any number of ranks. Every rank must enter.

    Args:
        model: DeepSpeed's engine.
        checkpoint: the folder.

    Yields:
        What is done to it, in words; "" for a checkpoint of as many ranks.

    Raises:
        CheckpointError: it cannot be loaded by these ranks, with what to do.
    """
    views = consensus.names(checkpoint)
    written = written_by(itertools.chain.from_iterable(views))
    if written is None:
        yield ""
        return
    ranks, tensor_parallel = model.seq_dp_world_size, max(model.autotp_size(), model.mp_world_size)
    why = incompatibility(written, ranks, tensor_parallel, model.zero_optimization_stage())
    if why is not None:
        raise CheckpointError(f"checkpoint {checkpoint}: {why}")
    if written.ranks == ranks:
        yield ""
        return
    files = {*written.parts.values(), *written.models.values()}
    if len(written.parts) < written.ranks or any(not files <= set(view) for view in views):
        raise CheckpointError(
            f"checkpoint {checkpoint}: written by {_count(written.ranks)}, and now there are "
            f"{ranks}, and a machine lacks files of it: put all files on each machine, or set "
            "actor.num_nodes and actor.num_gpus_per_node as they were"
        )
    reader, names = ReshardingReader(model, checkpoint, written), model._get_all_ckpt_names
    was = model.checkpoint_engine
    # A rank that did not write has no file of its own to look for: the reader makes its contents.
    first = checkpoint / written.models[0] if written.models else None
    model.checkpoint_engine = reader
    if first is not None:
        model._get_all_ckpt_names = lambda *_: [str(first)]
    try:
        yield f"written by {_count(written.ranks)}, loaded by {_count(ranks)}"
    finally:
        model.checkpoint_engine = was
        if first is not None:
            model._get_all_ckpt_names = names


@dataclass(frozen=True)
class _Keys:
    """Where ZeRO keeps a rank's master weights and what the optimizer has of them."""

    master: str
    optimizer: str


_ZERO_3 = _Keys("fp32_flat_groups", "optimizer_state_dict")
_ZERO_12 = _Keys("single_partition_of_fp32_groups", "base_optimizer_state")


class ReshardingReader:
    """What DeepSpeed's checkpoint engine is asked for, as this rank would have written it."""

    def __init__(self, model: Any, checkpoint: Path, written: SavedLayout) -> None:
        import torch

        self._model, self._checkpoint, self._written = model, checkpoint, written
        self._engine = model.checkpoint_engine
        self._is_zero_3 = bool(written.models)
        self._rank = torch.distributed.get_rank(group=model.optimizer.dp_process_group)
        self._ranks = model.seq_dp_world_size
        self._saved_shapes: list[Mapping[str, Any]] = []

    def load(self, path: str, map_location: Any = None) -> dict[str, Any]:
        """A file's contents; DeepSpeed asks for the model's first.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
        if path.endswith("_model_states.pt"):
            return self._model_states(path, map_location)
        return {"optimizer_state_dict": self._optimizer_states()}

    def _model_states(self, path: str, map_location: Any) -> dict[str, Any]:
        states: dict[str, Any] = self._engine.load(path, map_location=map_location)
        self._saved_shapes = states["param_shapes"]
        states["dp_world_size"] = self._ranks
        # ZeRO-1 and 2 have what is frozen whole on each rank.
        if self._is_zero_3 and states.get("frozen_param_fragments"):
            states["frozen_param_fragments"] = self._frozen(states)
        return states

    def _frozen(self, of_rank_0: dict[str, Any]) -> dict[str, Any]:
        shapes = of_rank_0["frozen_param_shapes"]
        each_alone = [{name: shape.numel()} for name, shape in shapes.items()]
        target = zero3_shards(each_alone, self._rank, self._ranks)
        found = {
            name: fragment.new_zeros(-(-shapes[name].numel() // self._ranks))
            for name, fragment in of_rank_0["frozen_param_fragments"].items()
        }
        for rank in range(self._written.ranks):
            pairs = overlapping_ranges(zero3_shards(each_alone, rank, self._written.ranks), target)
            if not pairs:
                continue
            states = of_rank_0 if rank == 0 else self._read(self._written.models[rank])
            fragments = states["frozen_param_fragments"]
            for of, to in pairs:
                _copy(fragments[of.tensor].flatten(), of, found[to.tensor], to)
        return found

    def _read(self, name: str) -> dict[str, Any]:
        loaded: dict[str, Any] = self._engine.load(str(self._checkpoint / name), map_location="cpu")
        return loaded

    def _optimizer_states(self) -> dict[str, Any]:
        saved, now = (
            [{name: shape.numel() for name, shape in group.items()} for group in groups]
            for groups in (self._saved_shapes, self._model._get_zero_param_shapes())
        )
        self._refuse_another_model(saved, now)
        keys = _ZERO_3 if self._is_zero_3 else _ZERO_12
        target = self._pieces(now, self._rank, self._ranks)
        sizes = self._sizes(now, self._ranks)
        states, buffers = {}, {}
        for rank in range(self._written.ranks):
            pairs = overlapping_ranges(self._pieces(saved, rank, self._written.ranks), target)
            # The first rank's has what all have the same, too.
            if rank and not pairs:
                continue
            found = self._read(self._written.parts[rank])["optimizer_state_dict"]
            written = self._buffers(found, keys, self._sizes(saved, self._written.ranks))
            if rank == 0:
                states = found
                buffers = {
                    name: [of_name[0].new_zeros(size) for size in sizes]
                    for name, of_name in written.items()
                }
            for name, of_name in written.items():
                for of, to in pairs:
                    _copy(of_name[of.buffer], of, buffers[name][to.buffer], to)
        return self._assembled(states, keys, buffers, saved, now)

    def _pieces(self, groups: list[dict[str, int]], rank: int, ranks: int) -> list[ShardRange]:
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

    def _refuse_another_model(self, saved: list[dict[str, int]], now: list[dict[str, int]]) -> None:
        # ZeRO-3 cuts groups by a rank's own elements: with other ranks the cuts may be elsewhere.
        if self._is_zero_3:
            same = _all(saved) == _all(now)
        else:
            same = [list(group.items()) for group in saved] == [list(g.items()) for g in now]
        if not same:
            raise CheckpointError(
                f"checkpoint {self._checkpoint}: written by {_count(self._written.ranks)}, and its "
                "trainable parameters are not this model's: start with the model and the ds.lora.* "
                "that it was written with"
            )

    def _buffers(self, found: Any, keys: _Keys, sizes: list[int]) -> dict[str, list[Any]]:
        """What of a rank's file is spread over the ranks: name -> a tensor for each buffer.

        What DeepSpeed's offloading left beside the moments is none of it, and goes.
        """
        kept = found[keys.optimizer]["state"]
        names = [name for name, value in kept.get(0, {}).items() if _is_moment(name, value)]
        moments = {name: [kept[i][name] for i in range(len(sizes))] for name in names}
        wrong = [n for n, of in moments.items() if [t.numel() for t in of] != sizes]
        if wrong:
            raise CheckpointError(
                f"checkpoint {self._checkpoint}: written by {_count(self._written.ranks)} in a way "
                f"that {self._ranks} cannot load (its {wrong[0]} has another size than its "
                "weights): set actor.num_nodes and actor.num_gpus_per_node as they were"
            )
        return {_MASTER: list(found[keys.master]), **moments}

    def _assembled(
        self,
        states: dict[str, Any],
        keys: _Keys,
        buffers: dict[str, list[Any]],
        saved: list[dict[str, int]],
        now: list[dict[str, int]],
    ) -> dict[str, Any]:
        """The first rank's file with this rank's buffers."""
        home = {name: i for i, group in enumerate(saved) for name in group}
        optimizer = states[keys.optimizer]
        moments = [name for name in buffers if name != _MASTER]
        shared = [_shared(optimizer["state"].get(home[next(iter(group))], {})) for group in now]
        new_states = {
            i: rest | {name: buffers[name][i] for name in moments} for i, rest in enumerate(shared)
        }
        groups = [dict(group) for group in optimizer["param_groups"]]
        if self._is_zero_3:
            of_group = self._model.optimizer.sub_group_to_group_id
            for number, group in enumerate(groups):
                group["params"] = [i for i in range(len(now)) if of_group[i] == number]
        return states | {
            keys.master: buffers[_MASTER],
            keys.optimizer: optimizer | {"state": new_states, "param_groups": groups},
            "partition_count": self._ranks if self._is_zero_3 else [self._ranks] * len(now),
        }


def _all(groups: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return {name: numel for group in groups for name, numel in group.items()}


def _is_moment(name: str, value: Any) -> bool:
    # A step count may be a tensor too, of no dimension.
    return getattr(value, "ndim", 0) == 1 and not name.endswith("_offload_buffer")


def _shared(state: Mapping[str, Any]) -> dict[str, Any]:
    """What every rank has the same of a buffer's state: its step count."""
    return {name: value for name, value in state.items() if getattr(value, "ndim", 0) == 0}


def _copy(source: Any, of: ShardRange, target: Any, to: ShardRange) -> None:
    target.narrow(0, to.offset, to.numel).copy_(source.narrow(0, of.offset, of.numel))
