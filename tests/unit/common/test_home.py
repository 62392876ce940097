"""A user without a writable HOME."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sg_rlhf.common import home
from sg_rlhf.doctor.check import FAILED
from sg_rlhf.doctor.checks import Needs, disk
from sg_rlhf.machine.facts import Facts
from sg_rlhf.machine.gather import disks

NOBODY = 65534


def as_nobody(what: Callable[[], Any], temporary: Path, **variables: str) -> Any:
    """The result of a call in a process without a home, whose user owns no files."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        os.environ.update({"HOME": "/nonexistent", "TMPDIR": str(temporary), **variables})
        home.tempfile.tempdir = None
        sender.send(what())

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    found = receiver.recv() if receiver.poll(60) else None
    process.join()
    return found


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    """A folder for everybody, and open parents."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o777)
    parents = [parent for parent in folder.parents if parent.stat().st_uid == os.getuid()]
    modes = {parent: parent.stat().st_mode for parent in parents if parent != Path("/")}
    for parent, mode in modes.items():
        parent.chmod(mode | 0o111)
    yield folder
    for parent, mode in modes.items():
        parent.chmod(mode)


def test_caches_go_below_the_temporary_folder_if_home_is_not_writable(temporary: Path) -> None:
    def call() -> tuple[str, str, str]:
        home.ensure()
        first = os.environ["HOME"]
        Path(first, ".cache").mkdir(exist_ok=True)
        os.environ["HOME"] = "/nonexistent"
        home.ensure()
        return first, os.environ["HOME"], home.replaced()

    first, second, replaced = as_nobody(call, temporary)
    assert Path(first).parent == temporary and first == second == replaced


def test_a_folder_of_another_user_does_not_stand_for_home(temporary: Path) -> None:
    user = NOBODY if os.geteuid() == 0 else os.getuid()
    (temporary / f"sg_rlhf-home-{user}").symlink_to(temporary)

    def call() -> str:
        home.ensure()
        return os.environ["HOME"]

    found = as_nobody(call, temporary)
    assert found.startswith(f"{temporary}/sg_rlhf-home-") and not found.endswith(f"-{user}")


def test_a_writable_home_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "new"))
    home.ensure()
    assert os.environ["HOME"] == str(tmp_path / "new") and not home.replaced()


def test_the_doctor_refuses_a_run_directory_that_is_not_writable(
    temporary: Path, tmp_path: Path
) -> None:
    place = tmp_path / "closed"
    place.mkdir(mode=0o555)
    (found,) = as_nobody(lambda: disks({"run": place / "run"}), temporary)
    check = disk(found, Facts(), Needs())
    assert check.status == FAILED
    assert f"{place}, not writable for this user" in check.line() and "--run-dir" in check.line()
