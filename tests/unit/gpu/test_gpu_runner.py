"""The runner of the GPU tier: what it says without a GPU, and that no stage can take it down."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.gpu import launch, run, stages
from tests.gpu.launch import Options, Outcome, file_name, run_stage
from tests.gpu.stages import STAGES, Stage

ROOT = Path(__file__).parents[3]
H200 = {"name": "NVIDIA H200", "memory_gib": 139.8, "capability": "9.0", "driver": "580.159"}


def gpu_sh(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "tests/gpu.sh", *arguments], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHON": sys.executable, **variables},
    )  # fmt: skip


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options("cpu", "small", tmp_path / "out", tmp_path / "logs", None, "--device cpu")


def stage(name: str) -> Stage:
    module = f"tests.unit.gpu.gpu_stages.{name}"
    return Stage("x", name, f"a stage that {name}", ("torch",), 60, module)


def result_of(outcome: Outcome) -> dict[str, Any]:
    assert outcome.file is not None
    found: dict[str, Any] = json.loads(outcome.file.read_text())
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_each_stage_is_one_line_and_the_status_0() -> None:
    done = gpu_sh()
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line[:1] for line in lines] == [s.key for s in STAGES]
    for line in lines:
        assert " skipped " in line and "no GPU: torch " in line
    hidden = gpu_sh("b", "a", CUDA_VISIBLE_DEVICES="")
    assert hidden.returncode == 0 and [x[:1] for x in hidden.stdout.splitlines()] == ["a", "b"]


def test_without_torch_it_says_so(tmp_path: Path) -> None:
    """A Python that has nothing installed."""
    venv.create(tmp_path, with_pip=False)
    done = gpu_sh("a", PYTHON=str(tmp_path / "bin" / "python"))
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert line.startswith("a ") and " skipped " in line
    assert line.endswith("PyTorch cannot be imported (No module named 'torch')")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("z",), "tests/gpu.sh: stage 'z': expected one of a, b, c, d, e, f, g, h"),
        (
            ("--device", "cpu", "--out", "tests/gpu/results", "a"),
            "tests/gpu.sh: --out tests/gpu/results: expected another folder with --device cpu",
        ),
        (
            ("--limit", "0", "a"),
            "tests/gpu.sh: --limit 0: expected a number of seconds above 0",
        ),
    ],
)
def test_wrong_usage_is_one_line(arguments: tuple[str, ...], line: str) -> None:
    done = gpu_sh(*arguments)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (2, "", line)


def test_a_stage_that_hangs_is_ended_with_what_it_started(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE", 0.5)
    outcome = run_stage(stage("hangs"), dataclasses.replace(options, limit=5), None)
    assert (outcome.status, outcome.note) == ("failed", "ended after its limit of 5 s")
    assert 5 <= outcome.seconds < 40
    result = result_of(outcome)
    # What it had found until then is kept.
    assert [check["name"] for check in result["checks"]] == ["before it hung"]
    gone = [pid for pid in result["figures"]["pids"] if not psutil.pid_exists(pid)]
    zombies = [
        pid for pid in result["figures"]["pids"]
        if psutil.pid_exists(pid) and psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    ]  # fmt: skip
    assert len(gone) + len(zombies) == 2


def test_a_crash_ends_no_other_stage(
    options: Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = (
        dataclasses.replace(stage("crashes"), key="a"),
        dataclasses.replace(stage("nothing"), key="b"),
    )
    monkeypatch.setattr(stages, "STAGES", both)
    monkeypatch.setattr(stages, "BY_KEY", {s.key: s for s in both})
    monkeypatch.setattr(run, "LOGS", options.logs)
    status = run.main(["--device", "cpu", "--out", str(options.out)])
    first, second = capsys.readouterr().out.splitlines()
    assert status == 1
    assert "failed" in first and "ended by SIGSEGV" in first
    assert "skipped" in second and second.endswith("its model is out of reach")
    assert [file.name for file in options.out.iterdir()] == ["a_crashes_cpu.json"]


def test_an_exception_is_one_line(options: Options) -> None:
    outcome = run_stage(stage("raises"), options, None)
    assert (outcome.status, outcome.note) == ("failed", "ValueError: no such model")
    assert outcome.log is not None and "Traceback" in outcome.log.read_text()


def test_a_failed_training_run_is_kept(options: Options) -> None:
    outcome = run_stage(stage("trains"), options, None)
    assert outcome.note.startswith("RuntimeError: -m sg_rlhf.train ended with status 1; its run")
    kept = options.logs / "x_trains_run"
    assert outcome.note.endswith(os.path.relpath(kept, ROOT))
    assert (kept / "logs" / "failure.log").read_text() == "out of memory\n"
    assert not (kept / "checkpoints").exists()


def test_what_a_result_holds(options: Options) -> None:
    outcome = run_stage(stage("mixed"), options, None)
    assert outcome.status == "failed"
    assert outcome.note == "beyond: found nan, limit 1.0 (the worst case)"
    assert outcome.skips == ["left out: the reason"]
    result = result_of(outcome)
    assert result["checks"] == [
        {"name": "holds", "status": "passed"},
        {"name": "within", "status": "passed", "found": 0.5, "limit": 1.0},
        {
            "name": "beyond", "status": "failed", "found": "nan", "limit": 1.0,
            "case": "the worst case",
        },
        {"name": "goal", "status": "not met", "found": 3.0, "limit": 2.0},
        {"name": "left out", "status": "skipped", "why": "the reason"},
    ]  # fmt: skip
    assert result["figures"] == {"figure": {"ms": 1.5}}
    assert result["command"] == "bash tests/gpu.sh x --device cpu"
    assert result["device"] == "cpu" and result["machine"]["gpu"] is None
    assert result["remark"] == "no GPU result: the stage's own code, tried on the CPU"
    assert {"python", "torch"} <= result["versions"].keys()
    for key in ("date", "seconds", "limit_seconds", "commit", "preset", "title", "stage"):
        assert key in result


def test_names_of_results(options: Options) -> None:
    on_cuda = dataclasses.replace(options, device="cuda", preset="full")
    assert file_name(STAGES[0], options, None) == "a_algo_cpu.json"
    assert file_name(STAGES[0], on_cuda, H200) == "a_algo_nvidia_h200.json"
    small = dataclasses.replace(on_cuda, preset="small")
    assert file_name(STAGES[0], small, H200) == "a_algo_nvidia_h200_small.json"


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = dataclasses.replace(STAGES[0], needs=("torch", "no_such_package"))
    assert absent.missing() == (
        "needs no_such_package, which is not installed: scripts/bootstrap.sh installs it"
    )
    monkeypatch.setattr(stages.metadata, "version", lambda name: "2.9.1+cu128")
    assert STAGES[0].missing() == "needs torch 2.11 or later, found 2.9.1+cu128"


@pytest.mark.parametrize("key", ["a", *(pytest.param(key, marks=pytest.mark.full) for key in "bd")])
def test_a_stages_own_code_runs_on_the_cpu(key: str, tmp_path: Path) -> None:
    done = gpu_sh("--device", "cpu", "--out", str(tmp_path), key)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob(f"{key}_*_cpu.json")
    result = json.loads(file.read_text())
    assert result["status"] == "passed"
    assert sum(check["status"] == "passed" for check in result["checks"]) > 1


def test_no_committed_result_is_a_cpus() -> None:
    for file in (ROOT / "tests" / "gpu" / "results").glob("*.json"):
        result = json.loads(file.read_text())
        assert result["device"] == "cuda" and result["machine"]["gpu"]["name"], file
