"""The run directory's files survive kills and resumes."""

from __future__ import annotations

import json
from pathlib import Path

from sg_rlhf.run_dir import jsonl_log


def test_rows_come_back_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "eval" / "eval.jsonl"
    jsonl_log.append(path, [{"global_step": 1, "x": 0.5}, {"global_step": 2, "x": float("nan")}])
    with path.open("a") as file:
        file.write('{"global_step": 3, "x": ')
    assert jsonl_log.read(path) == [{"global_step": 1, "x": 0.5}, {"global_step": 2, "x": None}]
    assert jsonl_log.read(tmp_path / "gone.jsonl") == []


def test_a_resumed_run_forgets_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    for name in jsonl_log.STEP_FILES:
        jsonl_log.append(tmp_path / name, [{"global_step": step} for step in (0, 1, 2, 2, 3)])
    with (tmp_path / jsonl_log.METRICS).open("a") as file:
        file.write('{"global_step": 4')
    jsonl_log.drop_after(tmp_path, 2)
    for name in jsonl_log.STEP_FILES:
        lines = (tmp_path / name).read_text().splitlines()
        assert [json.loads(line)["global_step"] for line in lines] == [0, 1, 2, 2]
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_tail_gives_each_whole_row_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = jsonl_log.Tail(path)
    assert tail.new_rows() == []
    jsonl_log.append(path, [{"global_step": 1}, {"global_step": 2}])
    with path.open("a") as file:
        file.write('{"global_')
    assert tail.new_rows() == [{"global_step": 1}, {"global_step": 2}]
    assert tail.new_rows() == []
    with path.open("a") as file:
        file.write('step": 3}\n')
    assert tail.new_rows() == [{"global_step": 3}]


def test_a_torn_line_damages_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = jsonl_log.Tail(path)
    jsonl_log.append(path, [{"global_step": 1}])
    for torn in (b'{"global_step": 2, "x', b"\x00\x00\xff", b"7"):
        with path.open("ab") as file:
            file.write(torn)
        jsonl_log.append(path, [{"global_step": 3}])
    rows = [{"global_step": step} for step in (1, 3, 3, 3)]
    assert jsonl_log.read(path) == tail.new_rows() == rows
    jsonl_log.drop_after(tmp_path, 2)
    assert path.read_text() == '{"global_step": 1}\n'


def test_nothing_is_rewritten_where_nothing_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / jsonl_log.METRICS
    jsonl_log.append(path, [{"global_step": 1}, {"global_step": 2}])
    before = path.stat().st_ino
    jsonl_log.drop_after(tmp_path, 2)
    assert path.stat().st_ino == before
