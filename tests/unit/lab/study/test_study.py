"""Studies: cells in order, what decides a cell, refusals, paired differences, tables."""

from __future__ import annotations

import gzip
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml
from scipy import stats

from lab.measure import accuracy, sharpness
from lab.study import command as ablation
from lab.study import results as study_results
from lab.study import runner as study_runner
from lab.study import tables as study_tables
from lab.study.plan import CPU_SET_ONCE, CPU_SETS_NOW, _decisive, load_study
from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.config import ConfigError, load_config
from sg_rlhf.run_dir import jsonl_log

ROOT = Path(__file__).parents[4]
STUDIES = sorted((ROOT / "lab" / "experiments").glob("*/study.yaml"))
SHIPPED = ROOT / "lab" / "experiments" / "kk_small" / "study.yaml"
SMALL = {
    "about": "two algorithms",
    "base": str(ROOT / "configs" / "kk" / "grpo_tiny_cpu.yaml"),
    "baseline": "grpo",
    "seeds": [0, 1],
    "data": {"small": "people=2 per_size=8 test_per_size=4 seed=0"},
    "set": {
        "data.prompt_dataset": "{data}/small/train.jsonl",
        "eval.dataset": "{data}/small/test.jsonl",
    },
    "regimes": {"base": {"about": "as it is"}, "fast": {"set": {"actor.adam.lr": 0.001}}},
    "variants": {
        "grpo": {},
        "sg": {"recipe": str(ROOT / "configs" / "algorithms" / "grpo_sg.yaml")},
    },
    "plan": [
        {"regimes": ["base"], "variants": ["grpo", "sg"]},
        {"regimes": ["base", "fast"], "variants": ["grpo"], "seeds": [0]},
    ],
}  # fmt: skip


def write(folder: Path, **changes: object) -> Path:
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **changes}))
    return path


@pytest.mark.parametrize("path", STUDIES, ids=lambda p: p.parent.name)
def test_a_shipped_study_parses_and_every_difference_has_its_pair(path: Path) -> None:
    study = load_study(path)
    cells = list(study.cells())
    assert len({cell.name for cell in cells}) == len(cells)
    by_variant: dict[tuple[str, str], set[int]] = {}
    for cell in cells:
        by_variant.setdefault((cell.regime, cell.variant), set()).add(cell.seed)
    assert min(map(len, by_variant.values())) >= 3
    first = next(iter(study.file.regimes))
    assert all((first, name) in by_variant for name in study.file.variants)
    for (regime, _), seeds in by_variant.items():
        assert seeds <= by_variant[regime, study.file.baseline]


@pytest.mark.parametrize("path", STUDIES, ids=lambda p: p.parent.name)
def test_the_sharpness_of_a_shipped_study_is_a_command_line(path: Path, tmp_path: Path) -> None:
    runner = study_runner.Runner(load_study(path), tmp_path, tmp_path, 1)
    if runner.study.file.sharpness is None:
        pytest.skip("it measures none")
    argv = runner.sharpness_arguments("model", tmp_path / "batch.json", tmp_path / "result.json")
    assert argv[:2] == ["-m", "lab.measure.sharpness"]
    parsed = sharpness.parse_arguments(argv[2:])
    assert parsed.model == ["model"] and parsed.rho and parsed.prompts == 16


def test_the_accuracy_of_the_shipped_study_is_a_command_line(tmp_path: Path) -> None:
    runner = study_runner.Runner(load_study(SHIPPED), tmp_path, tmp_path / "runs", 1)
    parsed = accuracy.parse_arguments(runner.accuracy_arguments("model", tmp_path / "result.json"))
    assert parsed.data["held_out"] == tmp_path / "runs" / "data" / "small" / "test.jsonl"
    assert parsed.samples == 8 and parsed.reward == "domain:kk"


def test_a_cell_is_done_when_it_was_measured_as_the_study_says(tmp_path: Path) -> None:
    runner = study_runner.Runner(load_study(SHIPPED), tmp_path, tmp_path / "runs", 1)
    cell = next(runner.study.cells())
    file = tmp_path / "cells" / cell.file_name
    today = runner.study.measurements()
    fewer = {**today, "accuracy": {**today["accuracy"], "arguments": "--prompts 10 --samples 1"}}
    assert runner.state(cell) is study_runner.State.TO_TRAIN
    for measured, state in (
        (None, study_runner.State.TO_TRAIN_AGAIN),
        ({"sharpness": today["sharpness"]}, study_runner.State.TO_TRAIN_AGAIN),
        (fewer, study_runner.State.TO_TRAIN_AGAIN),
        (today, study_runner.State.DONE),
    ):
        found = {"fingerprint": runner.study.fingerprint(cell), "measured_with": measured}
        write_whole(file, json.dumps(found))
        assert runner.state(cell) is state
        # What was measured otherwise is in no table.
        assert (runner.result(cell) is not None) is (state is study_runner.State.DONE)


def test_cells_come_seed_by_seed_and_once(tmp_path: Path) -> None:
    study = load_study(write(tmp_path))
    assert [cell.name for cell in study.cells()] == [
        "base/grpo/s0", "base/sg/s0", "base/grpo/s1", "base/sg/s1", "fast/grpo/s0",
    ]  # fmt: skip


def test_a_cell_is_base_algorithm_regime_and_seed(tmp_path: Path) -> None:
    study = load_study(write(tmp_path))
    cells = {cell.name: cell for cell in study.cells()}
    config = study.config(cells["base/sg/s1"], Path("/somewhere"))
    assert config.value("actor.policy_loss_type") == "weighted_ppo"
    assert config.value("train.seed") == 1
    assert config.value("data.prompt_dataset") == "/somewhere/small/train.jsonl"
    assert study.config(cells["fast/grpo/s0"], Path("d")).value("actor.adam.lr") == 1e-3


def test_what_is_trained_decides_the_fingerprint(tmp_path: Path) -> None:
    study = load_study(write(tmp_path))
    prints = {cell.name: study.fingerprint(cell) for cell in study.cells()}
    assert len(set(prints.values())) == len(prints)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    places = {**SMALL["set"], "logger.logging_steps": 7, "ckpt.max_num": 9}
    places["ds.packing_samples"] = False
    same = load_study(write(elsewhere, about="other words", set=places))
    assert {cell.name: same.fingerprint(cell) for cell in same.cells()} == prints
    for changes in (
        {"set": {**SMALL["set"], "rollout.temperature": 0.9}},
        {"data": {"small": "people=2 per_size=9 test_per_size=4 seed=0"}},
        {"revision": 2},
    ):
        other = load_study(write(elsewhere, **changes))
        assert all(other.fingerprint(cell) != prints[cell.name] for cell in other.cells())


def test_what_the_cpu_hardware_writes_out_leaves_recorded_fingerprints(tmp_path: Path) -> None:
    def fingerprint(**changes: Any) -> str:
        study = load_study(write(tmp_path, set={**SMALL["set"], **changes}))
        return study.fingerprint(next(study.cells()))

    plain = fingerprint()
    assert "ds.adam_offload" in load_config("hardware:cpu").values
    for key in (*CPU_SETS_NOW, *CPU_SET_ONCE):
        assert fingerprint(**{key: False}) == plain
        assert fingerprint(**{key: True}) != plain
    decisive = _decisive(load_config(ROOT / "configs" / "kk" / "grpo_tiny_cpu.yaml"))
    assert not decisive.keys() & {*CPU_SETS_NOW}
    assert decisive["vllm.enable_prefix_caching"] is False  # as cpu.yaml set it


def test_the_weights_of_a_local_start_model_decide_the_fingerprint(tmp_path: Path) -> None:
    start = tmp_path / "start"
    start.mkdir()
    places = {**SMALL["set"], "actor.model_name_or_path": str(start)}

    def fingerprint(weights: bytes) -> str:
        (start / "model.safetensors").write_bytes(weights)
        study = load_study(write(tmp_path, set=places))
        return study.fingerprint(next(study.cells()))

    first = fingerprint(b"one build")
    assert fingerprint(b"another") != first
    assert fingerprint(b"one build") == first


def test_every_parameter_of_a_weighting_decides_a_cell(tmp_path: Path) -> None:
    def fingerprint(**weighting: Any) -> str:
        path = write(tmp_path, set={**SMALL["set"], "sg.weighting": weighting})
        study = load_study(path)
        return study.fingerprint(next(cell for cell in study.cells() if cell.variant == "grpo"))

    plain = fingerprint(type="grpo_sg")
    assert fingerprint(type="grpo_sg", stop_gradient=False) != plain
    assert plain == fingerprint(type="grpo_sg", tau=9.0, probability="trainer")
    others = [
        fingerprint(type="grpo_sg", probability="engine"), fingerprint(type="grpo_sg", tau=7.0),
        fingerprint(type="reverse"), fingerprint(type="ar", alpha=0.3),
        fingerprint(type="ar", alpha=0.2), fingerprint(type="top_entropy"),
        fingerprint(type="top_entropy", share=0.3), fingerprint(type="stapo", prob=0.1),
    ]  # fmt: skip
    assert len({plain, *others}) == 1 + len(others)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"baseline": "ppo"}, ["baseline='ppo'", "grpo"]),
        ({"plan": [{"regimes": ["slow"], "variants": ["grpo"]}]}, ["regime 'slow'", "base"]),
        ({"plan": [{"regimes": ["base"], "variants": ["x"]}]}, ["variant 'x'", "sg"]),
        ({"seeds": []}, ["seeds"]),
        ({"extra": 1}, ["extra"]),
        ({"set": {"sg.nothing": 1}}, ["base/grpo/s0", "sg.nothing"]),
        ({"regimes": {"base": {"set": {"actor.adam.lr": "fast"}}}, "plan": SMALL["plan"][:1]},
         ["base/grpo/s0", "actor.adam.lr"]),
        ({"base": "nowhere.yaml"}, ["nowhere.yaml", "no such recipe"]),
        ({"gpus": 0}, ["gpus=0: expected greater than or equal to 1"]),
        ({"gpus": "two"}, ['gpus="two": expected a valid integer']),
        ({"gpus": 1.5}, ["gpus=1.5: expected a valid integer"]),
        ({"seeds": 3}, ["seeds=3: expected a valid list"]),
        ({"seeds": []}, ["seeds=[]: List should have at least 1 item"]),
        ({"about": 1}, ["about=1: expected a valid string"]),
        ({"regimes": {"base": 3}}, ["regimes.base=3: expected a valid dictionary"]),
        ({"sharpness": {"data": "x", "rho": ["a"]}},
         ['sharpness.rho.0="a": expected a valid number']),
        ({"variants": {"grpo": {"recpie": 1}}},
         ["unknown key 'variants.grpo.recpie'; did you mean recipe?"]),
        ({"accuracy": {"zzz": 1, "sets": {"a": "b"}}},
         ["unknown key 'accuracy.zzz'; expected one of sets, arguments"]),
        ({"sede": [1]}, ["unknown key 'sede'; did you mean seeds?"]),
        ({"sharpness": {"rho": [0.1]}}, ["sharpness.data: not set, and a study needs it"]),
        ({"domain": "chess"}, ["domain: domain 'chess': expected one of kk, math, search"]),
    ],
)  # fmt: skip
def test_a_wrong_study_gets_one_line(
    tmp_path: Path, changes: dict[str, object], words: list[str]
) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises(ConfigError) as refusal:
        load_study(path)
    message = str(refusal.value)
    assert all(word in message for word in [str(path), *words]) and "\n" not in message
    assert not re.search("Input should|pydantic", message)


@pytest.mark.parametrize("text", ["- a\n", "3\n", "", "a: [\n"])
def test_a_file_that_is_no_mapping_gets_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="mapping") as refusal:
        load_study(path)
    assert str(refusal.value).startswith(f"{path}: ") and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--study", "nowhere.yaml"], "nowhere.yaml: No such file"),
        (["--study", str(SHIPPED), "--only", "base/nothing/*"], "--only base/nothing/*: no cell"),
        (["--study", str(SHIPPED), "--only", "base/*,nothing/*"], "--only nothing/*: no cell"),
        (["--study", str(SHIPPED), "--jobs", "0"], "--jobs: 0: expected a whole number, 1 or more"),
    ],
)
def test_a_wrong_command_line_gets_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = ablation.main(arguments)
    except SystemExit as stop:
        status = int(stop.code or 0)
    errors = capsys.readouterr().err
    assert status == 2 and words in errors and errors.count("\n") == 1


def test_cells_are_chosen_by_several_patterns(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--study", str(SHIPPED), "--list", "--only", "*/sg_inside/s0,base/grpo/s[12]"]
    assert ablation.main(arguments) == 0
    named = [line.split()[-1] for line in capsys.readouterr().out.splitlines()[:-1]]
    assert {"base/sg_inside/s0", "off_policy/sg_inside/s0", "base/grpo/s1"} <= set(named)
    assert len(named) == len(set(named)) and "base/grpo/s0" not in named


@pytest.mark.parametrize(
    ("found", "size", "groups"),
    [
        ([], 8, []),
        (["0", "1", "2"], 1, ["0", "1", "2"]),
        (["2", "5", "6", "7"], 2, ["2,5", "6,7"]),
        (["0", "1", "2"], 2, ["0,1"]),
    ],
)
def test_a_run_gets_its_gpus(found: list[str], size: int, groups: list[str]) -> None:
    assert study_runner.device_groups(found, size) == groups


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="gpus=8: a run takes 8 GPUs and 2 are visible"):
        study_runner.device_groups(["0", "1"], 8)


# -- results -----------------------------------------------------------------------------------


def run_directory(folder: Path, accuracy: float, norm: float) -> Path:
    rows = range(1, 5)
    sg = {"weight_mean": 1.2, "zeroed_pos": 0.1, "zeroed_neg": 0.0}
    jsonl_log.append(
        folder / jsonl_log.METRICS,
        [
            {
                "global_step": i, "rollout/reward_mean": 0.1 * i, "timing/step_total": 5.0,
                "rollout/response_length_mean": 30.0,
            }
            for i in rows
        ],
    )  # fmt: skip
    jsonl_log.append(
        folder / jsonl_log.OPTIMIZER_STEPS,
        [
            {
                "actor_grad_norm": norm * i, "entropy_loss": 0.5 / i, "kl": 0.01,
                **{f"sg/{key}": value for key, value in sg.items()},
            }
            for i in range(1, 21)
        ],
    )  # fmt: skip
    jsonl_log.append(
        folder / jsonl_log.EVALUATIONS,
        [
            {"global_step": 0, "eval_held_out_accuracy": 0.2, "eval_train_accuracy": 0.25},
            {"global_step": 4, "eval_held_out_accuracy": accuracy, "eval_train_accuracy": 0.7},
        ],
    )
    (folder / "environment.json").write_text(json.dumps({"versions": {}, "started": "2026-01-01"}))
    return folder


def test_a_cell_is_collected_from_its_run_directory(tmp_path: Path) -> None:
    sharpness = {"results": [{"sharpness": 0.3, "first_order": 0.2}]}
    found = study_results.collect(run_directory(tmp_path, 0.6, 0.1), sharpness, None)
    figures = found["figures"]
    assert figures["held_out_before"] == 0.2 and figures["held_out_after"] == 0.6
    assert figures["gap_after"] == pytest.approx(0.1) and figures["sharpness"] == 0.3
    assert figures["grad_norm_mean"] == pytest.approx(1.05) and figures["grad_norm_max"] == 2.0
    assert figures["optimizer_steps"] == 20 and figures["seconds_per_rollout"] == 5.0
    assert len(found["curves"]["grad_norm"]) == 20
    with pytest.raises(ValueError, match="no finished run"):
        study_results.collect(tmp_path / "empty", None, None)


def test_a_cell_keeps_the_columns_that_the_study_names(tmp_path: Path) -> None:
    found = study_results.collect(
        run_directory(tmp_path, 0.6, 0.1), None, None, ["timing/step_total"]
    )
    assert found["curves"]["timing/step_total"] == [5.0] * 4
    assert load_study(write(tmp_path, metrics=["a"])).measurements() == {"metrics": ["a"]}


def test_a_run_without_an_evaluation_at_the_start_has_no_accuracy_before(tmp_path: Path) -> None:
    folder = run_directory(tmp_path, 0.6, 0.1)
    rows = jsonl_log.read(folder / jsonl_log.EVALUATIONS)
    (folder / jsonl_log.EVALUATIONS).unlink()
    jsonl_log.append(folder / jsonl_log.EVALUATIONS, [{**rows[0], "global_step": 2}, rows[1]])
    figures = study_results.collect(folder, None, None)["figures"]
    assert "held_out_before" not in figures and figures["held_out_after"] == 0.6


def test_a_table_has_the_columns_that_some_run_has(tmp_path: Path) -> None:
    folder = run_directory(tmp_path / "run", 0.6, 0.1)
    plain = study_results.collect(folder, None, None)
    sharp = {"results": [{"sharpness": 0.3}]}
    measured = study_results.collect(folder, sharp, None)
    study = load_study(write(tmp_path))
    rows = study_results.summarize(study, zip(study.cells(), [plain, measured], strict=False))
    text = study_tables.table(study, rows)
    assert "| spikes | sharpness | entropy |" in text
    assert "| 0.0 | 0.3000 |" in text and "| 0.0 |  |" in text
    assert "sharpness" not in study_tables.table(study, rows[:1])


def test_a_measured_accuracy_stands_for_the_runs_own_last_one(tmp_path: Path) -> None:
    sets = {
        "held_out": {
            "all": {"accuracy": 0.55}, "kk_2ppl": {"accuracy": 0.7}, "kk_3ppl": {"accuracy": 0.4},
            "correct": [3, 8],
        },
        "train": {"all": {"accuracy": 0.75}, "correct": [8, 8]},
    }  # fmt: skip
    measured = {"samples": 8, "sets": sets}
    found = study_results.collect(run_directory(tmp_path, 0.6, 0.1), None, measured)
    figures = found["figures"]
    assert figures["held_out_after"] == 0.55 and figures["gap_after"] == pytest.approx(0.2)
    assert figures["held_out_kk_2ppl_after"] == 0.7 and figures["held_out_before"] == 0.2
    assert figures["gap_before"] == pytest.approx(0.05)
    assert found["curves"]["accuracy"][-1]["held_out"] == 0.6 and found["accuracy"] == measured
    study = load_study(write(tmp_path))
    rows = study_results.summarize(study, [(next(study.cells()), found)])
    text = study_tables.table(study, rows)
    assert "| seeds | held_out | minus grpo | train | gap |" in text
    assert rows[0]["held_out_kk_2ppl_after"]["mean"] == 0.7


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    study = load_study(write(tmp_path, seeds=[0, 1, 2]))
    values = {  # held-out accuracy and the peak of the gradient norm
        "base/grpo/s0": (0.5, 2.0), "base/grpo/s1": (0.7, 40.0), "base/grpo/s2": (0.6, 4.0),
        "base/sg/s0": (0.52, 1.0), "base/sg/s1": (0.74, 20.0), "base/sg/s2": (0.63, 2.0),
    }  # fmt: skip
    cells = [
        (cell, {"figures": dict(zip(("held_out_after", "grad_norm_peak"), found, strict=True))})
        for cell in study.cells()
        if (found := values.get(cell.name))
    ]
    rows = {row["variant"]: row for row in study_results.summarize(study, cells)}
    difference = rows["sg"]["held_out_after"]["difference"]
    assert difference["mean"] == pytest.approx(0.03) and len(difference["values"]) == 3
    spread = statistics.stdev([0.02, 0.04, 0.03]) / math.sqrt(3)
    assert difference["ci95"] == pytest.approx(4.30265273 * spread)
    assert "difference" not in rows["grpo"]["held_out_after"]
    # far narrower than the interval of the unpaired mean
    assert difference["ci95"] < rows["sg"]["held_out_after"]["ci95"] / 5
    # half of the baseline's in every pair: one large peak does not widen it
    ratio = rows["sg"]["grad_norm_peak_ratio"]
    assert [ratio[key] for key in ("mean", "ci95_low", "ci95_high")] == pytest.approx([0.5] * 3)


@pytest.mark.parametrize("values", [[0.1, 0.4, 0.35], [1.0, 1.0, 1.0], [0.2, 0.1, 0.9, 0.3, 0.5]])
def test_interval_is_scipys(values: list[float]) -> None:
    half = study_results.interval(values)
    if len(set(values)) == 1:
        assert half == 0.0
    else:
        low, high = stats.t.interval(
            0.95, len(values) - 1, loc=statistics.fmean(values), scale=stats.sem(values)
        )
        assert half == pytest.approx((high - low) / 2)
    assert math.isnan(study_results.interval(values[:2]))


def test_a_run_of_an_older_version_is_one_line(tmp_path: Path) -> None:
    run = run_directory(tmp_path, 0.5, 0.1)
    rows = jsonl_log.read(run / jsonl_log.METRICS)
    (run / jsonl_log.METRICS).unlink()
    jsonl_log.append(run / jsonl_log.METRICS, [{"global_step": row["global_step"]} for row in rows])
    with pytest.raises(ValueError, match="a row without 'timing/step_total', as of an older"):
        study_results.collect(run, None, None)


def test_a_skipped_step_has_no_norm(tmp_path: Path) -> None:
    run = run_directory(tmp_path, 0.5, 0.1)
    rows = jsonl_log.read(run / jsonl_log.OPTIMIZER_STEPS)
    (run / jsonl_log.OPTIMIZER_STEPS).unlink()
    jsonl_log.append(
        run / jsonl_log.OPTIMIZER_STEPS, [{**rows[0], "actor_grad_norm": math.nan}, *rows[1:]]
    )
    found = study_results.collect(run, None, None)
    assert found["curves"]["grad_norm"][0] is None
    norms = [row["actor_grad_norm"] for row in rows[1:]]
    assert found["figures"]["grad_norm_mean"] == pytest.approx(statistics.fmean(norms))


def test_runs_without_a_gradient_have_no_ratio_of_norms_and_are_drawn(tmp_path: Path) -> None:
    study = load_study(write(tmp_path, plan=SMALL["plan"][:1], seeds=[0, 1, 2]))
    cells = {}
    for cell in study.cells():
        run = run_directory(tmp_path / cell.name, 0.5, 0.1)
        rows = jsonl_log.read(run / jsonl_log.OPTIMIZER_STEPS)
        if cell.variant == "sg" and cell.seed:
            (run / jsonl_log.OPTIMIZER_STEPS).unlink()
            still = [{**row, "actor_grad_norm": 0.0} for row in rows[1:]]
            jsonl_log.append(run / jsonl_log.OPTIMIZER_STEPS, [rows[0], *still])
        cells[cell] = study_results.collect(run, None, None)
    ablation.write_tables(study, cells, tmp_path)
    (row,) = [r for r in study_results.summarize(study, cells.items()) if r["variant"] == "sg"]
    assert len(row["held_out_after"]["difference"]["values"]) == 3
    assert len(row["grad_norm_peak_ratio"]["values"]) == 1
    assert (tmp_path / "differences.png").is_file()


def test_results_are_json_whatever_the_names_are(tmp_path: Path) -> None:
    variants = {"grpo": {"about": "NaNometre, Infinity"}, "sg": {}}
    study = load_study(write(tmp_path, variants=variants, plan=SMALL["plan"][:1], seeds=[0]))
    cells = {
        cell: study_results.collect(run_directory(tmp_path / cell.name, 0.5, 0.1), None, None)
        for cell in study.cells()
    }
    for found in cells.values():
        found["figures"]["grad_norm_max"] = math.inf
    ablation.write_tables(study, cells, tmp_path)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    found = json.loads((tmp_path / "results.json").read_text(), parse_constant=refuse)
    assert found["rows"][0]["held_out_after"]["ci95"] is None


def test_tables_are_written_from_the_cells_that_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Done cells of today's settings count; others are to do."""
    path = write(tmp_path)
    study = load_study(path)
    out = tmp_path / "out"
    for index, cell in enumerate(list(study.cells())[:3]):
        run = run_directory(tmp_path / cell.name, 0.5 + 0.05 * index, 0.1)
        found = {
            "fingerprint": study.fingerprint(cell),
            "measured_with": study.measurements(),
            **study_results.collect(run, None, None),
        }
        if index == 2:
            found["fingerprint"] = "of other settings"
        file = out / "cells" / cell.file_name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found))
    arguments = ["--study", str(path), "--out", str(out), "--runs", str(tmp_path / "runs")]
    assert ablation.main([*arguments, "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed[:-1]] == ["done", "done", "to", "to", "to"]
    assert ablation.main([*arguments, "--table"]) == 0
    table = (out / "results.md").read_text()
    assert "| base | sg | 1 | 0.550 | +0.050 |" in table and "fast" not in table
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert rows[0]["held_out_after"] == {"mean": 0.5, "ci95": None, "values": [0.5]}
    assert (out / "differences.png").stat().st_size > 5000
    capsys.readouterr()

    # A run whose directory has lost its files: tables, and a line instead of the page.
    run_dir = study_runner.Runner(study, out, tmp_path / "runs", 1).run_dir(next(study.cells()))
    run_dir.mkdir(parents=True)
    assert ablation.main([*arguments, "--table"]) == 1
    printed = capsys.readouterr()
    assert f"failed: page of base: {run_dir}: not a run" in printed.err
    assert printed.err.count("\n") == 1 and str(out / "results.md") in printed.out


def test_a_run_finds_the_reward_that_a_preregistered_study_names(tmp_path: Path) -> None:
    study = load_study(ROOT / "lab" / "experiments" / "forks" / "study.yaml")
    reward = study.file.set["reward.remote_url"].removeprefix("module:")
    runner = study_runner.Runner(study, tmp_path, tmp_path, 1)
    runner._run(["-c", f"from {reward} import reward_func"], tmp_path / "log", None)
    with pytest.raises(study_runner.CellError, match="ended with status 1"):
        runner._run(["-c", f"from {reward}s import reward_func"], tmp_path / "log", None)


@pytest.mark.parametrize("name", ["kk_small", "kk_async"])
def test_the_committed_tables_are_those_of_the_committed_runs(name: str, tmp_path: Path) -> None:
    folder = ROOT / "lab" / "experiments" / name
    study = load_study(folder / "study.yaml")
    runs = study_results.read_record(folder)
    assert study.name == name and set(runs) == {cell.name for cell in study.cells()}
    cells = [(cell, runs[cell.name]) for cell in study.cells()]
    rows = study_results.summarize(study, cells)
    assert study_tables.table(study, rows) == (folder / "results.md").read_text()
    study_results.write_record(tmp_path, cells)
    record = study_results.RECORD
    assert (tmp_path / record).read_bytes() == (folder / record).read_bytes()


def test_recorded_runs_are_done_with_todays_settings_and_in_the_tables_with_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, plan=SMALL["plan"][:1], seeds=[0])
    study = load_study(path)
    grpo, sg = study.cells()
    found = study_results.collect(run_directory(tmp_path / "run", 0.5, 0.1), None, None)
    found["measured_with"] = study.measurements()
    today = {"fingerprint": study.fingerprint(grpo), **found}
    older = {"fingerprint": "of other settings", **found}
    study_results.write_record(tmp_path / "out", [(grpo, today), (sg, older)])
    runner = study_runner.Runner(study, tmp_path / "out", tmp_path / "runs", 1)
    assert runner.state(grpo) is study_runner.State.DONE
    assert runner.state(sg) is study_runner.State.TO_TRAIN_AGAIN
    assert runner.result(sg) is None
    # The file of a cell that was trained since comes first.
    newer = {"fingerprint": study.fingerprint(sg), **found}
    out, runs = str(tmp_path / "out"), str(tmp_path / "runs")
    arguments = ["--study", str(path), "--out", out, "--runs", runs, "--table"]
    assert ablation.main(arguments) == 0
    assert (
        "1 of 2 runs are of results.jsonl.gz, made with other settings" in capsys.readouterr().out
    )
    assert "| base | sg | 1 | 0.500 |" in (tmp_path / "out" / "results.md").read_text()
    write_whole(tmp_path / "out" / "cells" / sg.file_name, json.dumps(newer))
    assert ablation.main(arguments) == 0
    assert "made with other settings" not in capsys.readouterr().out
    recorded = study_results.read_record(tmp_path / "out")
    assert recorded[sg.name]["fingerprint"] == study.fingerprint(sg)


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(b"[1]\n"), gzip.compress(b"{\n")],
    ids=["no gzip", "a list", "half an object"],  # gzip writes the time into the bytes
)
def test_a_record_that_cannot_be_read_is_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / study_results.RECORD).write_bytes(content)
    assert ablation.main(["--study", str(write(tmp_path)), "--out", str(tmp_path), "--list"]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and "results.jsonl.gz: not the runs of a study" in errors


def test_the_data_is_made_by_the_studys_domain(tmp_path: Path) -> None:
    sets = {
        "pairs": "--source arithmetic --generate count=6 test_count=2",
        "small": "people=2 per_size=2 test_per_size=1",
    }
    for domain, name in (("math", "pairs"), ("kk", "small")):
        path = write(tmp_path, domain=domain, data={name: sets[name]})
        runner = study_runner.Runner(load_study(path), tmp_path, tmp_path / "runs", 1)
        runner.make_data()
        manifest = json.loads((runner.data / name / "manifest.json").read_text())
        assert manifest["task"] == domain


def test_a_domain_that_is_not_there_is_one_line_and_another_one_is_another_cell(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"small.yaml: domain: domain 'kkk': expected one of kk"):
        load_study(write(tmp_path, domain="kkk"))
    fingerprints = []
    for changes in ({}, {"domain": "kk"}, {"domain": "math"}):
        study = load_study(write(tmp_path, **changes))
        fingerprints.append(study.fingerprint(next(study.cells())))
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
