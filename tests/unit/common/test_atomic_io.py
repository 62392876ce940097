from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from sg_rlhf.common.atomic_io import BestEffortStream, append_whole, disk_full_context, write_whole
from tests.full_disk import BALLAST, fill, make_room, small_disk


@pytest.mark.parametrize("data", ["\u03c4 = 9\n", b"\x00\xff"])
def test_the_file_is_all_that_is_left(data: str | bytes, tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_whole(path, data)
    assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert list(path.parent.iterdir()) == [path]


def test_what_was_there_survives_a_write_that_fails(tmp_path: Path) -> None:
    folder = tmp_path / "taken"
    folder.mkdir()
    (folder / "before").touch()
    with pytest.raises(OSError, match="taken"):
        write_whole(folder, "a file in the place of a folder")
    assert list(tmp_path.iterdir()) == [folder] and (folder / "before").exists()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 4) as folder:
        yield folder


def test_lines_are_appended_all_or_none(disk: Path) -> None:
    path = disk / "rows.jsonl"
    append_whole(path, "first\n")
    fill(disk, leave=2**16)
    with pytest.raises(OSError, match="No space left on device") as raised:
        append_whole(path, "second " * 2**14 + "\n")
    assert raised.value.filename == str(path) and path.read_text() == "first\n"
    make_room(disk)
    append_whole(path, "second\n")
    assert path.read_text() == "first\nsecond\n"


@pytest.mark.parametrize("sync", [True, False])
def test_a_full_disk_is_named_and_the_file_stays(disk: Path, sync: bool) -> None:
    path = disk / "file"
    write_whole(path, "before", sync=sync)
    fill(disk)
    with pytest.raises(OSError, match="No space left on device") as raised:
        write_whole(path, "x" * 2**20, sync=sync)
    assert raised.value.filename == str(path) and path.read_text() == "before"
    assert sorted(p.name for p in disk.iterdir()) == [BALLAST, "file"]


def test_what_torch_says_of_a_full_disk(disk: Path) -> None:
    path = disk / "states.pt"
    fill(disk, leave=2**17)
    with pytest.raises(OSError, match="No space left on device") as raised, disk_full_context(path):
        torch.save(torch.zeros(2**18), path)
    assert raised.value.filename == str(path)


def test_what_numpy_says_of_a_full_disk(disk: Path) -> None:
    path = disk / "offsets.npy"
    fill(disk, leave=2**17)
    with pytest.raises(OSError, match="No space left on device") as raised, disk_full_context(path):
        np.save(path, np.zeros(2**18))
    assert raised.value.filename == str(path)


def test_other_errors_are_not_said_to_be_of_a_full_disk(disk: Path) -> None:
    error = RuntimeError("unexpected pos 704 vs 598")
    with pytest.raises(RuntimeError) as raised, disk_full_context(disk / "states.pt"):
        raise error
    assert raised.value is error and list(disk.iterdir()) == []
    with pytest.raises(FileNotFoundError) as missing, disk_full_context(disk / "states.pt"):
        (disk / "gone" / "file").write_text("")
    assert missing.value.filename == str(disk / "gone" / "file")


def test_log_lines_that_the_disk_does_not_take_are_lost(disk: Path) -> None:
    with (disk / "log").open("wb") as file:
        log = BestEffortStream.over(file.fileno())
        print("first", file=log)
        fill(disk)
        for _ in range(3):
            print("x" * 2**14, file=log)
        make_room(disk)
        print("last", file=log)
        log.close()
        os.fstat(file.fileno())  # still open
    lines = (disk / "log").read_text().splitlines()
    assert lines[0] == "first" and lines[-1].endswith("last")


def test_lines_that_nobody_reads_any_more_are_lost_and_the_status_stays() -> None:
    program = """
import os, sys
from sg_rlhf.common.atomic_io import best_effort_output
print("read", flush=True)
sys.stdin.read()
with best_effort_output():
    for _ in range(3):
        print("unread", flush=True)
        print("unread", file=sys.stderr)
    print("no line", end="")
os._exit(7)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin and process.stdout and process.stderr
    assert process.stdout.readline() == b"read\n"
    for pipe in (process.stdout, process.stderr, process.stdin):
        pipe.close()
    assert process.wait(300) == 7
