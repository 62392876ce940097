"""A mixture of experts goes through the whole pipeline, in ten rollouts."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from sg_rlhf.run_dir import jsonl_log
from sg_rlhf.run_dir.final_model import final_checkpoint
from tests.integration.conftest import ROOT, Data, train

pytestmark = pytest.mark.full

ROLLOUTS = 10


def experts_folder(folder: Path) -> Path:
    """A Qwen3-MoE with random weights and the tokenizer of the tiny model."""
    tiny = ROOT / "sg_rlhf" / "tiny" / "kk_tiny"
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors", "manifest.json"))
    config = Qwen3MoeConfig(
        **json.loads((tiny / "config.json").read_text()) | {"model_type": "qwen3_moe"},
        head_dim=32, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_ten_rollouts(tmp_path: Path, data: Data) -> None:
    model, run_dir = experts_folder(tmp_path / "model"), tmp_path / "run"
    done = train(
        run_dir, data, f"actor.model_name_or_path={model}", "eval.steps=-1", "ckpt.save_steps=-1",
        f"data.max_samples={2 * ROLLOUTS}", "rollout.batch_size=4", "train.num_episodes=2",
        f"reward.remote_url={ROOT / 'tests' / 'gpu' / 'reward_by_hash.py'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = jsonl_log.read(run_dir / jsonl_log.METRICS)
    assert len(rows) == ROLLOUTS
    assert all(0 < row["sg/mismatch_max"] < 1e-3 for row in rows)
    norms = [row["actor_grad_norm"] for row in jsonl_log.read(run_dir / jsonl_log.OPTIMIZER_STEPS)]
    assert all(math.isfinite(norm) and norm > 0 for norm in norms)
    before, after = tensors(model), tensors(final_checkpoint(run_dir))
    assert set(before) == set(after) and sum("experts" in name for name in before) > 20
    assert [name for name in before if torch.equal(before[name].float(), after[name])] == []


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
