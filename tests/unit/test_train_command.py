"""`python -m sg_rlhf.train --dry-run`: what would run, on this machine or another one."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from sg_rlhf.config import load_config
from sg_rlhf.overlay import cli
from sg_rlhf.train import main, prepare_run_dir, resolve, with_absolute_paths

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


def test_paths_reach_the_workers_absolute_and_ids_of_a_hub_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.jsonl", "more.jsonl", "test.jsonl", "reward.py"):
        (tmp_path / name).touch()
    (tmp_path / "model").mkdir()
    config = load_config(
        CONFIGS / "kk" / "grpo_sg_tiny_cpu.yaml",
        [
            "actor.model_name_or_path=model", "critic.model_name_or_path=Qwen/Qwen2.5-0.5B",
            "data.prompt_dataset='train.jsonl, ./more.jsonl,org/set@part'", "eval.dataset=null",
            "reward.remote_url='reward.py,http://host/score'", "ckpt.path=elsewhere",
            "sg.eval_sets=[{name: a, dataset: test.jsonl, temperature: 0, limit: 4},"
            " {name: b, dataset: org/test, temperature: 1}]",
        ],
    )  # fmt: skip
    config = resolve(config, tmp_path / "run")
    given = config.to_yaml()
    found = with_absolute_paths(config)
    assert config.to_yaml() == given and "prompt_dataset: train.jsonl, ./more.jsonl" in given
    assert found.value("actor.model_name_or_path") == str(tmp_path / "model")
    assert found.value("critic.model_name_or_path") == "Qwen/Qwen2.5-0.5B"
    assert found.value("data.prompt_dataset") == (
        f"{tmp_path}/train.jsonl,{tmp_path}/more.jsonl,org/set@part"
    )
    assert found.value("reward.remote_url") == f"{tmp_path}/reward.py,http://host/score"
    assert found.value("ckpt.path") == str(tmp_path / "elsewhere")
    first, second = found.sg.eval_sets
    assert (first.dataset, first.limit) == (str(tmp_path / "test.jsonl"), 4)
    assert second == config.sg.eval_sets[1]
    same = {*found.values} - {
        "actor.model_name_or_path", "data.prompt_dataset", "reward.remote_url", "ckpt.path",
    }  # fmt: skip
    assert {k: found.values[k] for k in same} == {k: config.values[k] for k in same}


def test_a_folder_whose_name_upstream_would_take_apart_stays_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "user@host"
    here.mkdir()
    (here / "train.jsonl").touch()
    monkeypatch.chdir(here)
    config = with_absolute_paths(load_config(None, ["data.prompt_dataset=train.jsonl"]))
    assert config.value("data.prompt_dataset") == "train.jsonl"


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


def test_a_run_started_with_a_relative_path_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = CONFIGS / "kk" / "grpo_sg_tiny_cpu.yaml"
    config = resolve(load_config(recipe), tmp_path)
    assert not prepare_run_dir(config, tmp_path)
    latest = tmp_path / "checkpoints" / "deepspeed" / "_actor" / "latest"
    latest.parent.mkdir(parents=True)
    latest.write_text("global_step5")
    assert prepare_run_dir(config, tmp_path)
    assert "resuming from global_step5" in capsys.readouterr().out
    assert load_config(tmp_path / "config.yaml").values == config.values
