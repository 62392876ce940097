"""What goes and what stays of a run's checkpoints, on real folders."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sg_rlhf.overlay.checkpoints import manifest, paths, store
from sg_rlhf.overlay.checkpoints.store import CheckpointInfo, hf_folders_to_prune, to_prune
from sg_rlhf.overlay.reporting.errors import CheckpointError


class Engine:
    """What DeepSpeed's engine leaves on the disk; it may be killed while it writes."""

    global_steps = 7

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.beside: list[set[str]] = []
        self.optimizer = SimpleNamespace(state={})
        self.loaded: Any = None

    def save_checkpoint(self, folder: str, tag: str, client_state: Any, save_latest: bool) -> None:
        assert client_state == {} and not save_latest
        self.beside.append(folders(Path(folder)))
        (Path(folder) / tag).mkdir()
        (Path(folder) / tag / "states.pt").write_bytes(b"x" * 1000)
        (Path(folder) / "zero_to_fp32.py").touch()
        if self.error is not None:
            raise self.error

    def load_universal_checkpoint(self) -> bool:
        return False

    def load_checkpoint(self, folder: str, tag: str, **_: Any) -> Any:
        self.loaded = tag
        path = Path(folder) / tag
        return (str(path), {"global_step": 3}) if path.is_dir() else (None, None)


def strategy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Upstream's own, of one rank, without the process group that its barrier needs."""
    from openrlhf.utils import distributed_util
    from openrlhf.utils.deepspeed import DeepspeedStrategy

    monkeypatch.setattr(distributed_util, "torch_dist_barrier_and_cuda_sync", lambda: None)
    return object.__new__(DeepspeedStrategy)


def folders(folder: Path) -> set[str]:
    """Those that a user sees."""
    return {p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")}


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_checkpoints_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    engine, one = Engine(), strategy(monkeypatch)
    for step in range(20, 140, 20):
        store.save(one, engine, str(tmp_path), f"global_step{step}", max_num=keep)
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
        store.save(
            one, Engine(), str(tmp_path), f"global_step{step}", max_num=1, metric_value=metric
        )
    with pytest.raises(KeyboardInterrupt):
        store.save(one, Engine(KeyboardInterrupt()), str(tmp_path), "global_step9", max_num=1)
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert folders(tmp_path) == {"global_step2"}
    # What it left is no checkpoint, and goes with the next save.
    assert (tmp_path / ".global_step9.partial").is_dir()
    store.save(one, Engine(), str(tmp_path), "global_step10", max_num=3)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_no_rank_clears_up_while_the_first_one_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that is being deleted has a leftover's name: two ranks deleted it at once."""
    from openrlhf.utils import distributed_util

    one = strategy(monkeypatch)
    calls: list[str] = []

    def recorded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: calls.append(name) or original(*args)

    store.save(one, Engine(), str(tmp_path), "global_step1", max_num=1)
    store.save(one, Engine(), str(tmp_path), "global_step2", max_num=2)
    for name in ("remove", "remove_incomplete"):
        monkeypatch.setattr(paths, name, recorded(name, getattr(paths, name)))
    monkeypatch.setattr(
        distributed_util, "torch_dist_barrier_and_cuda_sync", lambda: calls.append("all")
    )
    store.save(one, Engine(), str(tmp_path), "global_step3", max_num=2)
    assert calls == ["remove", "all", "remove_incomplete", "all"]


def test_the_best_one_is_replaced_by_a_better_one_and_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, one = Engine(), strategy(monkeypatch)
    for step in (1, 2, 3, 4):
        store.save(one, engine, str(tmp_path), f"global_step{step}", max_num=2)
        if step in (1, 3):
            store.save(one, engine, str(tmp_path), f"best_global_step{step}", max_num=2)
            assert f"best_global_step{step}" in folders(tmp_path)
    assert folders(tmp_path) == {"best_global_step3", "global_step3", "global_step4"}


def test_nothing_else_in_the_folder_is_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {"notes", "global_step20_universal", "best"}
    for name in others:
        (tmp_path / name).mkdir()
    for step in (1, 2, 3):
        store.save(strategy(monkeypatch), Engine(), str(tmp_path), f"global_step{step}", 1)
    assert folders(tmp_path) == others | {"global_step3"}


def test_the_order_is_upstreams() -> None:
    saved = [
        CheckpointInfo("global_step1", 0.9),
        CheckpointInfo("global_step2", 0.2),
        CheckpointInfo("global_step3"),
        CheckpointInfo("global_step10"),
        CheckpointInfo("global_step11", 0.2),
        CheckpointInfo("best_global_step9", 0.95),
    ]
    order = to_prune(saved, 0, 0, needed=())
    assert order == [
        "global_step3", "global_step10", "global_step2", "global_step11", "global_step1"
    ]  # fmt: skip
    assert to_prune(saved, 3, 1e9, needed=()) == order[:2]
    assert to_prune(saved, 3, 1e9, needed={"global_step3"}) == order[1:3]


def test_the_size_counts_best_ones_and_deletes_regular_ones() -> None:
    saved = [CheckpointInfo(f"global_step{i}", size=10) for i in (1, 2, 3)]
    assert to_prune([*saved, CheckpointInfo("best_global_step2", size=25)], 3, 45, ()) == [
        "global_step1"
    ]
    assert to_prune(saved, 3, 30, ()) == []


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
    found = hf_folders_to_prune([f"global_step{i}" for i in tags], keep, named)
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
                store.save(one, Engine(), str(tmp_path / "_actor"), tag, 3)
            (tmp_path / f"{tag}_hf").mkdir()
            store.delete_pruned_hf_folders(tmp_path, 3, resumable)
            assert (tmp_path / f"{tag}_hf").is_dir()
    left = {"best_global_step200", "global_step220", "global_step240", "global_step260"}
    assert folders(tmp_path) - mine - {"_actor"} == {f"{tag}_hf" for tag in left}
    assert not resumable or folders(tmp_path / "_actor") == left


def test_the_final_model_stays_wherever_it_is(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f"global_step{step}_hf").mkdir()
    final = tmp_path / "elsewhere" / ".." / "global_step1_hf"
    (tmp_path / "elsewhere").mkdir()
    assert store.delete_pruned_hf_folders(tmp_path, 1, False, final) == []
    assert store.delete_pruned_hf_folders(tmp_path, 0, False, final) == ["global_step2_hf"]


def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *tags: str) -> Any:
    """A folder of checkpoints and its strategy."""
    one = strategy(monkeypatch)
    for tag in tags:
        store.save(one, Engine(), str(tmp_path), tag)
    return one


def load(one: Any, folder: Path) -> tuple[Engine, Any]:
    """What a resumed run does; tests/integration has it with DeepSpeed's own engine."""

    def upstream(engine: Engine, folder: str, tag: str) -> Any:
        return engine.load_checkpoint(folder, tag)

    engine = Engine()
    return engine, store.load_newest_intact(upstream, engine, str(folder))


def test_a_save_is_whole_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = saved(tmp_path, monkeypatch, "global_step1", "global_step3")
    files = manifest.read(tmp_path / "global_step3")
    assert files is not None and set(files) == {"metric.json", "states.pt"}
    engine, (path, states) = load(one, tmp_path)
    assert engine.loaded == "global_step3" and path == str(tmp_path / "global_step3")
    assert states == {"global_step": 3}


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:7])


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        ("states.pt", remove, "states.pt is missing"),
        ("states.pt", cut, "states.pt has 7 bytes and was written with 1000"),
        ("states.pt", alter, "states.pt was altered (its SHA-256 differs)"),
        ("metric.json", empty, "metric.json has 0 bytes and was written with "),
        ("manifest.json", remove, "manifest.json is missing"),
        ("manifest.json", cut, "manifest.json cannot be read: its content is truncated or altered"),
        (
            "manifest.json",
            empty,
            "manifest.json cannot be read: its content is truncated or altered",
        ),
        (".", shutil.rmtree, "the folder is missing"),
    ],
)
def test_a_torn_checkpoint_is_named_and_the_one_before_it_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    harm: Callable[[Path], None],
    said: str,
) -> None:
    tags = ("global_step1", "global_step2", "best_global_step2", "global_step3")
    one = saved(tmp_path, monkeypatch, *tags)
    harm(tmp_path / "global_step3" / name)
    capsys.readouterr()
    engine, _ = load(one, tmp_path)
    assert engine.loaded == "best_global_step2"
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"checkpoint {tmp_path / 'global_step3'}: {said}")
    assert line.endswith("; resuming from best_global_step2")
    assert paths.resume_candidates(tmp_path)[0] == "best_global_step2"
    # The same step is saved again, over what is torn.
    store.save(one, Engine(), str(tmp_path), "global_step3")
    assert load(one, tmp_path)[0].loaded == "global_step3"


def test_without_a_whole_one_the_run_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = saved(tmp_path, monkeypatch, "global_step1", "global_step2")
    for tag in ("global_step1", "global_step2"):
        alter(tmp_path / tag / "states.pt")
    with pytest.raises(CheckpointError) as raised:
        load(one, tmp_path)
    said = str(raised.value)
    assert "\n" not in said and said.startswith(
        f"no checkpoint is intact: {tmp_path / 'global_step2'}: states.pt was altered"
    )
    assert f"; {tmp_path / 'global_step1'}: states.pt was altered" in said
    assert said.endswith("; restore one from a copy, or start in another --run-dir")
    assert (tmp_path / "latest").read_text() == "global_step2"


def test_what_deepspeed_does_not_load_is_no_fresh_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = saved(tmp_path, monkeypatch, "global_step1")
    monkeypatch.setattr(Engine, "load_checkpoint", lambda *_, **__: (None, None))
    with pytest.raises(CheckpointError, match="global_step1: DeepSpeed found nothing to load"):
        load(one, tmp_path)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_named_and_leaves_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    one = saved(tmp_path, monkeypatch, "global_step1")
    with pytest.raises(OSError, match="No space left on device") as raised:
        store.save(one, Engine(error), str(tmp_path), "global_step2", max_num=1)
    assert raised.value.errno == errno.ENOSPC
    assert raised.value.filename == str(tmp_path / "global_step2")
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["global_step1"]
    assert load(one, tmp_path)[0].loaded == "global_step1"


class Model:
    """What upstream's ``save_model`` writes, and whether it gets to its end."""

    def __init__(self, files: dict[str, str], error: BaseException | None = None) -> None:
        self.files, self.error = files, error


def save_model(one: Any, model: Model, final: Path) -> None:
    def write(output_dir: str) -> None:
        for name, text in model.files.items():
            path = Path(output_dir) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        if model.error is not None:
            raise model.error

    store.save_model(write, final, one.is_rank_0())


def contents(folder: Path) -> dict[str, str]:
    return {
        p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()
    }


FIRST = {"config.json": "1", "model.safetensors": "1", "extra/tokens.json": "1"}
SECOND = {"config.json": "2", "model.safetensors": "2"}


@pytest.mark.parametrize("there", [False, True])
def test_a_plain_folder_has_its_name_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    one, final = strategy(monkeypatch), tmp_path / "final"
    if there:
        final.mkdir()
        (final / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    full = OSError(errno.ENOSPC, "No space left on device")
    for error in (KeyboardInterrupt(), full):
        with pytest.raises(type(error)) as raised:
            save_model(one, Model(FIRST, error), final)
        assert not there or contents(final).items() >= {"notes.txt": "mine"}.items()
        assert final.exists() == there and not (final / "config.json").exists()
    assert raised.value.filename == str(final)  # type: ignore[attr-defined]
    assert contents(tmp_path) == before
    save_model(one, Model(FIRST), final)
    kept = {"notes.txt": "mine"} if there else {}
    assert contents(final) == FIRST | kept
    save_model(one, Model(SECOND), final)
    assert contents(final) == FIRST | SECOND | kept
    assert folders(tmp_path) == {"final"} and not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_saved_files_have_the_umasks_mode_and_adapters_are_written_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    layers = ["q_proj", "down_proj", "k_proj"]

    def save(name: str, order: list[str]) -> dict[str, str]:
        def write(output_dir: str) -> None:
            written = Path(output_dir)
            written.mkdir()
            (written / "config.json").write_text("{}")
            (written / "README.md").write_text("base_model: /somewhere/here")
            (written / "adapter_config.json").write_text(
                json.dumps({"r": 4, "target_modules": order})
            )
            (written / "adapter_model.safetensors").touch(0o600)  # as safetensors does

        final = tmp_path / name
        store.save_model(write, final, one.is_rank_0())
        assert {path.stat().st_mode & 0o777 for path in final.iterdir()} == {0o666 & ~umask}
        return contents(final)

    one = strategy(monkeypatch)
    before = os.umask(umask)
    try:
        first = save("first", layers)
        assert first == save("second", layers[::-1])
    finally:
        os.umask(before)
    assert sorted(first) == ["adapter_config.json", "adapter_model.safetensors", "config.json"]
    assert json.loads(first["adapter_config.json"])["target_modules"] == sorted(layers)
