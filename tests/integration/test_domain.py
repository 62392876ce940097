"""A fourth domain, in a folder outside the package, through all that a domain goes through."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sg_rlhf.run_dir import jsonl_log
from sg_rlhf.tasks.codec import CharacterCodec
from sg_rlhf.tasks.registry import VARIABLE
from sg_rlhf.tasks.rollout import Turn
from tests.domains.guess import GuessEnvironment
from tests.domains.reverse import grade
from tests.integration.conftest import ROOT, environment

pytestmark = [pytest.mark.integration, pytest.mark.full]

FOLDER = ROOT / "tests" / "domains"

Command = Callable[..., str]


@pytest.fixture(scope="module")
def command() -> Command:
    """Runs a module with the domain registered; what it prints."""
    variables = {VARIABLE: "tests.domains.reverse:REVERSE", "PYTHONPATH": str(ROOT)}

    def run(module: str, *arguments: object) -> str:
        result = subprocess.run(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=ROOT, env={**environment(), **variables}, capture_output=True, text=True,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
        return result.stdout

    return run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, command: Command) -> Path:
    out = tmp_path_factory.mktemp("reverse") / "data"
    said = command(
        "sg_rlhf", "data", "reverse", "--out", out, "--generate", "count=24", "test_count=8"
    )
    assert said.startswith("letters to write in the reverse order\n")
    return out


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, command: Command, data: Path) -> Path:
    """Three rollouts with a tiny model that is built for it."""
    folder = tmp_path_factory.mktemp("reverse_run")
    command("sg_rlhf", "tiny", "--domain", "reverse", "--out", folder / "model", "--threads", 1)
    command(
        "sg_rlhf.train", "--config", FOLDER / "reverse_tiny_cpu.yaml", "--run-dir", folder / "run",
        f"actor.model_name_or_path={folder / 'model'}",
        f"data.prompt_dataset={data / 'train.jsonl'}", f"eval.dataset={data / 'test.jsonl'}",
        "sg.samples_per_step=32", "sg.wandb=disabled",
    )  # fmt: skip
    return folder / "run"


def test_it_trains_with_its_reward_and_its_settings(trained: Path) -> None:
    rows = jsonl_log.read(trained / jsonl_log.METRICS)
    assert [row["global_step"] for row in rows] == [1, 2, 3]
    assert all(0.0 <= row["in_place"] <= 1.0 and row["format_ok"] > 0 for row in rows)
    samples = jsonl_log.read(trained / jsonl_log.SAMPLES)
    assert len(samples) == 96
    for sample in samples:
        expected = grade(sample["response"], sample["label"])
        assert sample["correct"] == float(expected.correct)
        assert sample["reward"] == pytest.approx(expected.logs["in_place"])
    # Not the default: the recipe's setting reached the engine.
    assert any(0.0 < sample["reward"] < 1.0 for sample in samples)
    steps = jsonl_log.read(trained / jsonl_log.OPTIMIZER_STEPS)
    assert all(
        math.isfinite(row["actor_grad_norm"]) and row["actor_grad_norm"] > 0 for row in steps
    )


def test_its_evaluation_in_training_names_its_sources(trained: Path, command: Command) -> None:
    last = jsonl_log.read(trained / jsonl_log.EVALUATIONS)[-1]
    sources = [key for key in last if key.startswith("eval_reverse_") and key.endswith("_accuracy")]
    assert sources
    command("sg_rlhf", "report", trained)
    assert "5 letters" in (trained / "report.html").read_text()


def test_its_suite_evaluates_the_checkpoint(
    trained: Path, command: Command, tmp_path: Path
) -> None:
    out = tmp_path / "eval"
    model = trained / "checkpoints" / "final"
    command("eval.run", "--suite", "reverse", "--model", model, "--out", out)
    found = json.loads((out / "results.json").read_text())
    assert found["suite"] == "reverse"
    scores = found["benchmarks"]["reverse"]["scores"]
    assert scores["accuracy"]["n_questions"] == 24 and "accuracy/4" in scores
    lines = (out / "samples.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):
        assert row["correct"] == grade(row["response"], row["gold"]).correct


def test_a_domain_of_several_turns_is_trained_and_evaluated(
    command: Command, tmp_path: Path
) -> None:
    place = "tests.domains.guess:GUESS"
    data, run, out = (tmp_path / name for name in ("data", "run", "eval"))
    command("sg_rlhf", "data", place, "--out", data, "--generate", "count=16", "test_count=8")
    command(
        "sg_rlhf.train", "--config", FOLDER / "guess_tiny_cpu.yaml", "--run-dir", run,
        f"data.prompt_dataset={data / 'train.jsonl'}", f"eval.dataset={data / 'test.jsonl'}",
        "sg.samples_per_step=32", "sg.wandb=disabled",
    )  # fmt: skip
    rows = jsonl_log.read(run / jsonl_log.METRICS)
    assert [row["global_step"] for row in rows] == [1, 2]
    assert all(1.0 <= row["guesses"] == row["turns"] <= 3.0 for row in rows)
    assert all(row["observation_tokens"] > 0 for row in rows)
    command("eval.run", "--suite", place, "--model", run / "checkpoints" / "final", "--out", out)
    found = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert len(found) == 8 and all(1 <= len(row["turns"]) <= 3 for row in found)
    for row in found:
        episode = GuessEnvironment().begin({"answer": row["gold"]}, CharacterCodec())
        for turn in row["turns"]:
            asyncio.run(episode.step(Turn(turn)))
        assert row["correct"] == episode.grade().correct
