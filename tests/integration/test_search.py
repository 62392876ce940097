"""Search questions through everything: index, server, engine, dialogues, ZeRO-3, weight sync."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from sg_rlhf.run_dir import jsonl_log
from sg_rlhf.tasks.search.grading import parse_golds, score
from sg_rlhf.tasks.search.protocol import answer_of
from sg_rlhf.train import main
from tests.integration import search_outage
from tests.integration.conftest import ROOT, SMALL, environment

pytestmark = [pytest.mark.integration, pytest.mark.full]
RECIPE = ROOT / "configs" / "search" / "grpo_sg_tiny_cpu.yaml"


@dataclass(frozen=True)
class World:
    """A generated encyclopedia with its questions, and an index of it."""

    data: Path
    index: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("search")
    made = World(folder / "data", folder / "index")
    run_command(
        "sg_rlhf", "data", "search", "--source", "encyclopedia", "--out", made.data,
        "--generate", "people=40", "towns=12", "seed=0",
    )  # fmt: skip
    run_command(
        "sg_rlhf.retrieval.index", "--corpus", made.data / "corpus.jsonl", "--encoder", "bm25",
        "--out", made.index,
    )  # fmt: skip
    return made


def run_command(module: str, *arguments: object) -> None:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=1800)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def server(world: World) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The real retriever, until the block ends."""
    port = free_port()
    command = [
        sys.executable, "-m", "sg_rlhf.retrieval.server", "--index", str(world.index),
        "--port", str(port),
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        deadline = time.monotonic() + 1800
        while time.monotonic() < deadline:
            assert process.poll() is None, "the server ended"
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).is_success:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/retrieve", process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=1800)


def training(run_dir: Path, world: World, url: str, *overrides: str) -> list[str]:
    return [
        sys.executable, "-m", "sg_rlhf.train", "--config", str(RECIPE), "--run-dir", str(run_dir),
        f"data.prompt_dataset={world.data / 'train.jsonl'}",
        f"eval.dataset={world.data / 'test.jsonl'}",
        *SMALL, "rollout.max_new_tokens=256", f"sg.search.url={url}", *overrides,
    ]  # fmt: skip


@dataclass(frozen=True)
class Stopped:
    """A run whose retriever was killed after the second rollout and its evaluation."""

    run_dir: Path
    url: str
    status: int
    error: str


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, world: World) -> Stopped:
    run_dir = tmp_path_factory.mktemp("runs") / "search"
    with server(world) as (url, process):
        run = subprocess.Popen(
            training(
                run_dir, world, url, "train.num_episodes=50", "sg.samples_per_step=16",
            ),
            cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 1800
            while len(jsonl_log.read(run_dir / jsonl_log.EVALUATIONS)) < 2:
                assert run.poll() is None, run.communicate()[1]
                assert time.monotonic() < deadline
                time.sleep(0.1)
            process.send_signal(signal.SIGKILL)
            _, error = run.communicate(timeout=1800)
        finally:
            if run.poll() is None:
                os.kill(run.pid, signal.SIGTERM)
                run.wait(timeout=1800)
    return Stopped(run_dir, url, run.returncode, error)


def begun(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """The rows of the two rollouts that had a retriever to the end."""
    return [row for row in jsonl_log.read(run_dir / name) if row["global_step"] <= 2]


def test_dialogues_are_logged_and_graded_as_the_reward_says(stopped: Stopped) -> None:
    samples = begun(stopped.run_dir, jsonl_log.SAMPLES)
    assert len(samples) == 32
    searched = [s for s in samples if "dialogue" in s]
    assert searched, "no rollout searched"
    for sample in samples:
        right = score(answer_of(sample["response"]), parse_golds(sample["label"])).correct
        assert sample["correct"] == float(right)
        assert sample["reward"] == (1.0 if right else -1.0)
        # What is trained on is what the model wrote.
        assert "<information>" not in sample["response"] or "<information>" in "".join(
            sample["tokens"]
        )
    for sample in searched:
        assert "<information>" in sample["dialogue"]
        assert len(sample["tokens"]) == len(sample["log_probs"])


def test_passages_are_those_of_the_corpus(stopped: Stopped, world: World) -> None:
    corpus = (world.data / "corpus.jsonl").read_text()
    shown = [
        sample["dialogue"].split('Doc 1(Title: "')[1].split('"')[0]
        for sample in begun(stopped.run_dir, jsonl_log.SAMPLES)
        if 'Doc 1(Title: "' in sample.get("dialogue", "")
    ]
    assert shown
    for title in shown:
        assert json.dumps(f'"{title}"\n')[1:-1] in corpus


def test_metrics_of_every_rollout(stopped: Stopped) -> None:
    rows = begun(stopped.run_dir, jsonl_log.METRICS)
    assert [row["global_step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["rollout/accuracy"] == pytest.approx(
            (row["rollout/reward_mean"] + 1) / 2, abs=1e-5
        )
        assert row["searches"] > 0 and row["search_seconds"] > 0
        assert row["retrieval_failures"] == 0
        assert row["answer_retrieved"] <= row["answered"] and row["turns"] >= 1
        assert row["sg/mismatch_abs_mean"] < 0.05
        # Tokens that the search engine wrote are not in the response.
        assert (
            row["rollout/response_length_mean"] + row["observation_tokens"] <= row["total_length"]
        )
    steps = begun(stopped.run_dir, jsonl_log.OPTIMIZER_STEPS)
    assert sum(row["sg/n_tokens"] for row in steps) == pytest.approx(
        sum(row["rollout/response_length_mean"] for row in rows) * 16
    )
    assert all(math.isfinite(row["actor_grad_norm"]) for row in steps)


def test_evaluation_has_an_accuracy_for_one_and_for_two_hops(stopped: Stopped) -> None:
    rows = begun(stopped.run_dir, jsonl_log.EVALUATIONS)
    for source in ("encyclopedia_1hop", "encyclopedia_2hop"):
        assert 0 <= rows[-1][f"eval_{source}_accuracy"] <= 1
    assert rows[-1]["eval_num_prompts"] == 8  # data.max_samples


def test_a_retriever_that_dies_stops_the_run(stopped: Stopped) -> None:
    assert stopped.status == 1, stopped.error
    last = stopped.error.strip().splitlines()[-1]
    assert last.startswith("stopped: ") and "searches of a rollout engine failed" in last
    assert "(limit: 10 %)" in last and stopped.url in last


def test_a_run_goes_through_an_outage_as_if_there_were_none(tmp_path: Path) -> None:
    result = search_outage.measure(tmp_path, outage=6.0)
    assert result["status"] == 0
    assert (result["rollouts"], result["dialogues"], result["retrieval_failures"]) == (6, 96, 0)
    assert result["same_dialogues"] and result["same_optimizer_steps"]
    away, back = result["said"]
    assert "waiting for it, up to 60 s" in away and back.endswith("answers again")


def test_a_run_without_a_retriever_does_not_start(
    tmp_path: Path,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SG_PLATFORM", "cpu")
    url = f"http://127.0.0.1:{free_port()}/retrieve"
    assert main(training(tmp_path / "run", world, url)[3:]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"error: retriever {url}: no connection")
    assert "sg-rlhf serve" in last
    assert not (tmp_path / "run").exists()
