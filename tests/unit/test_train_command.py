"""`python -m sg_rlhf.train --dry-run`: what would run, on this machine or another one."""

from __future__ import annotations

import itertools
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import csv, parquet

from sg_rlhf.config import load_config
from sg_rlhf.config.checks.input_files import count_prompts
from sg_rlhf.doctor.command import main as doctor
from sg_rlhf.launch.command import main as launch
from sg_rlhf.overlay.driver.arguments import with_absolute_paths
from sg_rlhf.overlay.driver.prepare import prepare_run_dir
from sg_rlhf.overlay.patches import version
from sg_rlhf.plan.command import main as plan
from sg_rlhf.plan.load import with_run_dir
from sg_rlhf.run_dir.lock import hold_lock
from sg_rlhf.train import main, print_summary
from sg_rlhf.weights.command import main as weights
from tests.unit.report.synthetic import write_run

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = str(CONFIGS / "kk" / "grpo_sg_tiny_cpu.yaml")


GOLD = "(1) Zoey is a knight"


def rows(count: int, kind: str = "puzzle") -> str:
    """JSON lines of different prompts."""
    return "".join(
        json.dumps({"input": f"a {kind} {number}", "answer": GOLD}) + "\n"
        for number in range(count)
    )


@pytest.fixture(autouse=True)
def on_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SG_PLATFORM", "cpu")


def test_a_dry_run_prints_the_recipe_and_the_command_that_trains_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recipe = CONFIGS / "kk" / "grpo_sg_tiny_cpu.yaml"
    run_dir = tmp_path / "run"
    assert main(["--config", str(recipe), "--run-dir", str(run_dir), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    command = lines[lines.index("# the command that trains it") + 1]
    assert shlex.split(command) == [
        "sg-rlhf", "train", "--config", str(recipe), "--run-dir", str(run_dir),
    ]  # fmt: skip
    assert not run_dir.exists()


def test_a_dry_run_says_which_file_sets_a_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "extends: configs/math/grpo_tiny_cpu.yaml\nactor: {adam: {lr: 1.0e-5, eps: 1.0e-8}}\n"
    )
    given = ["--config", str(mine), "--dry-run", "sg.weighting.tau=7", "ckpt.max_num=3"]
    assert main([*given, "actor.max_norm=2"]) == 0
    heading = "# the file that sets each key that differs from configs/base.yaml or the default\n"
    _, _, printed = capsys.readouterr().out.replace("\n#     ", " ").partition(heading)
    lines = itertools.takewhile(lambda line: line.startswith("#   "), printed.splitlines())
    listed = dict(line.removeprefix("#   ").split(": ", 1) for line in lines)
    keys = {part: text.split(", ") for part, text in listed.items()}
    # Equal to base.yaml: actor.adam.eps, ckpt.max_num.
    assert keys[str(mine)] == ["actor.adam.lr"]
    assert keys["command line"] == ["sg.weighting.tau", "actor.max_norm"]
    assert "rollout.temperature" in keys["configs/math/grpo_sg_tiny_cpu.yaml"]
    assert "actor.adam.lr" not in keys["configs/math/grpo_sg_tiny_cpu.yaml"]
    assert "vllm.sync_backend" in keys["configs/hardware/cpu.yaml"]
    assert "configs/base.yaml" not in keys


def test_a_dry_run_for_gpus_works_without_them_and_the_run_itself_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recipe = CONFIGS / "kk" / "grpo_sg_qwen2.5-3b-instruct.yaml"
    assert main(["--config", str(recipe), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "DEAD ZONE: a token with positive advantage and p > 0.211" in out
    assert "# not on this machine: vllm.enable_sleep=True: without CUDA use false; " in out
    data = tmp_path / "train.jsonl"
    data.write_text(rows(1))
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
            "actor.model_name_or_path=model", "reward.model_name_or_path=Qwen/Qwen2.5-0.5B",
            "data.prompt_dataset='train.jsonl, ./more.jsonl,org/set@part'", "eval.dataset=null",
            "reward.remote_url='reward.py,http://host/score'", "ckpt.path=elsewhere",
            "sg.eval_sets=[{name: a, dataset: test.jsonl, temperature: 0, limit: 4},"
            " {name: b, dataset: org/test, temperature: 1}]",
        ],
    )  # fmt: skip
    config = with_run_dir(config, tmp_path / "run")
    given = config.to_yaml()
    found = with_absolute_paths(config)
    assert config.to_yaml() == given and "prompt_dataset: train.jsonl, ./more.jsonl" in given
    assert found.value("actor.model_name_or_path") == str(tmp_path / "model")
    assert found.value("reward.model_name_or_path") == "Qwen/Qwen2.5-0.5B"
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
    data.write_text(rows(16))
    recipe = CONFIGS / "kk" / "grpo_sg_tiny_cpu.yaml"
    for run_dir in (data, data / "below", Path("/proc/run")):
        assert main([
            "--config", str(recipe), "--run-dir", str(run_dir),
            f"data.prompt_dataset={data}", "eval.dataset=null",
        ]) == 2  # fmt: skip
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: --run-dir {run_dir}: cannot write there: ")


def test_a_run_directory_of_another_run_is_refused_untouched(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data, run_dir = tmp_path / "train.jsonl", tmp_path / "run"
    data.write_text(rows(16))
    run_dir.mkdir()
    with hold_lock(run_dir):
        before = sorted(run_dir.iterdir())
        assert main([
            "--config", TINY, "--run-dir", str(run_dir),
            f"data.prompt_dataset={data}", "eval.dataset=null",
        ]) == 2  # fmt: skip
        assert sorted(run_dir.iterdir()) == before
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --run-dir {run_dir}: held by process {os.getpid()} on ")


def test_a_run_started_with_a_relative_path_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = CONFIGS / "kk" / "grpo_sg_tiny_cpu.yaml"
    config = with_run_dir(load_config(recipe), tmp_path)
    assert not prepare_run_dir(config)
    latest = tmp_path / "checkpoints" / "deepspeed" / "_actor" / "latest"
    latest.parent.mkdir(parents=True)
    latest.write_text("global_step5")
    assert prepare_run_dir(config)
    assert "resuming from global_step5" in capsys.readouterr().out
    assert load_config(tmp_path / "config.yaml").values == config.values


def refused(capsys: pytest.CaptureFixture[str], run_dir: Path, *arguments: str) -> str:
    """The one line on stderr of a run that does not start."""
    assert main(["--config", TINY, "--run-dir", str(run_dir), "eval.dataset=null", *arguments]) == 2
    assert not run_dir.exists()
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_an_address_is_no_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--config", TINY, "--run-dir", "s3://runs/a", "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --run-dir s3://runs/a: expected a folder; mount it on every")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("files", "extra", "prompts"),
    [
        ({"a.jsonl": 15}, [], 15),
        ({"a.jsonl": 9, "b.jsonl": 6}, [], 15),
        ({"a.parquet": 15}, [], 15),
        ({"a.jsonl": 100}, ["data.max_samples=7"], 7),
        ({"a.csv": 100}, ["data.max_samples=7"], 7),
    ],
)
def test_a_data_set_too_small_for_a_rollout_is_refused_before_ray_starts(
    files: dict[str, int],
    extra: list[str],
    prompts: int,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    for name, count in files.items():
        puzzles = [f"a puzzle {number}" for number in range(count)]
        table = pyarrow.table({"input": puzzles, "answer": [GOLD] * count})
        if name.endswith(".parquet"):
            parquet.write_table(table, tmp_path / name)
        elif name.endswith(".csv"):
            csv.write_csv(table, tmp_path / name)
        else:  # a blank line is no row
            (tmp_path / name).write_text("\n" + rows(count, name))
    given = ",".join(str(tmp_path / name) for name in files)
    line = refused(capsys, tmp_path / "run", f"data.prompt_dataset='{given}'", *extra)
    assert line == (
        f"error: rollout.batch_size=16: the data set has only {prompts} prompts "
        "(data.prompt_dataset, data.max_samples)"
    )


def test_prompts_are_counted_where_all_files_are_here(tmp_path: Path) -> None:
    small = tmp_path / "a.jsonl"
    small.write_text("{}\n")

    def count(names: str, *others: str) -> int | None:
        return count_prompts(load_config(None, [f"data.prompt_dataset='{names}'", *others]))

    assert count(str(small)) == 1
    assert count(f"{small},{small}") == 2
    assert count(f"{small},{small}", "data.max_samples=1") == 1
    assert count("org/dataset") is None
    assert count(f"{small},org/dataset@part") is None
    assert count(f"{small},{small}", "data.prompt_probs='0.5,0.5'") is None


def test_a_run_without_data_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = refused(capsys, tmp_path / "run", "data.prompt_dataset=null")
    assert line.startswith("error: data.prompt_dataset: not set; ")


def test_another_upstream_is_refused_before_anything_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("{}\n" * 16)
    monkeypatch.setattr(version, "UPSTREAM_VERSION", "0.12.0")
    line = refused(capsys, tmp_path / "run", f"data.prompt_dataset={data}")
    assert line.startswith("error: OpenRLHF 0.11.2 is installed, but the overlay is written")


def test_a_wrong_recipe_prints_nothing_but_its_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The lopti rule stands for many: keys that are right alone and wrong together."""
    for dry_run in ([], ["--dry-run"]):
        data = tmp_path / "train.jsonl"
        data.write_text("{}\n" * 16)
        assert main([
            "--config", TINY, "--run-dir", str(tmp_path / "run"), *dry_run, "eval.dataset=null",
            f"data.prompt_dataset={data}", "sg.update=lopti", "actor.entropy_coef=0.1",
        ]) == 2  # fmt: skip
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: actor.entropy_coef=0.1: expected 0 with sg.update=")


def test_a_number_that_cannot_be_is_found_before_anything_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = str(CONFIGS / "kk" / "grpo_sg_tiny_cpu.yaml")
    assert main(["--config", recipe, "--dry-run", "ds.zero_stage=9"]) == 2
    assert capsys.readouterr() == (
        "",
        "error: command line: ds.zero_stage=9: expected an integer, 0 or more, at most 3\n",
    )


def test_a_run_ends_with_its_summary_and_the_command_for_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = write_run(tmp_path / "my run", rollouts=3)
    before = {*run_dir.rglob("*")}
    print_summary(run_dir)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("my run: 3 rollouts, 6 optimizer steps")
    assert any(line.startswith("  training reward ") for line in lines)
    assert lines[-1].startswith("next: ") and lines[-1].endswith("sg-rlhf report 'my run'")
    assert {*run_dir.rglob("*")} == before
    print_summary(tmp_path / "none")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: no summary: ")


def test_a_wrong_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        launch(["slurm", "--config", "x.yaml"])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("sg-rlhf launch: argument kind: invalid choice: 'slurm'")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        (main, f"--config {TINY} --actor.num_nodes 1", "dashes: actor.num_nodes=1; see"),
        (main, f"--config {TINY} --actor.num_nodes=1", "dashes: actor.num_nodes=1; see"),
        (main, f"--config {TINY} --ds.packing_samples --dry-run", "ds.packing_samples=true"),
        (main, f"--config {TINY} --ds.packing_samples", "dashes: ds.packing_samples=true"),
        (main, f"--config {TINY} --logger.wandb.key abc", "dashes: logger.wandb.key=(hidden)"),
        (main, f"{TINY} --dry-run", f"write a recipe as --config {TINY}; see"),
        (main, "--dry-run configs/kk/grpo_tiny_cpu.yaml", "as --config configs/kk/grpo_tiny_cpu"),
        (main, "--dry-run", "required: --config; see --help"),
        (main, f"--config {TINY} --dryrun", "unrecognized arguments: --dryrun; see --help"),
        (plan, f"--config {TINY} --actor.num_nodes 1", "dashes: actor.num_nodes=1; see"),
        (doctor, f"--config {TINY} --actor.num_nodes 1", "dashes: actor.num_nodes=1; see"),
        (weights, f"--config {TINY} --actor.num_nodes 1", "dashes: actor.num_nodes=1; see"),
    ],
)  # fmt: skip
def test_upstreams_way_to_write_a_flag_is_told_ours(
    command: Callable[[list[str]], int], words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        command(words.split())
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1
    assert said in error


@pytest.mark.parametrize("command", [main, plan, doctor, weights])
def test_a_recipe_among_the_overrides_is_told_where_it_belongs(
    command: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["--config", TINY, "configs/algorithms/lopti.yaml"]) == 2
    error = capsys.readouterr().err
    assert "write a recipe as --config configs/algorithms/lopti.yaml" in error
    assert error.count("\n") == 1


def test_the_help_shows_a_cluster_command_that_finds_the_recipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "ray job submit --working-dir . --" in capsys.readouterr().out


def test_a_dry_run_says_which_files_are_not_here(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be for another machine, so they are remarks."""
    monkeypatch.chdir(tmp_path)
    given = [
        "reward.remote_url=gone.py", "actor.model_name_or_path=./gone", "ckpt.path=/dev/null/here",
    ]  # fmt: skip
    assert main(["--config", TINY, "--dry-run", *given]) == 0
    out = capsys.readouterr().out.splitlines()
    prefix = "# not on this machine: "
    assert [line.removeprefix(prefix)[:40] for line in out if line.startswith(prefix)] == [
        "data.prompt_dataset=data/kk_tiny/train.j", "eval.dataset=data/kk_tiny/test.jsonl: no",
        "actor.model_name_or_path=./gone: no Hugg", "reward.remote_url=gone.py: cannot be rea",
        "ckpt.path=/dev/null/here: cannot write t",
    ]  # fmt: skip
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["data.prompt_dataset=bad.jsonl"], "bad.jsonl: row 1: input: missing"),
        (["eval.dataset=bad.jsonl"], "eval.dataset: bad.jsonl: row 1: input: missing"),
        (["reward.remote_url=other.py"], "other.py: defines no reward_func"),
        (["data.max_samples=3"], "rollout.batch_size=16: the data set has only 3 prompts"),
    ],
)
def test_a_dry_run_refuses_files_that_are_here_and_wrong(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("good.jsonl").write_text(rows(16))
    Path("bad.jsonl").write_text("{}\n" * 16)
    Path("other.py").write_text("x = 1\n")
    usual = ["data.prompt_dataset=good.jsonl", "eval.dataset=null"]
    assert main(["--config", TINY, "--dry-run", *usual, *given]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("error: ") and said in error


def test_a_dry_run_of_a_baseline_prints_no_token_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """GRPO reads none; who compares two recipes would take them for its own."""
    for recipe, count in (("grpo_tiny_cpu", 0), ("grpo_sg_tiny_cpu", 1)):
        assert main(["--config", f"configs/kk/{recipe}.yaml", "--dry-run"]) == 0
        out = capsys.readouterr().out
        assert out.count("\n  weighting:") == count
