"""The training scripts: `sg-rlhf run DOMAIN` in an environment that scripts/bootstrap.sh makes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "scripts"
#: Of the machine that runs the tests: none of it is meant.
UNSET = ("SG_", "CUDA_VISIBLE_DEVICES")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The repository as the scripts see it, with this environment for the one they would make."""
    for folder in ("scripts", "examples", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copytree(SCRIPTS, tmp_path / "examples" / "scripts")
    for path, script in {
        "scripts/bootstrap.sh": "echo prepared",
        ".venv/bin/sg-rlhf": (
            f'PYTHONPATH={ROOT} SG_PLATFORM=cpu exec {sys.executable} -m sg_rlhf "$@"'
        ),
    }.items():
        (tmp_path / path).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / path).chmod(0o755)
    return tmp_path


def run_script(
    tree: Path, domain: str, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(UNSET)}
    return subprocess.run(
        ["bash", tree / "examples" / "scripts" / f"train_grpo_sg_{domain}.sh", *arguments],
        env=kept | variables, cwd="/", capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("domain", ["kk", "math", "search"])
def test_a_dry_run_prints_the_recipe_on_its_hardware(tree: Path, domain: str) -> None:
    more = ["sg.search.url=http://127.0.0.1:9/retrieve"] if domain == "search" else []
    found = run_script(tree, domain, "--dry-run", "actor.adam.lr=2e-6", *more, SG_HARDWARE="4x40gb")
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("prepared\n")
    assert "num_gpus_per_node: 4" in found.stdout and "lr: 2.0e-06" in found.stdout
    assert "  micro_batch_size: 1\n" in found.stdout and "type: grpo_sg" in found.stdout
    assert not (tree / "runs").exists() and not (tree / "data").exists()


@pytest.mark.parametrize(
    ("domain", "arguments", "variables", "words"),
    [
        ("kk", [], {"SG_HARDWARE": "8x80"}, "error: SG_HARDWARE=8x80: no such hardware"),
        ("kk", ["--algorithm", "lopty"], {}, "lopty: no such algorithm; did you mean lopti?"),
        ("kk", ["actor.adam.rl=1"], {"SG_HARDWARE": "cpu"}, "unknown key 'actor.adam.rl'"),
        ("kk", [], {"SG_CONFIG": "none.yaml", "SG_HARDWARE": "cpu"}, "none.yaml: no such recipe"),
        ("search", [], {"SG_HARDWARE": "8x80gb"}, "error: name a search engine: sg.search.url="),
        ("search", [], {"SG_HARDWARE": "cpu", "SG_PORT": "x"}, "SG_PORT=x: expected a port, 1 to"),
    ],
)
def test_what_is_wrong_is_one_line_before_any_data_is_made(
    tree: Path, domain: str, arguments: list[str], variables: dict[str, str], words: str
) -> None:
    found = run_script(tree, domain, *arguments, **variables)
    assert found.returncode == 2 and words in found.stderr
    assert found.stderr.count("\n") == 1
    assert not (tree / "data").exists()


def test_a_taken_port_is_refused_before_anything_is_made(tree: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        found = run_script(tree, "search", SG_HARDWARE="cpu", SG_PORT=port)
    assert found.returncode == 2, found.stderr
    assert f"SG_PORT={port}: Address already in use; SG_PORT chooses another port" in found.stderr
    assert not (tree / "data").exists() and not (tree / "runs").exists()


def test_data_alone(tree: Path) -> None:
    found = run_script(tree, "kk", "--data-only", SG_HARDWARE="cpu")
    assert found.returncode == 0, found.stderr
    assert "data/kk_tiny/train.jsonl  320 rows" in found.stdout
    assert "data/kk_tiny/test.jsonl  200 rows" in found.stdout
    assert (tree / "data" / "kk_tiny" / "train.jsonl").is_file()
    assert not (tree / "runs").exists()
