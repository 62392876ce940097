"""The command: where it writes, what it says, and how it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sg_rlhf.report.command import main
from tests.unit.report.synthetic import write_run


def test_one_run_gets_its_page_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path / "run")
    assert main([str(run_dir)]) == 0
    assert (run_dir / "report.html").read_text().startswith("<!doctype html>")
    assert f"report: {run_dir / 'report.html'}" in capsys.readouterr().out


def test_several_runs_get_one_page_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(write_run(tmp_path / name)) for name in ("a", "b")]) == 0
    assert (tmp_path / "report.html").is_file()


@pytest.mark.full
def test_figures_are_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path / "run")
    assert main([str(run_dir), "--figures", str(tmp_path / "figures")]) == 0
    written = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"reward.png", "reward.svg", "weight_curve.svg", "seconds_per_rollout.png"} <= written
    assert len(written) == 30 and "(30 files)" in capsys.readouterr().out
    svg = (tmp_path / "figures" / "reward.svg").read_text()
    assert svg.startswith("<?xml") and "<text" not in svg  # drawn letters: no font is needed
    assert main([str(run_dir), "--figures", str(tmp_path / "pdf"), "--format", "pdf"]) == 0
    assert {path.suffix for path in (tmp_path / "pdf").iterdir()} == {".pdf"}


@pytest.mark.full
def test_names_in_any_script_draw_no_remark(tmp_path: Path) -> None:
    """Letters that the font lacks: of a run's name, for each way to draw it."""
    names = ("实验一", "سلام 🚀", "ru日本語n")
    runs = [write_run(tmp_path / name) for name in names]
    commands = [
        ["sg_rlhf", "summary", runs[0]],
        ["sg_rlhf", "report", *runs, "--out", tmp_path / "page.html", "--figures", tmp_path / "f"],
    ]
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-W", "default::UserWarning", "-m", *map(str, command)],
            capture_output=True, text=True,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
    assert names[0] in (tmp_path / "page.html").read_text()


def test_output_that_nobody_reads_ends_quietly(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    command = [sys.executable, "-u", "-m", "sg_rlhf", "report", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_wrong_use_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    for arguments, words in (
        ([str(tmp_path / "absent")], "absent: no such folder"),
        ([str(run_dir), str(run_dir / "." / "..") + "/run"], "given twice"),
        ([str(run_dir), "--out", str(tmp_path)], "a folder; name a file in it"),
        ([str(run_dir), "--out", str(tmp_path / "file" / "x.html")], "cannot be written"),
        ([str(run_dir), "--figures", str(tmp_path / "file")], "--figures"),
        ([str(run_dir), "--format", "png"], "only with --figures"),
    ):
        assert main(arguments) == 2, arguments
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1 and "Traceback" not in error
    for arguments in ([], [str(run_dir), "--format", "gif"], [str(run_dir), "--samples", "0"]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
