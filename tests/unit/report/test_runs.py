"""Reading run directories: incomplete ones, damaged ones, and seeds of one experiment."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sg_rlhf.report.runs import RunError, differences, grouped, named_apart, read_run
from sg_rlhf.run_dir import jsonl_log
from tests.unit.report.synthetic import write_config, write_run


def test_a_run_killed_in_the_middle_of_a_line_is_read(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    with (run_dir / jsonl_log.SAMPLES).open("a") as file:
        file.write('{"global_step": 12, "prom')
    run = read_run(run_dir)
    assert len(run.samples) == 24 and run.rollouts == 12 and not run.finished
    assert run.notes == ("The last line of samples.jsonl is cut short and left out.",)


def test_damage_in_the_middle_is_told(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    lines = (run_dir / jsonl_log.METRICS).read_text().splitlines()
    lines[5] = lines[5][:20]
    (run_dir / jsonl_log.METRICS).write_text("\n".join(lines) + "\n")
    run = read_run(run_dir)
    assert [row["global_step"] for row in run.metrics] == [*range(1, 6), *range(7, 13)]
    assert run.notes == ("metrics.jsonl has damage in line 6: 1 line is left out.",)


def test_the_later_of_two_evaluations_of_a_step_counts(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    jsonl_log.append(run_dir / jsonl_log.EVALUATIONS, [{"global_step": 6, "eval_accuracy": 0.125}])
    at_6 = [row for row in read_run(run_dir).evaluations if row["global_step"] == 6]
    assert [row["eval_accuracy"] for row in at_6] == [0.125]


def test_a_run_killed_in_its_last_save_is_not_finished(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    final = run_dir / "checkpoints" / "final"
    final.mkdir(parents=True)
    (final / "config.json").write_text("{}")
    assert not read_run(run_dir).finished
    for name in ("model.safetensors", "tokenizer_config.json", "tokenizer.json"):
        (final / name).write_text("{}")
    assert read_run(run_dir).finished


def test_what_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "fresh").mkdir()
    (tmp_path / "fresh" / jsonl_log.METRICS).write_text("")
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / jsonl_log.METRICS).write_bytes(b"\xff\xfe\x00")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / jsonl_log.METRICS).write_text('{"loss": 1}\n')
    for name, words in (
        ("absent", "no such folder"),
        ("file", "not a folder"),
        ("empty", "not a run: no metrics.jsonl"),
        ("fresh", "no rollout in metrics.jsonl yet"),
        ("binary", "no line can be read"),
        ("other", "line 1: not a row with a global_step"),
    ):
        with pytest.raises(RunError, match=words) as caught:
            read_run(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)


def test_seeds_are_one_group_and_their_common_name(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / f"sg_s{seed}", seed=seed)) for seed in (0, 1, 2)]
    runs.append(read_run(write_run(tmp_path / "grpo", recipe="grpo_tiny_cpu.yaml")))
    groups = grouped(runs)
    assert [group.label for group in groups] == ["sg (3 seeds)", "grpo"]
    assert differences(groups) == [
        ("actor.policy_loss_type", ["weighted_ppo", "ppo"]),
        ("algo.kl.estimator", ["wk3", "k3"]),
    ]


@pytest.mark.parametrize(
    ("names", "common"),
    [
        (["sg_s0", "sg_s1"], "sg"),
        (["grpo/s0-c30b4c32", "grpo/s1-e5fdf654"], "grpo"),
        (["grpo", "grpo_2"], "grpo"),
        (["a", "b"], "a"),
        (["grpo_s1"], "grpo_s1"),
    ],
)
def test_a_group_has_the_name_that_its_runs_begin_with(
    tmp_path: Path, names: list[str], common: str
) -> None:
    run = read_run(write_run(tmp_path / "run"))
    (group,) = grouped([replace(run, name=name) for name in names])
    assert group.name == common
    alone = replace(run, name=names[0], settings={})
    numbered = [f"{names[0]} [{i}]" for i in (1, 2)]
    assert [g.name for g in grouped([alone, replace(alone, path=tmp_path)])] == numbered


def test_a_setting_left_out_counts_as_its_default(tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / name) for name in ("a", "b"))
    write_config(second, "grpo_sg_tiny_cpu.yaml", "train.seed=0", "rollout.top_p=1.0")
    text = (second / "config.yaml").read_text()
    (second / "config.yaml").write_text(text.replace("  top_p: 1.0\n", ""))
    assert len(grouped([read_run(first), read_run(second)])) == 1


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / parent / "run")) for parent in ("a", "b")]
    assert [run.name for run in named_apart(runs)] == ["a/run", "b/run"]


def test_runs_of_one_seed_are_not_called_seeds(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name)) for name in ("whole", "resumed")]
    (group,) = grouped(runs)
    assert group.label == "whole (2 runs)"


def test_groups_of_a_study_are_named_after_their_folders(tmp_path: Path) -> None:
    study = tmp_path / "runs" / "kk_small"
    for seed in (0, 1):
        write_run(study / "base" / "grpo" / f"s{seed}-c30b4c3{seed}", seed=seed, sets=True)
        write_run(
            study / "base" / "sg" / f"s{seed}-76f3c17{seed}",
            seed=seed,
            overrides=("sg.weighting.upper=1.2",),
        )
    runs = named_apart([read_run(path) for path in sorted(study.glob("base/*/s*"))])
    assert [group.label for group in grouped(runs)] == ["grpo (2 seeds)", "sg (2 seeds)"]
    assert [run.name for run in runs][::3] == ["grpo/s0-c30b4c30", "sg/s1-76f3c171"]


def test_an_unknown_setting_costs_the_weights_alone(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    with (run_dir / "config.yaml").open("a") as file:
        file.write("from_the_future: 1\n")
    run = read_run(run_dir)
    assert run.config is None and run.settings["from_the_future"] == 1
    assert "unknown key 'from_the_future'" in run.notes[0]


def test_a_secret_is_not_shown(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", overrides=("logger.wandb.key=abc123",))
    from sg_rlhf.report.runs import all_settings

    assert "abc123" not in json.dumps(all_settings(read_run(run_dir)))
