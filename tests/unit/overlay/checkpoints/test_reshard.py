"""Which elements go where when a checkpoint is loaded by another number of ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.overlay.checkpoints import reshard, shards
from sg_rlhf.overlay.checkpoints.shards import (
    SavedLayout,
    overlapping_ranges,
    part_of_group,
    zero3_shards,
    zero12_shards,
)
from sg_rlhf.overlay.reporting.errors import CheckpointError

NUMELS = st.lists(st.integers(1, 40), min_size=1, max_size=12)
RANKS = st.integers(1, 9)


def cut(numels: list[int], at: int) -> list[dict[str, int]]:
    """Groups of parameters; ZeRO-3 cuts them elsewhere with another number of ranks."""
    named = {f"p{i}": numel for i, numel in enumerate(numels)}
    names = list(named)
    at %= len(names) + 1
    return [{n: named[n] for n in part} for part in (names[:at], names[at:]) if part]


def filled(layout: Any, values: dict[str, torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
    """A rank's buffers, as ZeRO fills them."""
    buffers = [torch.full((size,), -1) for size in sizes]
    for piece in layout:
        part = values[piece.tensor][piece.start : piece.start + piece.numel]
        buffers[piece.buffer][piece.offset : piece.offset + piece.numel] = part
    return buffers


def moved(sources: list[tuple[Any, list[torch.Tensor]]], target: Any, sizes: list[int]) -> Any:
    buffers = [torch.full((size,), -1) for size in sizes]
    for layout, written in sources:
        for of, to in overlapping_ranges(layout, target):
            reshard._copy(written[of.buffer], of, buffers[to.buffer], to)
    return buffers


@given(NUMELS, st.integers(0, 12), st.integers(0, 12), RANKS, RANKS)
def test_zero_3_every_rank_has_what_it_would_have_written(
    numels: list[int], cut_then: int, cut_now: int, then: int, now: int
) -> None:
    values = {f"p{i}": torch.arange(n) + 100 * i for i, n in enumerate(numels)}
    before, after = cut(numels, cut_then), cut(numels, cut_now)

    def sizes(groups: list[dict[str, int]], ranks: int) -> list[int]:
        return [sum(-(-n // ranks) for n in group.values()) for group in groups]

    sources = [
        (layout, filled(layout, values, sizes(before, then)))
        for layout in (zero3_shards(before, rank, then) for rank in range(then))
    ]
    for rank in range(now):
        target = zero3_shards(after, rank, now)
        expected = filled(target, values, sizes(after, now))
        found = moved(sources, target, sizes(after, now))
        assert all(map(torch.equal, found, expected))


@given(NUMELS, st.integers(0, 12), RANKS, RANKS)
def test_zero_2_every_rank_has_what_it_would_have_written(
    numels: list[int], at: int, then: int, now: int
) -> None:
    groups = cut(numels, at)
    totals = [sum(group.values()) for group in groups]
    values = {f"group {i}": torch.arange(total) for i, total in enumerate(totals)}

    def sizes(ranks: int) -> list[int]:
        return [part_of_group(total, ranks, 2) for total in totals]

    sources = [
        (layout, filled(layout, values, sizes(then)))
        for layout in (zero12_shards(groups, rank, then, 2) for rank in range(then))
    ]
    for rank in range(now):
        target = zero12_shards(groups, rank, now, 2)
        found = moved(sources, target, sizes(now))
        assert all(map(torch.equal, found, filled(target, values, sizes(now))))


def test_ranks_and_their_files_are_known_by_names() -> None:
    names = [
        "manifest.json", "metric.json",
        *(f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(12)),
        *(f"zero_pp_rank_{r}_mp_rank_00_model_states.pt" for r in range(12)),
    ]  # fmt: skip
    written = shards.written_by(names)
    assert written is not None and (written.ranks, written.tensor_parallel) == (12, 1)
    assert written.parts[11] == "bf16_zero_pp_rank_11_mp_rank_00_optim_states.pt"
    assert written.models[11] == "zero_pp_rank_11_mp_rank_00_model_states.pt"
    two = ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    assert shards.written_by(two) == SavedLayout(1, 1, {0: two[1]}, {})
    assert shards.written_by(["mp_rank_00_model_states.pt"]) is None


def written(ranks: int, tensor_parallel: int = 1, zero_3: bool = True) -> SavedLayout:
    parts = {rank: f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(ranks)}
    models = {rank: f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(ranks)}
    return SavedLayout(ranks, tensor_parallel, parts, models if zero_3 else {})


def test_what_cannot_be_loaded_is_refused_by_name() -> None:
    refusal = shards.incompatibility
    assert refusal(written(2), 1, 1, 3) is None and refusal(written(2), 2, 1, 3) is None
    assert refusal(written(2, 2), 2, 2, 3) is None
    assert refusal(written(2, zero_3=False), 4, 1, 1) is None
    assert refusal(written(2), 2, 1, 2) == (
        "it was written with ds.zero_stage=3, and now it is 2: set it back"
    )
    assert refusal(written(2, zero_3=False), 2, 1, 3) == (
        "it was written with ds.zero_stage=1 or 2, and now it is 3: set it back"
    )
    for was, now in (((2, 2), (1, 2)), ((2, 1), (1, 2)), ((1, 2), (1, 1))):
        assert refusal(written(*was), *now, 3) == (
            f"it was written by {shards._layout(*was)}, and now there are "
            f"{shards._layout(*now)}: with tensor parallelism neither may change; set "
            "actor.num_nodes, actor.num_gpus_per_node and ds.tensor_parallel_size as they were"
        )


def engine(ranks: int) -> Any:
    return SimpleNamespace(
        seq_dp_world_size=ranks, mp_world_size=1, autotp_size=lambda: 1,
        zero_optimization_stage=lambda: 3, checkpoint_engine="DeepSpeed's",
        _get_all_ckpt_names=lambda *_: ["its own"],
    )  # fmt: skip


def test_as_many_ranks_load_as_ever(tmp_path: Path) -> None:
    for name in (*written(2).parts.values(), *written(2).models.values()):
        (tmp_path / name).touch()
    model = engine(2)
    with reshard.load_resharded(model, tmp_path) as what:
        assert what == "" and model.checkpoint_engine == "DeepSpeed's"


def test_a_part_on_another_machines_disk_is_missed(tmp_path: Path) -> None:
    (tmp_path / written(2).parts[1]).touch()
    (tmp_path / written(2).models[1]).touch()
    (tmp_path / written(2).models[0]).touch()
    model = engine(1)
    with (
        pytest.raises(CheckpointError, match="put all files on each machine, or set actor.num_n"),
        reshard.load_resharded(model, tmp_path),
    ):
        pass
    assert model.checkpoint_engine == "DeepSpeed's"
