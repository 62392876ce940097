"""Search questions evaluated with real engines, a real index and its server."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from sg_rlhf.eval.answer import answer, samples_of
from sg_rlhf.eval.engines.base import Sample
from sg_rlhf.eval.engines.vllm import VllmEngine, set_environment
from sg_rlhf.eval.model import context_length, find_model
from sg_rlhf.eval.store import Store
from sg_rlhf.eval.suites import SUITES
from sg_rlhf.retrieval.index import build
from sg_rlhf.tasks import chat
from sg_rlhf.tasks.codec import TokenizerCodec
from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.search.environment import SearchEnvironment
from sg_rlhf.tasks.search.grading import score
from sg_rlhf.tasks.search.limits import Limits
from sg_rlhf.tasks.search.retriever import retriever_process
from sg_rlhf.tasks.search.sets import encyclopedia, published
from sg_rlhf.tasks.search.settings import SearchSettings
from sg_rlhf.tasks.suite import load_questions
from tests.integration.conftest import ROOT, environment
from tests.integration.test_eval import vllm_server

pytestmark = [pytest.mark.integration, pytest.mark.full]

TINY = ROOT / "sg_rlhf" / "tiny" / "search_tiny"
QUESTIONS = 6
#: Two subjects with six questions, most of which the tiny model, which often guesses, searches for.
ABOUT = re.compile("Esk Pike|Kell Cross")
#: What the tiny model was trained with.
SETTINGS = {"topk": 1, "max_turns": 3, "turn_tokens": 24, "observation_tokens": 64}


@dataclass(frozen=True)
class World:
    """A generated encyclopedia: an index of it, and questions about it in FlashRAG's form."""

    data: Path
    index: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("qa")
    made = encyclopedia.build(0, people=40, towns=12)
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in made.corpus))
    build(corpus, "bm25", folder / "index")
    data = folder / "data"
    data.mkdir()
    with (data / f"bamboogle_{QUESTIONS}.jsonl").open("w") as file:
        for question in (problem.question for problem in made.test):
            if not ABOUT.search(question.text):
                continue
            row = {"id": question.id, "question": question.text, "golden_answers": question.golds}
            file.write(json.dumps(row) + "\n")
    return World(data, folder / "index")


def command(world: World, out: Path, *arguments: str) -> list[str]:
    return [
        sys.executable, "-m", "eval.run", "--suite", "qa", "--model", str(TINY), "--out", str(out),
        "--data-dir", str(world.data), "--prompt", "short", "--index", str(world.index),
        "--search", *(f"{key}={value}" for key, value in SETTINGS.items()), *arguments,
    ]  # fmt: skip


def run(world: World, out: Path, *arguments: str, status: int = 0) -> str:
    result = subprocess.run(
        command(world, out, *arguments),
        cwd=ROOT, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == status, result.stdout + result.stderr
    return result.stdout + result.stderr


def rows(out: Path) -> dict[str, dict[str, Any]]:
    path = out / "samples.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = {row["id"]: row for row in map(json.loads, lines)}
    assert len(found) == len(lines), "a sample is stored twice"
    return found


def servers_of(index: Path) -> list[int]:
    """Processes that serve an index."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if b"sg_rlhf.retrieval.server" in words and str(index).encode() in words:
            found.append(int(entry.name))
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, world: World) -> Path:
    out = tmp_path_factory.mktemp("run") / "vllm"
    text = run(world, out)
    assert "notice: nq: skipped, no nq/test.jsonl" in text
    assert f"is a sample, {QUESTIONS} of 125 questions" in text
    assert f"questions of bamboogle {QUESTIONS} of 125." in " ".join(text.split())
    assert not servers_of(world.index)
    return out


def stable(row: dict[str, Any]) -> dict[str, Any]:
    """Without what a clock measured."""
    return {**row, "dialogue": {k: v for k, v in row["dialogue"].items() if k != "search_seconds"}}


def test_a_run_searches_grades_and_reports(whole: Path) -> None:
    found = rows(whole)
    assert len(found) == QUESTIONS
    for row in found.values():
        assert row["correct"] == score(row["extracted"], row["gold"]).correct
        searches = row["dialogue"]["searches"]
        assert row["response"].count("<information>Doc 1(Title: ") == searches
        assert row["turns"][0] == row["response"][: len(row["turns"][0])]
    results = json.loads((whole / "results.json").read_text())
    described = results["benchmarks"]["bamboogle"]
    assert described["limited"] and described["full_size"] == 125
    right = sum(row["correct"] for row in found.values())
    assert described["scores"]["exact match"]["value"] == pytest.approx(right / QUESTIONS)
    statistics = described["search"]
    assert statistics["searches_per_question"] > 0.5 and statistics["seconds_per_search"] > 0
    assert statistics["retrieval_failures"] == 0
    assert results["average"] is None and results["groups"]["Multi-hop"] is None
    assert {key: results["search"][key] for key in SETTINGS} == SETTINGS
    assert f"({QUESTIONS} of 125)" in (whole / "table.md").read_text()


def test_other_settings_are_refused_when_resumed(whole: Path, world: World) -> None:
    before = (whole / "samples.jsonl").read_bytes()
    text = run(world, whole, "--resume", "--search", "topk=2", status=2)
    assert "search.topk: was 1, now 2" in text
    assert (whole / "samples.jsonl").read_bytes() == before
    assert not servers_of(world.index)


class RecordingEngine(VllmEngine):
    """The engine, with what went in and out."""

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self.turns: dict[str, list[Sample]] = {}

    async def generate(self, sample: Sample) -> Sample:
        done = await super().generate(sample)
        self.turns.setdefault(sample.question.id, []).append(done)
        return done


def test_a_dead_retriever_stores_nothing_and_the_next_run_goes_on(
    world: World, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    codec = TokenizerCodec(tokenizer)
    model = find_model(str(TINY), None)
    loaded = load_questions(SUITES["qa"].select(["bamboogle"]), world.data, None)
    (benchmark,) = loaded
    questions = [
        replace(q, prompt=published.prompt_of(q.prompt, "short", True, tokenizer))
        for q in benchmark.questions
    ]
    context = context_length(model)
    samples = samples_of(
        [replace(benchmark, questions=questions)],
        lambda prompts: chat.encode(prompts, tokenizer), context, 0, tokenizer,
    )  # fmt: skip

    def searching() -> SearchEnvironment:
        limits = Limits(retries=1, backoff_s=0.01, outage_s=0)
        return SearchEnvironment(settings, strict=True, limits=limits)

    set_environment(cpu=True)
    # vLLM replaces it in the process of a CPU engine; it is put back after the test.
    monkeypatch.setattr(torch, "set_num_threads", torch.set_num_threads)
    # vLLM 0.32 reads the attributes of all loaded modules and fails at llvmlite's, which another
    # engine of this process may have loaded.
    for name in [name for name in sys.modules if name.startswith("llvmlite")]:
        monkeypatch.delitem(sys.modules, name)
    engine = RecordingEngine(model, context, "float32", True)
    out = tmp_path / "again"
    with Store(out) as store:
        with retriever_process.serve(world.index) as url:
            gone = url
        settings = SearchSettings(url=gone, **SETTINGS)
        with pytest.raises(EvalError, match=r"of 6 dialogues failed"):
            asyncio.run(answer(samples, engine, store, 0, searching, codec))
        searchers = {i for i, row in rows(whole).items() if row["dialogue"]["searches"]}
        assert searchers and not searchers & rows(out).keys()
        assert store.failures() == {"bamboogle": len(searchers)}
        with retriever_process.serve(world.index) as url:
            settings = settings.model_copy(update={"url": url})
            left = [sample for sample in samples if sample.question.id in searchers]
            already = len(samples) - len(left)
            asyncio.run(answer(left, engine, store, already, searching, codec))
    engine.close()
    # Other requests in the batch, an interruption: the same dialogues.
    assert {i: stable(row) for i, row in rows(out).items()} == {
        i: stable(row) for i, row in rows(whole).items()
    }
    # Token in, token out: a turn's prompt begins with all that was sampled, as it was sampled.
    followed = 0
    for turns in engine.turns.values():
        for turn, after in itertools.pairwise(turns):
            sampled = (*turn.prompt_ids, *turn.token_ids)
            if len(after.prompt_ids) > len(turn.prompt_ids):  # else the dialogue began again
                assert after.prompt_ids[: len(sampled)] == sampled
                assert len(after.prompt_ids) > len(sampled)
                followed += 1
    assert followed >= len(searchers)


def test_as_typed_after_a_run_with_its_retriever(world: World, tmp_path: Path) -> None:
    """`--suite qa` alone: the run's model and retriever, and the files in data/qa."""
    run_dir = tmp_path / "runs" / "mine"
    shutil.copytree(TINY, run_dir / "checkpoints" / "final", ignore=shutil.ignore_patterns("*.py"))
    shutil.copytree(world.data, tmp_path / "data" / "qa")
    with retriever_process.serve(world.index) as url:
        settings = {
            "train": {"agent_func_path": "domain:search"},
            "sg": {"search": {"url": url}},
        }
        (run_dir / "config.yaml").write_text(json.dumps(settings))
        ran = subprocess.run(
            [sys.executable, "-m", "eval.run", "--suite", "qa"],
            cwd=tmp_path, env={**environment(), "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (out,) = tmp_path.glob("out/qa_*")
    assert len(rows(out)) == QUESTIONS


def test_a_server_holds_the_same_dialogues(world: World, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "served"
    with vllm_server(TINY) as url:
        run(world, out, "--engine", "openai", "--base-url", url)
    assert {i: stable(row) for i, row in rows(out).items()} == {
        i: stable(row) for i, row in rows(whole).items()
    }


def test_a_killed_run_leaves_no_server_and_resumes(
    world: World, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "killed"
    arguments = ("--resume",)
    process = subprocess.Popen(
        command(world, out, *arguments),
        cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    path = out / "samples.jsonl"
    while process.poll() is None and not path.exists():
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    stored = len([line for line in path.read_bytes().split(b"\n") if line])
    deadline = time.monotonic() + 1800
    while servers_of(world.index) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not servers_of(world.index)
    # As if the kill had come in the middle of a write.
    with path.open("ab") as file:
        file.write(b'{"benchmark": "bamboogle", "id"')
    text = run(world, out, *arguments)
    assert f"{QUESTIONS} samples, {stored} there already" in text
    assert {i: stable(row) for i, row in rows(out).items()} == {
        i: stable(row) for i, row in rows(whole).items()
    }
    assert os.listdir(out).count("results.json") == 1
