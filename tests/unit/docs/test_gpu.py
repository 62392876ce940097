"""docs/gpu.md names the stages and their results, tests/gpu/README.md the figures."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from sg_rlhf.plan.command import main as plan
from tests.gpu.stages import table

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "gpu.md").read_text()
README = (ROOT / "tests" / "gpu" / "README.md").read_text()

#: The card whose figures of a stage the pages have; others may send results of theirs.
CARDS = {"b": "h100", "e": "h100", "f": "h200", "g": "h200", "h": "h200"}


def figures(stage: str, *, states_on_gpu: bool = False) -> Any:
    """Of a stage's result; of stage f also with the optimizer's states on the GPU."""
    results = (ROOT / "tests" / "gpu" / "results").glob(f"{stage}_*_{CARDS[stage]}*.json")
    (file,) = [path for path in results if ("states_on_gpu" in path.name) == states_on_gpu]
    return json.loads(file.read_text())["figures"]


def cell(page: str, row: str) -> list[str]:
    """The cells after the first of a table's row."""
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {row} |")]
    return [text.strip() for text in line.strip("|").split("|")][1:]


def test_the_table_is_the_stages() -> None:
    """`bash tests/gpu.sh --list` prints it."""
    assert table() in PAGE


def test_the_results_are_those_that_exist() -> None:
    found = sorted((ROOT / "tests" / "gpu" / "results").glob("*.json"))
    none = "**None: no stage has run on a GPU yet.**"
    assert (none in PAGE) == (not found)
    for file in found:
        status = json.loads(file.read_text())["status"]
        assert f"| `{file.name}` | {status} |" in PAGE


def test_the_fused_head_is_as_in_the_result() -> None:
    found = figures("b")
    paths = ("without logits, triton", "without logits", "over logits, one buffer", "upstream")
    rows = re.findall(r"^\| (\d)B, ([\d,]+) \|", README, re.MULTILINE)
    assert len(rows) > 3
    for size, tokens in rows:
        for path, text in zip(paths, cell(README, f"{size}B, {tokens}"), strict=True):
            figure = found[f"head_qwen2.5-{size}b_T{tokens.replace(',', '')}_{path}"]
            ms, gib = text.split(", ")
            places = len(gib.partition(".")[2])
            assert float(ms) == round(figure["ms"])
            assert float(gib) == round(figure["extra_gib"], places)


def test_packed_attention_is_as_in_the_result() -> None:
    found = figures("b")
    for size in ("0.5", "3", "7"):
        for kind, text in zip(
            ("ours", "torch varlen", "sdpa one by one"),
            cell(README, f"heads of {size}B"),
            strict=True,
        ):
            figure = found[f"attention_qwen2.5-{size}b_T20000_{kind}"]
            assert text == f"{figure['ms']:.1f}"


def test_the_rollout_steps_are_as_in_the_results() -> None:
    old, runs_of_f = figures("e"), (figures("f", states_on_gpu=True), figures("f"))
    for row, of_e, of_f in (
        ("sampling", "timing/generation", "seconds_generation"),
        ("reference log-probs", "timing/reference_log_probs", "seconds_make_experience"),
        ("update, with old log-probs and the optimizer's states from and to the host",
         "timing/ppo_train", "seconds_ppo_train"),
        ("weight sync", "timing/broadcast", "seconds_broadcast"),
        ("whole step", "timing/step_total", "seconds_step_total"),
    ):  # fmt: skip
        found = (old[of_e], *(new[of_f] for new in runs_of_f))
        for text, figure in zip(cell(README, row), found, strict=True):
            places = len(text.partition(".")[2])
            assert float(text) == round(figure, places), row


def test_the_run_that_learned_is_as_in_the_result() -> None:
    before, after = figures("g")["held_out_accuracy"]
    assert f"from {before:.3f} to {after:.3f}".replace("0.", ".") in PAGE


@pytest.mark.parametrize(
    ("stage", "states_on_gpu", "hardware", "column"),
    [("e", False, "1xh100", 0), ("f", True, "1xh200", 2), ("f", False, "1xh200", 4)],
)
def test_a_step_beside_its_plan(
    stage: str, states_on_gpu: bool, hardware: str, column: int,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The README names the commands that made its planned columns."""
    text = README.replace("\\\n", " ")
    (command,) = re.findall(rf"^sg-rlhf plan (.*{hardware}.*)$", text, re.MULTILINE)
    more = ["ds.adam_offload=false"] if states_on_gpu else []
    assert plan([*shlex.split(command), *more, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    measured = figures(stage, states_on_gpu=states_on_gpu)
    parts = planned["time"]["parts"]
    step = {"generation": "timing/generation", "ppo_train": "timing/ppo_train",
            "step_total": "timing/step_total"}  # fmt: skip
    if stage == "f":
        step = {phase: f"seconds_{phase}" for phase in step}
    for row, before, after in (
        ("peak of the policy's tensors, GiB", planned["policy_allocated_gib"],
         measured["memory/peak_allocated_gib"]),
        ("GPU memory in the update, GiB", planned["gpu_memory"]["update"]["gib"],
         measured["memory/device_used_gib"]),
        ("sampling, s", parts["sampling"], measured[step["generation"]]),
        ("update, optimizer and offload, s", sum(
            parts[part] for part in ("update", "optimizer", "offload")
        ), measured[step["ppo_train"]]),
        ("whole step, s", planned["time"]["seconds"], measured[step["step_total"]]),
    ):  # fmt: skip
        for text, figure in zip(
            cell(README, row)[column : column + 2], (before, after), strict=True
        ):
            assert float(text) == round(figure, len(text.partition(".")[2])), row


SOFTWARE_GPU = ROOT / "tests" / "software_gpu"


def memory_tables() -> tuple[str, str]:
    """The page down to the table of the software GPU, and the rest, with that of the H200."""
    page = (SOFTWARE_GPU / "README.md").read_text()
    now, _, before = page.partition("An H200 ran the same recipes")
    return now, before


def test_a_rank_on_a_software_gpu_is_as_in_the_result() -> None:
    """Each cell has the software GPU's figure and the plan's."""
    cases = json.loads((SOFTWARE_GPU / "results" / "memory.json").read_text())["figures"]
    assert len(cases) == 4
    for case, found in cases.items():
        *phases, kept = cell(memory_tables()[0], case)
        for phase, text in zip(("update", "score", "sync"), phases, strict=True):
            measured, planned = map(float, text.split(","))
            assert measured == round(found[f"{phase}_gib"], 2)
            assert planned == round(found["planned_gib"][phase], 2)
        assert float(kept) == round(found["reserved_gib"], 1)


def test_a_rank_on_a_gpu_is_as_in_the_result() -> None:
    """Each cell has the software GPU's figure, the GPU's, and the plan's."""
    cases = figures("h")
    assert len(cases) == 4
    for case, found in cases.items():
        *phases, kept = cell(memory_tables()[1], case)
        for phase, text in zip(("score", "update", "sync"), phases, strict=True):
            software, measured, planned = map(float, text.split(","))
            assert measured == round(found[f"{phase}_gib"], 2)
            assert planned == round(found["planned_gib"][phase], 2)
            assert abs(software / found[f"{phase}_gib"] - 1) < 0.004
        assert float(kept.split(",")[1]) == round(found["reserved_gib"], 1)


def test_the_zero_stages_are_as_in_the_result() -> None:
    file = ROOT / "lab" / "bench" / "results" / "zero_stages.json"
    found = {
        (row["pass"], str(row["samples"]), row["zero_stage"]): row["ms"]
        for row in json.loads(file.read_text())["rows"]
    }
    kinds = {
        "forward, for old and reference log-probs": "score",
        "forward and backward": "train",
    }
    rows = re.findall(r"^\| (forward[a-z, -]+) \| (\d) \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 4
    for kind, samples, cells in rows:
        three, two = found[kinds[kind], samples, "3"], found[kinds[kind], samples, "2"]
        assert cells.split(" | ") == [f"{three:,.0f}", f"{two:,.0f}", f"{three / two:.1f}"]
