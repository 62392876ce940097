"""`python -m sg_rlhf.train --dry-run`: what would run, on this machine or another one."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from sg_rlhf.overlay import cli
from sg_rlhf.train import main

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def on_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SG_PLATFORM", "cpu")


def test_a_dry_run_prints_the_recipe_and_a_command_line_that_parses(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recipe = CONFIGS / "kk" / "grpo_sg_tiny_cpu.yaml"
    run_dir = tmp_path / "run"
    assert main(["--config", str(recipe), "--run-dir", str(run_dir), "--dry-run"]) == 0
    *_, comment, command = capsys.readouterr().out.splitlines()
    assert comment == "# upstream command line"
    args = cli.parse(shlex.split(command)[3:])
    assert (args.actor.policy_loss_type, args.sg.upper, args.actor.adam.lr) == (
        "grpo_sg", 1.2, 2e-4,
    )  # fmt: skip
    assert not run_dir.exists()


def test_a_dry_run_for_gpus_works_without_them_and_the_run_itself_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recipe = CONFIGS / "kk" / "grpo_sg_qwen2.5-3b-instruct.yaml"
    assert main(["--config", str(recipe), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "DEAD ZONE: a token with positive advantage and p > 0.211" in out
    assert "# not on this machine: vllm.enable_sleep=True: without CUDA use false; " in out
    data = tmp_path / "train.jsonl"
    data.write_text("")
    files = [f"data.prompt_dataset={data}", f"eval.dataset={data}"]
    run_dir = tmp_path / "run"
    assert main(["--config", str(recipe), "--run-dir", str(run_dir), *files]) == 2
    assert "vllm.sync_backend=nccl: without CUDA use gloo" in capsys.readouterr().err
    assert not run_dir.exists()


def test_a_run_directory_that_cannot_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = tmp_path / "train.jsonl"
    data.touch()
    recipe = CONFIGS / "kk" / "grpo_sg_tiny_cpu.yaml"
    for run_dir in (data, data / "below", Path("/proc/run")):
        assert main([
            "--config", str(recipe), "--run-dir", str(run_dir),
            f"data.prompt_dataset={data}", "eval.dataset=null",
        ]) == 2  # fmt: skip
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: --run-dir {run_dir}: cannot write there: ")
