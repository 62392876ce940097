"""The figures that the pages print are those of the committed results."""

from __future__ import annotations

import functools
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.experiments.smollm2_135m import start_accuracy, weighted_gradients
from sg_rlhf.machine import hardware
from sg_rlhf.plan import load
from sg_rlhf.plan.memory import MemoryPlan
from sg_rlhf.plan.run_shape import run_shape

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "lab" / "bench" / "results"


def rows(page: str) -> list[str]:
    """The page's table rows, without the spaces around their cells."""
    lines = (ROOT / page).read_text().splitlines()
    return [cells(line) for line in lines if line.startswith("|")]


def cells(line: str) -> str:
    return "|".join(cell.strip() for cell in line.strip().strip("|").split("|"))


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def of_experiment(name: str) -> Any:
    return json.loads((ROOT / "lab" / "experiments" / name).read_text())


def of_graders(name: str) -> Any:
    return of_experiment(f"graders/results/{name}")


@functools.cache
def measurements() -> dict[str, Any]:
    """`python -m lab.measure` on the models of kk_small, by name."""
    file = ROOT / "lab" / "experiments" / "kk_small" / "measurements.jsonl.gz"
    return {row["name"]: row for row in map(json.loads, gzip.open(file, "rt"))}


@pytest.mark.full
def test_the_study() -> None:
    printed = subprocess.run(
        [sys.executable, "lab/experiments/kk_small/analyse.py"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    # The last table is the sentence of docs/results.md on three pairs.
    *of_the_page, of_the_runs = printed.strip().split("\n\n")
    pages = rows("docs/results.md") + rows("lab/experiments/kk_small/README.md")
    expected = [cells(line) for table in of_the_page for line in table.splitlines()]
    assert len(expected) > 50
    assert [row for row in expected if row not in pages] == []
    differences = of_the_runs.splitlines()[-1].split("|")[2].strip()
    assert differences == "-.003, +.035, +.025; +.019 +- .048"
    text = " ".join((ROOT / "docs/results.md").read_text().split())
    assert "GRPO-SG minus GRPO is -.003, +.035 and +.025, +.019 +- .048 on average" in text


def test_the_study_of_the_bound() -> None:
    table = subprocess.run(
        [sys.executable, "lab/experiments/kk_async/analyse.py"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    assert len(table) == 14
    page = rows("lab/experiments/kk_async/README.md")
    assert [row for row in map(cells, table) if row not in page] == []


def test_the_rates_of_asynchronous_rollouts() -> None:
    result, page = read("async_rollouts.json"), rows("docs/performance.md")
    for arm, found in result["arms"].items():
        rates = ", ".join(f"{rate:.1f}" for rate in found["rollouts_per_minute"])
        ratio = f"{result['ratio'][arm]:.2f} x" if arm in result["ratio"] else ""
        waited, total = found["generation_seconds"], found["step_total_seconds"]
        assert f"{arm}|{rates}|{ratio}|{waited:.2f}|{total:.2f}" in page


def short(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")


def test_the_runs_of_the_tiny_model() -> None:
    result = of_experiment("kk_cpu/results.json")
    page = rows("lab/experiments/kk_cpu/README.md")
    for kind, name in (("grpo_sg", "GRPO-SG"), ("grpo", "GRPO")):
        for run in result["runs"][kind]:
            step = f"{run['median_seconds']['step_total']:.1f} s"
            if kind == "grpo_sg":
                ratio = result["step_time_ratio_grpo_sg_over_grpo"][str(run["seed"])]
                step += f", {ratio:.2f} x"
            accuracy = [
                f"{short(run[f'accuracy_{when}'])} +- {short(run[f'accuracy_{when}_ci95'])}"
                for when in ("before", "after")
            ]
            row = [
                f"{name}, seed {run['seed']}",
                *accuracy,
                step,
                f"{run['wall_seconds']:.0f} s",
                f"{run['peak_memory_gb']:.1f} GB",
            ]
            assert "|".join(row) in page


def ratio_and_interval(algorithm: dict[str, Any], digits: int) -> str:
    if "spread_over_baseline" not in algorithm:
        return ""
    low, high = algorithm["spread_over_baseline_ci95"]
    return f"{algorithm['spread_over_baseline']:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def figures(a: dict[str, Any]) -> list[str]:
    low, high = a["size_range"]
    return [
        f"{a['size']:.2f} ({low:.2f} to {high:.2f})",
        f"{a['cosine']:.3f} ({a['cosine_min']:.3f})",
        ratio_and_interval(a, 2),
    ]


@pytest.mark.parametrize(
    "result", ["minibatch_gradients_start", "minibatch_updates_grpo_s0"], ids=["before", "after"]
)
def test_gradients_and_steps_of_minibatches(result: str) -> None:
    page = rows("lab/experiments/kk_small/gradients.md")
    text = (ROOT / "lab/experiments/kk_small/gradients.md").read_text()
    baseline, *others = measurements()[result]["algorithms"]
    assert len(others) == 10
    for a in others:
        assert "|".join([a["algorithm"], *figures(a), *figures(a["update"])]) in page
        assert a["clipped"] == 0
    step = baseline["update"]
    assert (
        f"GRPO's own spread is {short(baseline['spread'])} for the gradient and "
        f"{short(step['spread'])} for the step. Its largest minibatch is {baseline['peak']:.2f} "
        f"and {step['peak']:.2f} medians."
    ) in " ".join(text.split())


def test_sizes_and_cosines_of_the_page_before_and_after_training() -> None:
    page = rows("lab/experiments/kk_small/sharpness.md")
    before, after = (
        measurements()[name]["algorithms"][1:]
        for name in ("minibatch_gradients_start", "minibatch_updates_grpo_s0")
    )
    for one, other in zip(before, after, strict=True):
        assert one["algorithm"] == other["algorithm"]
        found = (one, one["update"], other, other["update"])
        row = "|".join(f"{a['size']:.2f}, {a['cosine']:.3f}" for a in found)
        assert f"{one['algorithm']}|{row}" in page


def test_sharpness_on_three_batches() -> None:
    page = rows("lab/experiments/kk_small/sharpness.md")
    batches = [
        measurements()[f"sharpness_sampled_from_{name}"]["models"]
        for name in ("start", "grpo_s0", "range_0.5_1.5_s0")
    ]
    names = ["GRPO, seed 0", "GRPO, seed 1", "GRPO, seed 2"]
    names += ["(0.5, 1.5), seed 0", "(0.8, 1.5), seed 0"]
    for name, *found in zip(names, *batches, strict=True):
        values = [model["results"][0] for model in found]
        row = "|".join(
            f"{v['sharpness']:.4f} ({v['sharpness'] / v['first_order']:.2f})"[1:] for v in values
        )
        assert f"{name}|{row}" in page


def test_steps_compared_with_each_other() -> None:
    text = " ".join((ROOT / "lab/experiments/kk_small/sharpness.md").read_text().split())
    both = measurements()["minibatch_updates_mask_only_grpo_sg"]["algorithms"][1]
    assert f"{both['size']:.2f} times as long with cosine {short(both['cosine'])}" in text
    step = both["update"]
    assert f"its step {step['size']:.2f} times, {short(step['cosine'])} (" in text
    name = "minibatch_updates_grpo_sg_outside_grpo_sg_normalized"
    both = measurements()[name]["algorithms"][1]
    assert f"gradients of 1 and {short(round(both['size'], 2))[:3]} and one step" in text
    assert abs(both["update"]["size"] - 1) < 0.0003


def test_noise_of_an_accuracy() -> None:
    text = " ".join((ROOT / "lab/experiments/kk_small/sharpness.md").read_text().split())
    prompts, draws = [], []
    for samples in (8, 64):
        trained = measurements()[f"accuracy_grpo_{samples}"]["models"][1:]
        found = [model["sets"]["held_out"]["all"] for model in trained]
        assert len(found) == 3
        prompts.append(sum(f["ci95"] for f in found) / 3)
        draws.append(sum(f["draws_ci95"] for f in found) / 3)
    assert f"the second is +- {short(draws[0])} with [8" in text
    assert f"and +- {short(draws[1])} with [64" in text
    assert f"the first +- {short(prompts[0])} and +- {short(prompts[1])}." in text


def test_minibatch_gradients_at_the_checkpoints() -> None:
    results = [measurements()[f"minibatch_gradients_grpo_s{seed}"] for seed in range(3)]
    page = [row.split("|") for row in rows("lab/experiments/kk_small/gradients.md")]
    for three in zip(*(result["algorithms"] for result in results), strict=True):
        found = [row for row in page if row[0] == three[0]["algorithm"]][-1]
        assert found[1] == ", ".join(f"{a['size']:.2f}" for a in three)
        assert [float(c) for c in found[2].split(", ")] == pytest.approx(
            [a["cosine"] for a in three], abs=0.0051
        )
        assert found[3] == ", ".join(f"{a['spread']:.2f}" for a in three)
        assert found[4] == "; ".join(filter(None, (ratio_and_interval(a, 2) for a in three)))
        assert found[5] == ", ".join(f"{a['peak']:.1f}" for a in three)


@pytest.mark.parametrize(("loss", "column"), [("grpo", 1), ("nll", 4)])
def test_sharpness(loss: str, column: int) -> None:
    page = [row.split("|") for row in rows("lab/experiments/kk_small/sharpness.md")]
    for found in measurements()[f"sharpness_kk_{loss}"]["models"][0]["results"]:
        row = next(r for r in page if r[0] == f"{found['rho']:g}" and len(r) == 7)
        values = (found["sharpness"], found["first_order"])
        assert [row[column], row[column + 1]] == [f"{v:#.3g}".removeprefix("0") for v in values]
        assert row[column + 2] == f"{values[0] / values[1]:.2f}"


def test_shipped_tiny_models() -> None:
    page = rows("docs/results.md")
    for name, note in (("kk", ""), ("math", ""), ("search", ", single turns")):
        found = json.loads((ROOT / f"sg_rlhf/tiny/{name}_tiny/manifest.json").read_text())
        sampled, greedy = found["sampled_at_0.7"], found["greedy"]
        accuracy = f"{short(sampled['accuracy'])} ({short(greedy['accuracy'])})"
        guesses = (f"{one['guesses']:.2f}".removeprefix("0") for one in (sampled, greedy))
        steps = f"{found['recipe']['steps']:,}"
        expected = f"`{name}_tiny`{note}|{steps}|{accuracy}|{next(guesses)} ({next(guesses)})"
        assert expected in page
        assert found["parameters"] == 855168


def test_speed_of_retrieval() -> None:
    (row,) = [row for row in rows("docs/search.md") if "retrieval.json" in row]
    result = read("retrieval.json")
    ratios = [one["speedup"] for one in result["grid"]]
    alone = result["clients"]["1"]["speedup"]
    assert (
        f"{min(ratios):.1f} to {max(ratios):.0f} times as many queries per second; "
        f"with one client {alone:.2f} times"
    ) in row


def test_memory_of_a_run_of_the_tiny_model() -> None:
    runs = of_experiment("kk_cpu/results.json")["runs"].values()
    (peak,) = {f"{run['peak_memory_gb']:.1f} GB" for kind in runs for run in kind}
    found_in = {
        "docs/troubleshooting.md": "host memory|",
        "tests/gpu/README.md": "host memory of the tiny K&K recipe|",
    }  # fmt: skip
    for page, row in found_in.items():
        (found,) = [r for r in rows(page) if r.startswith(row)]
        assert peak in found
    plan = load.load_for([str(ROOT / "configs/kk/grpo_sg_tiny_cpu.yaml")], (), None)
    planned = MemoryPlan(run_shape(plan[0]), hardware.Hardware(host_memory_gib=24.0))
    assert f"{planned.host_gib * 2**30 / 1e9:.1f} GB planned" in found


def test_step_times_of_the_tiny_model() -> None:
    ratios = of_experiment("kk_cpu/results.json")["step_time_ratio_grpo_sg_over_grpo"].values()
    first, second, third = (f"{ratio:.2f}" for ratio in ratios)
    (row,) = [r for r in rows("docs/results.md") if r.startswith("Table 4")]
    assert f"step time {first}, {second} and {third} of GRPO's" in row


def test_errors_of_the_grader() -> None:
    page = " ".join(rows("docs/results.md"))
    suites = of_graders("grader_cases.json")["runs"]["after"]["suites"].values()
    cases, wrong, accepted = (
        sum(suite[key] for suite in suites) for key in ("cases", "ours wrong", "false_positives")
    )
    assert (
        f"|{cases} cases: ours is wrong on {wrong} and accepts {accepted} wrong answers|"
    ) in page
    changes = of_graders("mutations.json")["runs"]["after"]
    rejected, passed = (
        f"{changes[kind]['errors']} of {changes[kind]['made']:,} {name} {verb}"
        for kind, name, verb in (
            ("rewrites", "rewrites", "rejected"),
            ("mutations", "altered answers", "accepted"),
        )
    )
    assert f"|{rejected}, {passed}|" in page


def test_the_table_of_the_pretrained_model_is_its_results_file() -> None:
    result = json.loads((ROOT / "lab/experiments/smollm2_135m/start_accuracy.json").read_text())
    page = (ROOT / "docs/tutorials/4_pretrained_model.md").read_text()
    assert start_accuracy.table(result) in page


def test_the_gradients_of_the_pretrained_model_are_their_results_file() -> None:
    result = json.loads((ROOT / "lab/experiments/smollm2_135m/weighted_gradients.json").read_text())
    page = (ROOT / "docs/method.md").read_text()
    assert weighted_gradients.table(result) in page
    for row, key in (("tokens with p", "share_of_tokens"), ("their share", "share_of_gradient")):
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {row}"))
        shares = [
            ", ".join(f"{s:.2f}"[1:] for s in found[key].values())
            for found in result["sets"].values()
        ]
        assert line.endswith(f"| {shares[0]} | {shares[1]} |")
