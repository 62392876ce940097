"""What counts as a checkpoint, in which order, and what an interrupted rename leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.overlay.checkpoints import paths as folders


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
