"""The gradients of the token weights on a pretrained model, on a small one with random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lab.experiments.smollm2_135m import weighted_gradients as script
from lab.measure.fixed_batch import BatchRow, FixedBatch
from lab.measure.minibatch_gradients import gradients
from lab.measure.sharpness import surrogate_of
from sg_rlhf.config import load_config

pytestmark = pytest.mark.filterwarnings("ignore:dead zone")


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=12, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
        initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def batch() -> FixedBatch:
    """Two prompts of other lengths with 8 responses each; the second one has no signal."""
    draw = torch.Generator().manual_seed(0)
    rows = [
        BatchRow(prompt, tuple(torch.randint(12, (2 + k % 3,), generator=draw).tolist()), a, 0.0)
        for prompt, advantages in (((1, 2, 3), [1.5, -0.5] * 4), ((4, 5), [0.0] * 8))
        for k, a in enumerate(advantages)
    ]
    return FixedBatch(tuple(rows), 1.0, "", "")


def test_gradients_are_those_of_the_measurement_that_reads_each_prompt_again(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "RUNS", tmp_path)
    monkeypatch.setattr(script, "BATCHES", 1)
    rows = batch()
    script.of_batch("x", 0, model, rows)
    losses = {
        name: surrogate_of(load_config([f"configs/algorithms/{recipe}.yaml"], keys), [])
        for name, (recipe, keys) in script.ALGORITHMS.items()
    }
    for name, expected in gradients(model, rows, losses, 1000).items():
        found = torch.from_numpy(np.load(tmp_path / f"x_0_{name}.npy"))
        # The measurement leaves out the KL term of TR-GRPO, which is below .0004 for a token.
        tolerance = 2e-3 if name == "tr_grpo" else 2e-4
        error = (found - rows.tokens * expected).norm() / found.norm()
        assert error < tolerance, name
        assert (error > 1e-5) or name != "tr_grpo"
    p, entropy, advantage = np.load(tmp_path / "x_0.npy")
    assert len(p) == rows.tokens and (p > 0).all() and (entropy < np.log(12) + 1e-5).all()
    assert (advantage != 0).sum() == sum(len(row.response) for row in rows.rows[:8])


def test_cosines_of_the_sum_and_of_each_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "RUNS", tmp_path)
    monkeypatch.setattr(script, "BATCHES", 2)
    for number, (ours, grpo) in enumerate((([3.0, 0.0], [1.0, 0.0]), ([0.0, 3.0], [1.0, 0.0]))):
        np.save(tmp_path / f"x_{number}_a.npy", np.array(ours, dtype=np.float32))
        np.save(tmp_path / f"x_{number}_grpo.npy", np.array(grpo, dtype=np.float32))
    found = script.compared("x", "a")
    assert found["cosine"]["batches"] == [1.0, 0.0]
    assert found["cosine"]["all"] == pytest.approx(0.5**0.5)
    assert found["norm_ratio"]["batches"] == [3.0, 3.0]
    assert found["norm_ratio"]["all"] == pytest.approx(18**0.5 / 2)
