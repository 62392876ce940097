"""What is uploaded to a cluster, which paths the job is told, and the run's exit status."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import subprocess
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray._private.runtime_env.packaging import create_package
from ray._private.runtime_env.working_dir import upload_working_dir_if_needed

from sg_rlhf.config import Config, load_config
from sg_rlhf.launch import submit
from sg_rlhf.run_dir import GRACE_SECONDS

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml"


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
    assert package.contains(Path("package")) and package.contains(checkout / "package" / "a.py")
    assert not package.contains(Path("data/train.jsonl")) and not package.contains(Path("pack"))


@pytest.mark.parametrize(
    ("limit", "said"),
    [("MAX_FILES", "more than 20 files to upload"), ("MAX_MIB", "more than 0.0001 MiB to upload")],
)
def test_a_folder_with_too_much_is_refused_and_its_largest_folders_are_named(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    limit: str, said: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(submit, limit, {"MAX_FILES": 20, "MAX_MIB": 0.0001}[limit])
    for index in range(30):
        file = checkout / "corpus" / "pages" / str(index) / "text.txt"
        file.parent.mkdir(parents=True)
        file.write_text("x" * 20)
    (checkout / "a.yaml").write_text(f"extends: {RECIPE}\n")
    assert submit.main(["--config", "a.yaml", "--address", "http://127.0.0.1:1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and "most of them in corpus/pages: move" in line


@pytest.mark.parametrize("link", [True, False])
def test_a_job_of_the_repository_has_what_a_run_reads_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: bool
) -> None:
    """As packed by us, and by `ray job submit --working-dir .`."""
    clone = tmp_path / "clone"
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, tracked):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            (clone / name).symlink_to((ROOT / name).readlink())
        elif (ROOT / name).is_file():
            shutil.copy(ROOT / name, clone / name)
    environment = tmp_path / "environment" if link else clone / ".venv"
    (environment / "lib").mkdir(parents=True)
    (environment / "lib" / "large.so").write_bytes(bytes(2**20))
    if link:
        (clone / ".venv").symlink_to(environment)
    (clone / "data").mkdir()
    (clone / "data" / "train.jsonl").touch()

    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    ours = submit.pack(clone, tmp_path / "ours")
    by_ray = {}
    monkeypatch.chdir(clone)
    upload_working_dir_if_needed(
        {"working_dir": "."}, include_gitignore=True, scratch_dir=str(tmp_path),
        upload_fn=lambda folder, excludes, **_: by_ray.update(folder=folder, excludes=excludes),
    )  # fmt: skip
    packed = tmp_path / "theirs" / "packed.zip"
    create_package(by_ray["folder"], packed, include_gitignore=True, excludes=by_ray["excludes"])
    with zipfile.ZipFile(packed) as file:
        theirs = {name for name in file.namelist() if not name.endswith("/")}
    assert ours.names == theirs
    tops = {name.partition("/")[0] for name in theirs}
    assert {"sg_rlhf", "configs", "eval", "examples"} <= tops
    assert not tops & {"lab", "docs", "tests", "data", ".venv", ".git"}
    assert ours.size < 12 * 2**20


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
    overrides, lines = submit.missing_from_package(config, package)
    away = checkout / "data" / "train.jsonl"
    assert overrides == {"data.prompt_dataset": f"{away},shipped/test.jsonl"}
    assert lines == [
        f"data.prompt_dataset: not uploaded; every machine of the cluster has to see {away}"
    ]


def test_an_absolute_path_is_told_and_stays(checkout: Path, tmp_path: Path) -> None:
    package = submit.pack(checkout, tmp_path)
    away = checkout / "data" / "train.jsonl"
    config = recipe(**{"data.prompt_dataset": str(away), "eval.dataset": "null"})
    overrides, (line,) = submit.missing_from_package(config, package)
    assert not overrides and line.startswith("data.prompt_dataset: not uploaded; ")


def test_the_command_is_quoted_and_replaces_its_shell() -> None:
    said = submit.command(["a b.yaml"], Path("/shared/run"), ["x.y"], ["k=$v"], "/opt/my python")
    assert said.startswith("exec ")
    assert shlex.split(said)[1:] == [
        "/opt/my python", "-m", "sg_rlhf.train", "--config", "a b.yaml", "--run-dir", "/shared/run",
        "--allow-changed", "x.y", "k=$v",
    ]  # fmt: skip


def test_ray_waits_longer_than_the_run_may_save(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    found = submit.runtime_env(submit.pack(checkout, tmp_path))
    assert int(found["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) == GRACE_SECONDS + 60
    assert found["env_vars"]["NCCL_SOCKET_IFNAME"] == "eth1"
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


class Head:
    """A cluster's head with one job. Its connection breaks after parts of these numbers."""

    def __init__(self, parts: list[str], breaks: list[int], silent: int = 0) -> None:
        self.parts, self.breaks, self.silent = parts, breaks, silent
        self.sent = 0
        self.asked = 0

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        assert job == "job"
        stop = self.breaks.pop(0) if self.breaks else None
        for part in self.parts[:stop]:
            self.sent += len(part)
            yield part
        if stop is not None:
            raise RuntimeError("closed")
        while self.asked < self.silent:
            await asyncio.sleep(0.01)

    def get_job_info(self, job: str) -> SimpleNamespace:
        self.asked += 1
        done = not self.breaks
        return SimpleNamespace(
            status=SimpleNamespace(value="FAILED", is_terminal=lambda: done), driver_exit_code=3,
            message="",
        )  # fmt: skip


def test_output_is_sent_and_shown_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(submit, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(submit, "PING_SECONDS", 0.01)
    parts = [f"line {i}\n" * 3 for i in range(100)]
    steady = Head(parts, [], silent=5)
    assert submit.stream_logs(steady, "job") == 3
    text = "".join(parts)
    assert capsys.readouterr().out == f"{text}job job: FAILED, exit status 3\n"
    assert steady.sent == len(text) and steady.asked >= 5
    # After a broken connection Ray begins with the first line again.
    broken = Head(parts, [40, 0, 40, 70])
    assert submit.stream_logs(broken, "job") == 3
    assert capsys.readouterr().out == f"{text}job job: FAILED, exit status 3\n"


def test_a_head_that_is_gone_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(submit, "HEAD_SECONDS", 0.1)
    with pytest.raises(submit.ClusterLost, match="has not answered for 0.1 s: closed; the same"):
        submit.stream_logs(Head(["a"], [1] * 1000), "job")


def test_a_connection_that_stays_open_to_a_head_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Gone(Head):
        def get_job_info(self, job: str) -> SimpleNamespace:
            raise RuntimeError("no route")

    for name in ("LOOK_SECONDS", "PING_SECONDS"):
        monkeypatch.setattr(submit, name, 0.01)
    monkeypatch.setattr(submit, "HEAD_SECONDS", 0.1)
    with pytest.raises(submit.ClusterLost, match="no route"):
        submit.stream_logs(Gone(["a"], [], silent=10**9), "job")


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
