"""DeepSpeed's operators: which are built, where, and over what a killed build left behind."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from sg_rlhf.overlay.patches import op_builds


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.delenv(op_builds.VARIABLE, raising=False)
    return tmp_path


def test_an_environment_builds_in_its_own_folder(prefix: Path) -> None:
    op_builds.install()
    assert op_builds.enabled() and op_builds.folder() == prefix / "torch_extensions"


def test_a_users_own_folder_is_left_alone(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(op_builds.VARIABLE, str(prefix / "shared"))
    op_builds.install()
    assert not op_builds.enabled()


def test_a_dead_lock_is_cleared_and_debug_symbols_are_left_out(prefix: Path) -> None:
    dead = op_builds.folder() / "op" / "lock"
    dead.parent.mkdir(parents=True)
    dead.touch()
    seen: list[Any] = []

    def load(name: str, sources: list[str], **options: Any) -> str:
        seen.append((name, sources, options, dead.exists()))
        return "module"

    guarded = op_builds.with_file_lock(load)
    flags = ["-O3", "-g", "-march=native", "-fopenmp"]
    assert guarded("op", ["a.cpp"], extra_cflags=flags, verbose=True) == "module"
    without = ["-O3", "-march=native", "-fopenmp"]
    assert seen == [("op", ["a.cpp"], {"extra_cflags": without, "verbose": True}, False)]
    assert flags == ["-O3", "-g", "-march=native", "-fopenmp"], "the caller's list"
