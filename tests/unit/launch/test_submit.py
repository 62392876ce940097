"""What is uploaded to a cluster, which paths the job is told, and the run's exit status."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from sg_rlhf.config import Config, load_config
from sg_rlhf.launch import submit

RECIPE = Path(__file__).parents[3] / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a package, and data that .gitignore names."""
    folder = tmp_path / "checkout"
    for name in ("package/a.py", "data/train.jsonl", "shipped/test.jsonl", ".venv/bin/python"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("{}\n")
    (folder / ".gitignore").write_text("/data/\n")
    monkeypatch.chdir(folder)
    return folder


def recipe(**keys: str) -> Config:
    return load_config([str(RECIPE)], [f"{k}={v}" for k, v in keys.items()])


def test_what_git_ignores_stays_here(checkout: Path, tmp_path: Path) -> None:
    package = submit.pack(checkout, tmp_path)
    assert package.names == {"package/a.py", "shipped/test.jsonl", ".gitignore"}
    there = {str(p.relative_to(package.content)) for p in package.content.rglob("*.*")}
    assert package.names <= there and "data/train.jsonl" not in there
    assert package.holds(Path("package")) and package.holds(checkout / "package" / "a.py")
    assert not package.holds(Path("data/train.jsonl")) and not package.holds(Path("pack"))


def test_a_relative_path_that_is_not_uploaded_becomes_absolute(
    checkout: Path, tmp_path: Path
) -> None:
    package = submit.pack(checkout, tmp_path)
    config = recipe(
        **{
            "data.prompt_dataset": "data/train.jsonl,shipped/test.jsonl",
            "eval.dataset": "shipped/test.jsonl",
            "actor.model_name_or_path": "Qwen/Qwen2.5-3B",
        }
    )
    overrides, lines = submit.beside_package(config, package)
    away = checkout / "data" / "train.jsonl"
    assert overrides == {"data.prompt_dataset": f"{away},shipped/test.jsonl"}
    assert lines == [
        f"data.prompt_dataset: not uploaded; every machine of the cluster has to see {away}"
    ]


def test_an_absolute_path_is_told_and_stays(checkout: Path, tmp_path: Path) -> None:
    package = submit.pack(checkout, tmp_path)
    away = checkout / "data" / "train.jsonl"
    config = recipe(**{"data.prompt_dataset": str(away), "eval.dataset": "null"})
    overrides, (line,) = submit.beside_package(config, package)
    assert not overrides and line.startswith("data.prompt_dataset: not uploaded; ")


def test_the_command_is_quoted_and_replaces_its_shell() -> None:
    said = submit.command(["a b.yaml"], Path("/shared/run"), ["x.y"], ["k=$v"], "/opt/my python")
    assert said.startswith("exec ")
    assert shlex.split(said)[1:] == [
        "/opt/my python", "-m", "sg_rlhf.train", "--config", "a b.yaml", "--run-dir", "/shared/run",
        "--allow-changed", "x.y", "k=$v",
    ]  # fmt: skip


def test_ray_waits_longer_than_the_run_may_save(checkout: Path, tmp_path: Path) -> None:
    config = recipe(**{"sg.grace_seconds": "100.5"})
    found = submit.runtime_env(config, submit.pack(checkout, tmp_path))
    assert found["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "161"
    json.dumps(found)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        ("SUCCEEDED", 0, 0), ("FAILED", 2, 2), ("FAILED", 143, 143), ("FAILED", -9, 137),
        ("FAILED", None, 1), ("STOPPED", None, 143),
    ],
)  # fmt: skip
def test_the_exit_status_is_the_runs(status: str, code: int | None, expected: int) -> None:
    assert submit.exit_status(status, code) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--address", "http://x"], "the following arguments are required: --config"),
        (["--config", str(RECIPE)], "RAY_API_SERVER_ADDRESS is not set"),
        (
            ["--config", str(RECIPE), "--address", "http://x", "--run-dir", "s3://runs/a"],
            "--run-dir s3://runs/a: expected a folder; mount it",
        ),
        (
            ["--config", str(RECIPE), "--address", "http://x"],
            f"--config {RECIPE}: not uploaded; it has to lie in ",
        ),
        (
            ["--config", str(RECIPE), "--address", "http://x", "rollout.batch_size=many"],
            "rollout.batch_size",
        ),
    ],
)
def test_wrong_usage_is_a_line(
    given: list[str],
    said: str,
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    try:
        status = submit.main(given)
    except SystemExit as end:
        status = int(str(end.code))
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2 and said in line


def test_no_dashboard_is_a_line(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "a.yaml").write_text(f"extends: {RECIPE}\n")
    assert submit.main(["--config", "a.yaml", "--address", "http://127.0.0.1:1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --address http://127.0.0.1:1: no Ray dashboard answers there")
