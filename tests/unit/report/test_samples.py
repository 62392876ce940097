"""Which samples a page holds, in what form, and how probable their tokens are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from sg_rlhf.report.runs import grouped, read_run
from sg_rlhf.report.samples import choose, payload, probability_histogram
from sg_rlhf.run_dir import jsonl_log
from tests.unit.report.synthetic import write_run


def rows(steps: int, each: int) -> list[dict[str, Any]]:
    return [{"global_step": step, "n": n} for step in range(1, steps + 1) for n in range(each)]


def test_whole_rollouts_from_first_to_last_are_chosen() -> None:
    chosen = choose(rows(350, 4), 100)
    steps = [row["global_step"] for row in chosen]
    assert len(chosen) == 100 and steps[0] == 1 and steps[-1] == 350
    assert all(steps.count(step) == 4 for step in steps)
    assert choose(rows(3, 2), 6) == rows(3, 2)
    assert [row["n"] for row in choose(rows(3, 8), 5)] == [0, 1, 2, 3, 4]


def test_the_columns_say_what_the_rows_say(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", rollouts=3, samples_per_step=2, tokens=5)
    row = {
        "global_step": 4, "prompt": "p", "label": "l", "response": "ab", "reward": 1.0,
        "correct": None, "advantage": 0.5, "tokens": ["a", "b"], "log_probs": [math.log(0.05), 0.0],
        "dialogue": "a<information>x</information>b",
    }  # fmt: skip
    jsonl_log.append(run_dir / jsonl_log.SAMPLES, [row])
    data = payload([read_run(run_dir)], 500)
    columns = data["samples"]
    assert {len(column) for column in columns.values()} == {7}
    last = {name: column[-1] for name, column in columns.items()}
    assert [data["pieces"][t] for t in last["tokens"]] == ["a", "b"]
    assert last["logp"] == [2996, 0] and last["w"] == [1000, 1200] and last["why"] == "00"
    assert data["texts"][last["text"]] == row["dialogue"]
    assert last["correct"] is None and last["step"] == 4
    assert columns["text"][0] is None  # its tokens spell it


def test_rows_without_tokens_or_numbers_are_shown_as_text(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    odd = {"global_step": 12, "response": "only text", "label": ["a", 1], "tokens": ["x"]}
    jsonl_log.append(run_dir / jsonl_log.SAMPLES, [odd])
    data = payload([read_run(run_dir)], 500)
    last = {name: column[-1] for name, column in data["samples"].items()}
    assert last["tokens"] == [] and data["texts"][last["text"]] == "only text"
    assert data["texts"][last["label"]] == '["a", 1]' and last["reward"] is None


def test_the_logged_histogram_is_preferred_to_the_samples(tmp_path: Path) -> None:
    logged = grouped([read_run(write_run(tmp_path / "a"))])[0]
    shares, source = probability_histogram(logged)
    assert source == "every token trained on" and math.fsum(shares) == pytest.approx(1)
    sampled = grouped([read_run(write_run(tmp_path / "b", histograms=False))])[0]
    assert probability_histogram(sampled)[1] == "tokens of samples.jsonl"
