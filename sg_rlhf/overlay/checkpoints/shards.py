"""The elements of a model that each ZeRO rank holds in its files: arithmetic without tensors.

DeepSpeed 0.19.8 cuts them as :func:`zero3_shards` and :func:`zero12_shards` say.
:mod:`.reshard` copies them to another number of ranks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

_PART = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")


class ShardRange(NamedTuple):
    """A contiguous range of a tensor's elements in one of a rank's flat buffers."""

    tensor: str
    start: int
    numel: int
    buffer: int
    offset: int


class SavedLayout(NamedTuple):
    """The files of a checkpoint: rank -> optimizer file, rank -> model file.

    ``models`` is empty for ZeRO-1 and 2, where one rank writes the model.
    """

    ranks: int
    tensor_parallel: int
    parts: dict[int, str]
    models: dict[int, str]


def written_by(names: Iterable[str]) -> SavedLayout | None:
    """The layout of a checkpoint, by its file names; None if it is not a ZeRO checkpoint."""
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
    """A rank's shards under ZeRO-3: one padded part of each parameter, in the buffer's order."""
    shards = []
    for buffer, group in enumerate(groups):
        offset = 0
        for name, numel in group.items():
            part = -(-numel // ranks)
            present = min(part, numel - rank * part)
            if present > 0:
                shards.append(ShardRange(name, rank * part, present, buffer, offset))
            offset += part
    return shards


def zero12_shards(
    groups: Sequence[Mapping[str, int]], rank: int, ranks: int, alignment: int
) -> list[ShardRange]:
    """A rank's shards under ZeRO-1 and 2: one part of each group of concatenated parameters."""
    shards = []
    for buffer, group in enumerate(groups):
        total = sum(group.values())
        part = part_of_group(total, ranks, alignment)
        present = min(part, total - rank * part)
        if present > 0:
            shards.append(ShardRange(f"group {buffer}", rank * part, present, buffer, 0))
    return shards


def part_of_group(total: int, ranks: int, alignment: int) -> int:
    """Number of elements of a rank's part of a group under ZeRO-1 and 2, with padding."""
    return -(-total // (ranks * alignment)) * alignment


def overlapping_ranges(
    source: Iterable[ShardRange], target: Iterable[ShardRange]
) -> list[tuple[ShardRange, ShardRange]]:
    """The elements that two ranks both have."""
    by_tensor = defaultdict(list)
    for shard in source:
        by_tensor[shard.tensor].append(shard)
    pairs = []
    for to in target:
        for shard in by_tensor[to.tensor]:
            first = max(shard.start, to.start)
            last = min(shard.start + shard.numel, to.start + to.numel)
            if first < last:
                pairs.append((_subrange(shard, first, last), _subrange(to, first, last)))
    return pairs


def _subrange(shard: ShardRange, first: int, last: int) -> ShardRange:
    offset = shard.offset + first - shard.start
    return shard._replace(start=first, numel=last - first, offset=offset)


def incompatibility(
    written: SavedLayout, ranks: int, tensor_parallel: int, stage: int
) -> str | None:
    """One line saying why these ranks cannot load a checkpoint; None if they can."""
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
    return f"{count_ranks(ranks)} with ds.tensor_parallel_size={tensor_parallel}"


def count_ranks(ranks: int) -> str:
    return f"{ranks} rank" if ranks == 1 else f"{ranks} ranks"
