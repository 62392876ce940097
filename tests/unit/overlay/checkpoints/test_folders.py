"""The folders of checkpoints: names, order, manifests, and what a kill leaves."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.overlay.checkpoints import manifest
from sg_rlhf.overlay.checkpoints import paths as folders
from sg_rlhf.overlay.learner import actor
from sg_rlhf.overlay.rollout.async_buffer import BUFFER_KEY

# -- What counts as a checkpoint, in which order, and what an interrupted rename leaves ----------


def tree(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))


def made(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "file").write_text(text)
    return folder


def test_the_last_save_is_tried_first_then_the_newest(tmp_path: Path) -> None:
    assert folders.resume_candidates(tmp_path / "gone") == folders.resume_candidates(tmp_path) == []
    for name in (
        "global_step9", "global_step10", "best_global_step9", "best_global_step2", "notes",
        ".global_step11.partial", ".global_step12.replaced", "global_step20_universal",
    ):  # fmt: skip
        (tmp_path / name).mkdir()
    (tmp_path / "global_step99").touch()  # a file is no checkpoint
    newest = ["global_step10", "best_global_step9", "global_step9", "best_global_step2"]
    assert folders.resume_candidates(tmp_path) == newest
    folders.write_latest(tmp_path, "global_step9")
    assert folders.resume_candidates(tmp_path) == [
        "global_step9", "global_step10", "best_global_step9", "best_global_step2"
    ]  # fmt: skip
    folders.write_latest(tmp_path, "global_step30")  # somebody deleted it, and is told so
    assert folders.resume_candidates(tmp_path) == ["global_step30", *newest]
    (tmp_path / folders.LATEST).write_bytes(b"\xff\x00")
    assert folders.resume_candidates(tmp_path) == newest


@given(text=st.text(max_size=30))
def test_whatever_latest_says_nothing_outside_is_a_candidate(text: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as at:
        (Path(at) / "global_step1").mkdir()
        (Path(at) / folders.LATEST).write_text(text)
        found = folders.resume_candidates(Path(at))
        assert found[-1] == "global_step1"
        assert all(folders.TAG.fullmatch(tag) for tag in found)


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    final = tmp_path / "global_step1"
    for text in ("first", "second"):
        folders.publish(made(folders.temp_path(final), text), final)
        assert tree(tmp_path) == ["global_step1", "global_step1/file"]
        assert (final / "file").read_text() == text


def test_what_is_half_deleted_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tags = ["global_step1", "global_step2"]
    for tag in tags:
        made(tmp_path / tag, tag)
    folders.remove(tmp_path / "global_step1")
    assert tree(tmp_path) == ["global_step2", "global_step2/file"]

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(folders.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            folders.remove(tmp_path / "global_step2")
    assert folders.resume_candidates(tmp_path) == []
    assert folders.remove_incomplete(tmp_path) == [".global_step2.partial"]


def test_leftovers_go_and_nothing_else(tmp_path: Path) -> None:
    kept = ["best_global_step1", "global_step1", "mine.partial", ".hidden", ".git.partial"]
    gone = [".best_global_step2.partial", ".global_step3.partial", ".global_step4_hf.partial"]
    for name in (*kept, *gone):
        made(tmp_path / name, name)
    # Killed between two renames, and just behind them.
    made(tmp_path / ".global_step5.replaced", "the old one")
    made(tmp_path / ".global_step1.replaced", "the old one")
    assert folders.remove_incomplete(tmp_path) == sorted([*gone, ".global_step1.replaced"])
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*kept, "global_step5"])
    assert (tmp_path / "global_step5" / "file").read_text() == "the old one"
    assert (tmp_path / "global_step1" / "file").read_text() == "global_step1"
    assert folders.remove_incomplete(tmp_path / "gone") == []


# -- What a manifest notices, on real folders of any contents ------------------------------------


FILES = st.dictionaries(
    st.from_regex(r"[a-z]{1,3}(/zero_pp_rank_[0-9]_x\.pt)?", fullmatch=True).map(
        lambda name: name if "/" in name else f"{name}.bin"
    ),
    st.binary(max_size=200),
    min_size=1,
    max_size=6,
)


def written(folder: Path, files: dict[str, bytes]) -> dict[str, manifest.Entry]:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    manifest.write(folder, manifest.hash_files(folder, manifest.names(folder), sync=True))
    found = manifest.read(folder)
    assert found is not None
    return found


@given(files=FILES)
def test_it_is_of_every_file_and_of_what_is_in_it(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as name:
        found = written(Path(name), files)
        assert found == {
            name: manifest.Entry(len(data), hashlib.sha256(data).hexdigest())
            for name, data in files.items()
        }
        assert manifest.first_mismatch(Path(name), found, found) is None
        assert manifest.names(Path(name)) == sorted(files)


@given(files=FILES, data=st.data())
def test_it_notices_any_change_of_a_file(files: dict[str, bytes], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(files)))
    other = data.draw(st.none() | st.binary(max_size=200).filter(lambda new: new != files[name]))
    with tempfile.TemporaryDirectory() as at:
        folder = Path(at)
        found = written(folder, files)
        if other is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(other)
        said = manifest.first_mismatch(folder, found, sorted(found))
        assert said is not None and said.startswith(f"{name} ") and "\n" not in said
        # Who reads the others has nothing to say.
        assert manifest.first_mismatch(folder, found, sorted(set(found) - {name})) is None


@given(files=FILES, cut=st.integers(0, 400))
def test_a_manifest_that_is_cut_short_is_none(files: dict[str, bytes], cut: int) -> None:
    with tempfile.TemporaryDirectory() as at:
        written(Path(at), files)
        path = Path(at) / manifest.NAME
        text = path.read_bytes().rstrip()
        path.write_bytes(text[: min(cut, len(text) - 1)])
        with pytest.raises(
            manifest.InvalidManifest, match=r"manifest\.json cannot be read: its content"
        ):
            manifest.read(Path(at))


def test_a_folder_without_one(tmp_path: Path) -> None:
    assert manifest.read(tmp_path) is None
    assert manifest.read(tmp_path / "gone") is None
    (tmp_path / manifest.NAME).mkdir()
    with pytest.raises(manifest.InvalidManifest, match="Is a directory"):
        manifest.read(tmp_path)


@given(names=st.sets(st.from_regex(r"(rank_?[0-9]{1,3})?[a-z]{1,4}", fullmatch=True)),
       ranks=st.integers(1, 9))  # fmt: skip
def test_each_file_is_read_once(names: set[str], ranks: int) -> None:
    dealt = manifest.assign_files(names, ranks)
    assert len(dealt) == ranks
    assert sorted(name for share in dealt for name in share) == sorted(names)


def test_a_rank_reads_what_it_wrote() -> None:
    names = [f"zero_pp_rank_{rank}_mp_rank_00_{of}.pt" for rank in range(3) for of in "ab"]
    for rank, share in enumerate(manifest.assign_files([*names, "metric.json"], 3)):
        assert {name for name in share if f"pp_rank_{rank}_" in name} == set(
            names[2 * rank : 2 * rank + 2]
        )


# -- A checkpoint and its plain folder, of a process that is killed between the two --------------


class Killed(BaseException):
    """Nothing catches it."""


class Disk:
    """The strategy's two ways to save; the process is killed after the first ``alive`` of them."""

    def __init__(self, folder: Path, alive: int, is_first: bool = True) -> None:
        self.is_first = is_first
        self.states: dict[str, Any] = {}
        self.args = SimpleNamespace(
            ckpt=SimpleNamespace(
                path=str(folder), max_num=2, max_mem=1000, disable_ds=False, save_hf=False,
                output_dir=str(folder / "final"),
            ),
            train=SimpleNamespace(enable_ema=False),
        )  # fmt: skip
        self._left = alive

    def is_rank_0(self) -> bool:
        return self.is_first

    def _write(self, folder: Path) -> None:
        if not self._left:
            raise Killed
        self._left -= 1
        folder.mkdir(parents=True)

    def save_ckpt(self, _model: Any, folder: str, tag: str, *given: Any, **__: Any) -> None:
        self.states = next(one for one in given if isinstance(one, dict))
        self._write(Path(folder) / tag)

    def save_model(self, _model: Any, _tokenizer: Any, folder: str) -> None:
        self._write(Path(folder))


@pytest.mark.parametrize("save_hf", [True, False])
@pytest.mark.parametrize("disable_ds", [True, False])
@pytest.mark.parametrize("alive", [0, 1, 2])
def test_no_checkpoint_is_without_its_plain_folder(
    alive: int,
    disable_ds: bool,
    save_hf: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy_rank: Any,
) -> None:
    monkeypatch.setattr(actor, "torch_dist_barrier_and_cuda_sync", lambda: None)
    rank = policy_rank
    rank.actor, rank.tokenizer = SimpleNamespace(model=None), None
    rank.ema_model = None
    rank.strategy = Disk(tmp_path, alive)
    rank.strategy.args.ckpt.disable_ds = disable_ds
    rank.strategy.args.ckpt.save_hf = save_hf
    wanted = save_hf + (not disable_ds)
    if alive < wanted:
        with pytest.raises(Killed):
            rank.save_checkpoint("global_step3")
    else:
        rank.save_checkpoint("global_step3")
    plain = (tmp_path / "global_step3_hf").is_dir()
    resumable = (tmp_path / "_actor" / "global_step3").is_dir()
    assert plain + resumable == min(alive, wanted)
    assert plain or not (save_hf and resumable)


@pytest.mark.parametrize("is_first", [True, False])
def test_the_samples_that_wait_for_their_update_are_in_the_first_ranks_file_alone(
    is_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_rank: Any
) -> None:
    monkeypatch.setattr(actor, "torch_dist_barrier_and_cuda_sync", lambda: None)
    rank = policy_rank
    rank.actor, rank.tokenizer = SimpleNamespace(model=None), None
    rank.ema_model = None
    rank.strategy = Disk(tmp_path, 1, is_first)
    rank.save_checkpoint(
        "global_step3", client_states={"global_step": 3, BUFFER_KEY: {"batches": []}}
    )
    assert rank.strategy.states["global_step"] == 3
    assert (BUFFER_KEY in rank.strategy.states) is is_first
