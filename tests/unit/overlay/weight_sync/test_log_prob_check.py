"""The trainer's side of the sync check: log-probs of fixed sequences, several at a time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from openrlhf.models import Actor

from sg_rlhf.overlay.learner.actor import SGPolicyModelActor
from tests.unit.overlay.model.test_log_prob_head import VOCABULARY, model_folder

LENGTHS = (3, 12, 7, 2, 12)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_sequences_of_all_lengths_have_the_models_own_log_probs_at_temperature_1(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    folder = model_folder(tmp_path, "qwen2", tie_word_embeddings=True)
    rank = SGPolicyModelActor.__new__(SGPolicyModelActor)
    rank.actor = Actor(folder, attn_implementation="sdpa", temperature=0.7).float()
    rank.strategy = SimpleNamespace(
        args=SimpleNamespace(rollout=SimpleNamespace(micro_batch_size=size)), ring_attn_group=None
    )
    sequences = [torch.randint(0, VOCABULARY, (n,)).tolist() for n in LENGTHS]
    found = rank.prompt_log_probs(sequences)
    for tokens, log_probs in zip(sequences, found, strict=True):
        ids = torch.tensor([tokens])
        expected = torch.log_softmax(rank.actor.model(ids).logits[0, :-1].float(), dim=-1)
        expected = expected.gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(log_probs), expected, rtol=0, atol=1e-5)
    assert rank.actor.temperature == 0.7 and rank.actor.training
