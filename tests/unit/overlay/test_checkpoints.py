"""What goes and what stays of a run's checkpoints, on real folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sg_rlhf.overlay import checkpoints
from sg_rlhf.overlay.checkpoints import Saved, superseded, superseded_weights


class Engine:
    """What DeepSpeed's engine leaves on the disk; it may be killed while it writes."""

    global_steps = 7

    def __init__(self, killed: bool = False) -> None:
        self.killed = killed
        self.beside: list[set[str]] = []

    def save_checkpoint(self, folder: str, tag: str, client_state: Any, save_latest: bool) -> None:
        assert client_state == {} and save_latest
        self.beside.append(folders(Path(folder)))
        (Path(folder) / tag).mkdir(exist_ok=True)
        (Path(folder) / tag / "states.pt").write_bytes(b"x" * 1000)
        if self.killed:
            raise KeyboardInterrupt
        (Path(folder) / "latest").write_text(tag)


def strategy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Upstream's own, of one rank, without the process group that its barrier needs."""
    from openrlhf.utils import distributed_util
    from openrlhf.utils.deepspeed import DeepspeedStrategy

    monkeypatch.setattr(distributed_util, "torch_dist_barrier_and_cuda_sync", lambda: None)
    return object.__new__(DeepspeedStrategy)


def folders(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_checkpoints_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    engine, one = Engine(), strategy(monkeypatch)
    for step in range(20, 140, 20):
        checkpoints.save(one, engine, str(tmp_path), f"global_step{step}", max_num=keep)
        assert f"global_step{step}" in folders(tmp_path)
    assert folders(tmp_path) == {f"global_step{120 - 20 * i}" for i in range(keep)}
    # Room is made before, as upstream does, but never of the one that `latest` names.
    assert max(map(len, engine.beside)) == max(1, keep - 1)
    written = json.loads((tmp_path / "global_step120" / "metric.json").read_text())
    assert written == {"metric_key": None, "metric_value": None}


@pytest.mark.parametrize("metrics", [(None, None, None), (0.9, 0.5, 0.1)])
def test_a_killed_save_leaves_what_latest_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metrics: tuple[float | None, ...]
) -> None:
    one = strategy(monkeypatch)
    for step, metric in enumerate(metrics):
        checkpoints.save(
            one, Engine(), str(tmp_path), f"global_step{step}", max_num=1, metric_value=metric
        )
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(one, Engine(killed=True), str(tmp_path), "global_step9", max_num=1)
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert "global_step2" in folders(tmp_path)


def test_the_best_one_is_replaced_by_a_better_one_and_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, one = Engine(), strategy(monkeypatch)
    for step in (1, 2, 3, 4):
        checkpoints.save(one, engine, str(tmp_path), f"global_step{step}", max_num=2)
        if step in (1, 3):
            checkpoints.save(one, engine, str(tmp_path), f"best_global_step{step}", max_num=2)
            assert f"best_global_step{step}" in folders(tmp_path)
    assert folders(tmp_path) == {"best_global_step3", "global_step3", "global_step4"}


def test_nothing_else_in_the_folder_is_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {"notes", "global_step20_universal", "best"}
    for name in others:
        (tmp_path / name).mkdir()
    for step in (1, 2, 3):
        checkpoints.save(strategy(monkeypatch), Engine(), str(tmp_path), f"global_step{step}", 1)
    assert folders(tmp_path) == others | {"global_step3"}


def test_the_order_is_upstreams() -> None:
    saved = [
        Saved("global_step1", 0.9), Saved("global_step2", 0.2), Saved("global_step3"),
        Saved("global_step10"), Saved("global_step11", 0.2), Saved("best_global_step9", 0.95),
    ]  # fmt: skip
    order = superseded(saved, 0, 0, needed=())
    assert order == [
        "global_step3", "global_step10", "global_step2", "global_step11", "global_step1"
    ]  # fmt: skip
    assert superseded(saved, 3, 1e9, needed=()) == order[:2]
    assert superseded(saved, 3, 1e9, needed={"global_step3"}) == order[1:3]


def test_the_size_counts_best_ones_and_deletes_regular_ones() -> None:
    saved = [Saved(f"global_step{i}", size=10) for i in (1, 2, 3)]
    assert superseded([*saved, Saved("best_global_step2", size=25)], 3, 45, ()) == ["global_step1"]
    assert superseded(saved, 3, 30, ()) == []


@pytest.mark.parametrize(
    ("tags", "keep", "resumable", "gone"),
    [
        ([1, 2, 3], 3, [1, 2, 3], []),
        ([1, 2, 3, 4], 3, [2, 3, 4], [1]),
        # Kept by its metric: the folder of the checkpoint that is gone goes, not the oldest.
        ([1, 2, 3, 4], 3, [1, 3, 4], [2]),
        # The user deleted checkpoints to evaluate the plain folders later: they are not too many.
        ([1, 2, 3], 3, [3], []),
        ([1, 2, 3, 4], 3, [4], [1]),
        # Only plain folders are written (ckpt.disable_ds).
        ([20, 100, 40, 60], 2, None, [20, 40]),
    ],
)
def test_a_plain_folder_stays_as_long_as_its_checkpoint(
    tags: list[int], keep: int, resumable: list[int] | None, gone: list[int]
) -> None:
    named = None if resumable is None else {f"global_step{i}" for i in resumable}
    found = superseded_weights([f"global_step{i}" for i in tags], keep, named)
    assert found == [f"global_step{i}" for i in gone]


@pytest.mark.parametrize("resumable", [True, False])
def test_plain_folders_rotate_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumable: bool
) -> None:
    """Thirteen saves of a search run, an evaluation's best ones, and folders of the user's."""
    one, mine = strategy(monkeypatch), {"final_hf", "global_step20_hf_of_mine", "base_model_hf"}
    for name in mine:
        (tmp_path / name).mkdir()
    for step in range(20, 280, 20):
        best = [f"best_global_step{step}"] if step in (20, 100, 200) else []
        for tag in (f"global_step{step}", *best):
            if resumable:
                checkpoints.save(one, Engine(), str(tmp_path / "_actor"), tag, 3)
            (tmp_path / f"{tag}_hf").mkdir()
            checkpoints.delete_superseded_weights(tmp_path, 3, resumable)
            assert (tmp_path / f"{tag}_hf").is_dir()
    left = {"best_global_step200", "global_step220", "global_step240", "global_step260"}
    assert folders(tmp_path) - mine - {"_actor"} == {f"{tag}_hf" for tag in left}
    assert not resumable or folders(tmp_path / "_actor") == left


def test_the_final_model_stays_wherever_it_is(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f"global_step{step}_hf").mkdir()
    final = tmp_path / "elsewhere" / ".." / "global_step1_hf"
    (tmp_path / "elsewhere").mkdir()
    assert checkpoints.delete_superseded_weights(tmp_path, 1, False, final) == []
    assert checkpoints.delete_superseded_weights(tmp_path, 0, False, final) == ["global_step2_hf"]
