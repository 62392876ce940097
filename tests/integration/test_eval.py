"""The evaluation with real engines on the CPU: offline, served, killed and resumed."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from sg_rlhf.eval.suites import SUITES
from sg_rlhf.tasks.kk.harnesses import grade_paper
from tests.integration.conftest import ROOT, environment
from tests.unit.eval.puzzle_files import write_puzzle_files

pytestmark = [pytest.mark.integration, pytest.mark.full]

TINY = ROOT / "sg_rlhf" / "tiny" / "kk_tiny"
FILES = ["results.json", "run.json", "samples.jsonl", "table.md"]
#: Small enough that puzzles of 8 people are there too.
LIMIT = 21


def command(module: str, suite: str, out: Path, *arguments: str) -> list[str]:
    return [
        sys.executable, "-m", module, "--suite", suite, "--model", str(TINY), "--out", str(out),
        *arguments,
    ]  # fmt: skip


def run(*arguments: Any, status: int = 0) -> str:
    result = subprocess.run(
        command(*arguments), cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert result.returncode == status, result.stdout + result.stderr
    return result.stdout + result.stderr


def toy(out: Path, *arguments: str, status: int = 0) -> str:
    return run("tests.integration.toy_suite", "toy", out, *arguments, status=status)


def rows(out: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    found = {(row["benchmark"], row["id"], row["sample"]): row for row in lines}
    assert len(found) == len(lines), "a sample is stored twice"
    return found


def results(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


@pytest.fixture(scope="module")
def puzzles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_puzzle_files(tmp_path_factory.mktemp("puzzles") / "kk")


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory, puzzles: Path) -> Path:
    out = tmp_path_factory.mktemp("offline") / "kk"
    text = run("eval.run", "kk", out, "--data-dir", str(puzzles), "--limit", str(LIMIT))
    # The end says where the files are; the start says what the small context cuts.
    assert all(str(out / name) in text for name in ("results.json", "samples.jsonl", "table.md"))
    assert "notice: logic_rl: the model's context of 1024 tokens cuts 21 of 21" in text
    return out


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("toy") / "whole"
    toy(out)
    return out


def test_a_run_writes_its_files(offline: Path) -> None:
    assert sorted(path.name for path in offline.glob("[!.]*")) == FILES
    found = results(offline)
    assert list(found["benchmarks"]) == ["official", "logic_rl", "paper_greedy", "paper_t1"]
    stored = rows(offline)
    assert len(stored) == 4 * LIMIT
    for name, described in found["benchmarks"].items():
        mine = [row for row in stored.values() if row["benchmark"] == name]
        assert described["limited"] and described["n_samples"] == LIMIT
        assert {row["group"] for row in mine} == set("2345678")
        assert len(described["sources"]) == 7
        per_size = [described["scores"][f"accuracy/{size}"]["value"] for size in range(3, 8)]
        assert described["scores"]["accuracy"]["value"] == pytest.approx(sum(per_size) / 5)
        assert all(0 < row["tokens"] <= row["max_tokens"] < 1024 for row in mine)
    # The model was trained on puzzles of 2 and 3 people: it answers, and some answers are right.
    assert any(row["correct"] for row in stored.values())
    assert found["model"]["fingerprint"] and found["begun"]["versions"]["torch"]
    table = (offline / "table.md").read_text()
    assert "Limited run" in table and "*paper*, Table 3" in table


def test_stored_verdicts_are_the_graders(offline: Path) -> None:
    for (name, _, _), row in rows(offline).items():
        if name.startswith("paper"):
            assert grade_paper(row["response"], row["gold"]).correct == row["correct"]


@contextmanager
def vllm_server(model: Path) -> Iterator[str]:
    """The address of a vLLM server of a model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        ["bash", "-c", f"exec env {documented('VLLM_CPU_OMP_THREADS_BIND', port, model)}"],
        cwd=ROOT, env={**environment(), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 1800
        while True:
            assert process.poll() is None and time.monotonic() < deadline, (
                "vllm serve did not start"
            )
            try:
                if httpx.get(f"{address}/health", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        yield f"{address}/v1"
    finally:
        process.terminate()
        process.wait(1800)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with vllm_server(TINY) as url:
        yield url


def documented(start: str, port: str | int, model: Path = TINY) -> str:
    """A command of docs/evaluation.md, for a tiny model, on a free port."""
    text = (ROOT / "docs" / "evaluation.md").read_text().split("## Serving a checkpoint")[1]
    found = re.search(rf"^    {start}.*?(?=\n\n)", text, re.MULTILINE | re.DOTALL)
    assert found is not None and "runs/kk/checkpoints/final" in found[0] and "8001" in found[0]
    command = found[0].replace("runs/kk/checkpoints/final", str(model)).replace("8001", str(port))
    return command.replace(" python ", f" {sys.executable} ").strip()


def test_the_documented_question_is_answered(server: str) -> None:
    port = server.split(":")[2].split("/")[0]
    asked = subprocess.run(
        ["bash", "-c", documented("curl", port)], capture_output=True, text=True, timeout=300
    )
    assert json.loads(asked.stdout)["choices"][0]["message"]["content"], asked.stderr


def test_a_server_gives_the_same_greedy_responses(
    server: str, offline: Path, puzzles: Path, tmp_path: Path
) -> None:
    out = tmp_path / "served"
    only = ("--only", "official,paper_greedy")
    run(
        "eval.run", "kk", out, "--data-dir", str(puzzles), "--limit", str(LIMIT), *only,
        "--engine", "openai", "--base-url", server,
    )  # fmt: skip
    here, there = rows(offline), rows(out)
    assert len(there) == 2 * LIMIT
    for key, row in there.items():
        for field in ("prompt", "response", "tokens", "max_tokens", "finish_reason", "correct"):
            assert row[field] == here[key][field], (key, field)
    other = subprocess.run(
        [*command("eval.run", "kk", tmp_path / "other"), "--engine", "openai",
         "--base-url", server, "--data-dir", str(puzzles), "--model", "gpt-5"],
        cwd=ROOT, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert other.returncode == 2
    assert "--model gpt-5: not served at" in other.stderr and str(TINY) in other.stderr


def stored_in(samples: Path) -> int:
    return samples.read_bytes().count(b"\n") if samples.exists() else 0


def kill_at(out: Path, stored: int) -> int:
    """Start or resume the run, SIGKILL it once so many samples are stored; returns how many."""
    path = out / "samples.jsonl"
    process = subprocess.Popen(
        command("tests.integration.toy_suite", "toy", out, "--resume"),
        cwd=ROOT, env={**environment(), "TOY_HOLDS_AT": f"{stored} {path}"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while process.poll() is None:
        if stored_in(path) >= stored:
            process.kill()
        time.sleep(0.002)
    assert process.returncode == -9, "the run ended before it could be killed"
    return stored_in(path)


def test_killed_three_times_and_resumed_it_is_the_uninterrupted_run(
    uninterrupted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "killed"
    whole = rows(uninterrupted)
    total = 24 * (4 + 2 + 1)
    assert len(whole) == total
    before = 0
    for stored in sorted(random.Random(0).sample(range(1, total - 40), 3)):
        now = kill_at(out, max(stored, before + 1))
        assert before < now < total
        before = now
        # As if the kill had come in the middle of a write.
        with (out / "samples.jsonl").open("ab") as file:
            file.write(b'{"benchmark": "sampled", "id": "toy')
    toy(out, "--resume")
    assert rows(out) == whole
    assert results(out)["benchmarks"] == results(uninterrupted)["benchmarks"]


def test_sampling_depends_on_sample_and_seed(uninterrupted: Path) -> None:
    found = rows(uninterrupted)
    ids = {key[1] for key in found}
    distinct = [len({found["sampled", i, n]["response"] for n in range(4)}) for i in ids]
    assert sum(distinct) / len(distinct) > 2
    scores = results(uninterrupted)["benchmarks"]["sampled"]["scores"]
    rates = {i: sum(found["sampled", i, n]["correct"] for n in range(4)) for i in ids}
    assert scores["avg@4"]["value"] == pytest.approx(sum(rates.values()) / 4 / 24)
    assert scores["pass@4"]["value"] == pytest.approx(sum(r > 0 for r in rates.values()) / 24)
    assert scores["avg@4"]["value"] < scores["pass@2"]["value"] < scores["pass@4"]["value"]


def test_a_finished_run_resumes_without_an_engine_and_refuses_changes(
    uninterrupted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "again"
    shutil.copytree(uninterrupted, out)
    before = (out / "samples.jsonl").read_bytes()
    assert "168 samples, 168 there already" in toy(out, "--resume")
    assert (out / "samples.jsonl").read_bytes() == before
    assert "seed: was 0, now 1" in toy(out, "--resume", "--seed", "1", status=2)
    changed = tmp_path / "model"
    shutil.copytree(TINY, changed)
    os.utime(changed / "model.safetensors", (0, 0))
    weights = bytearray((changed / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (changed / "model.safetensors").write_bytes(weights)
    text = toy(out, "--resume", "--model", str(changed), status=2)
    assert "model.fingerprint: was" in text
    assert (out / "samples.jsonl").read_bytes() == before


def test_adapters_are_merged_and_evaluated(tmp_path: Path) -> None:
    """What training with `ds.lora.rank` leaves."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "final"
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    adapted.save_pretrained(folder)
    adapted.config.to_json_file(folder / "config.json")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    small = ("--only", "greedy", "--limit", "1", "--model")
    said = toy(tmp_path / "out", *small, str(folder))
    assert "training moved the adapted weights by 0.00e+00" in said
    toy(tmp_path / "merged", *small, f"{folder}-merged-float32")
    assert rows(tmp_path / "out") == rows(tmp_path / "merged")


def lm_eval(task: str, folder: Path, **variables: str) -> list[dict[str, Any]]:
    """The samples that lm-evaluation-harness logs of 8 questions to the tiny model."""
    result = subprocess.run(
        [
            sys.executable, "-m", "lm_eval", "run",
            "--include_path", "sg_rlhf/eval/lm_eval_tasks", "--tasks", task,
            "--model", "hf", "--model_args", f"pretrained={TINY},dtype=float32",
            "--device", "cpu", "--batch_size", "8", "--limit", "8",
            "--gen_kwargs", "max_gen_toks=48", "--log_samples", "--output_path", str(folder),
        ],
        cwd=ROOT, env={**environment(), **variables}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    (logged,) = folder.rglob(f"samples_{task}_*.jsonl")
    samples = [json.loads(line) for line in logged.read_text().splitlines()]
    assert len(samples) == 8
    return samples


def test_lm_eval_asks_and_grades_the_same(puzzles: Path, tmp_path: Path) -> None:
    for sample in lm_eval("sg_paper_t1", tmp_path, SG_EVAL_DATA=str(puzzles)):
        (responses,) = sample["resps"]
        assert sample["arguments"]["gen_args_0"]["arg_0"] == sample["doc"]["prompt"]
        verdicts = [grade_paper(text, sample["doc"]["gold"]).correct for text in responses]
        assert sample["score"] == sum(verdicts) / len(verdicts)


def test_lm_eval_writes_messages_with_the_models_template(tmp_path: Path) -> None:
    questions, _ = SUITES["arithmetic"].select(["sums"])[0].load(None)
    samples = lm_eval("sg_sums", tmp_path)
    for sample, question in zip(samples, questions, strict=False):
        asked = sample["arguments"]["gen_args_0"]["arg_0"]
        assert asked.endswith(
            f"<|im_start|>user\n{question.messages[-1]['content']}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        assert asked.count("<|im_start|>assistant") == 3
        assert len(sample["resps"][0]) == 4
