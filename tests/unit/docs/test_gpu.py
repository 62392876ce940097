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


def figures(stage: str) -> Any:
    (file,) = (ROOT / "tests" / "gpu" / "results").glob(f"{stage}_*_h100_*.json")
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


def test_the_rollout_step_is_as_in_the_result() -> None:
    found = figures("e")
    for row, key in (
        ("sampling", "generation"), ("reference log-probs", "reference_log_probs"),
        ("old log-probs", "update_old_log_probs"), ("forward", "update_forward"),
        ("backward, with recomputation", "update_backward"), ("whole step", "step_total"),
    ):  # fmt: skip
        assert cell(README, row) == [f"{found[f'timing/{key}']:.0f}"], row
    assert f"norm was {found['actor_grad_norm']:.1f}" in " ".join(README.split())


def test_the_step_beside_its_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The README names the command that made its planned column."""
    (command,) = re.findall(r"^sg-rlhf plan ([^`]*1xh100[^`]*)^```", README, re.MULTILINE)
    assert plan([*shlex.split(command.replace("\\\n", " ")), "--json"]) == 0
    planned, measured = json.loads(capsys.readouterr().out), figures("e")
    for row, before, after, form in (
        ("peak of the policy's tensors, GiB", planned["policy_allocated_gib"],
         measured["memory/peak_allocated_gib"], ".2f"),
        ("GPU memory in the update, GiB", planned["gpu_memory"]["update"]["gib"],
         measured["memory/device_used_gib"], ".1f"),
        ("whole step, s", planned["time"]["seconds"], measured["timing/step_total"], ".0f"),
    ):  # fmt: skip
        assert cell(README, row) == [format(before, form), format(after, form)], row
    assert cell(README, "sampling, s") == [
        f"{planned['time']['parts']['sampling']:.1f}", f"{measured['timing/generation']:.0f}",
    ]  # fmt: skip
