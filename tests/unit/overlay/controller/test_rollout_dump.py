"""A dumped rollout trains as the rollout itself did (`sg-rlhf train --replay`: test_pipeline)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from sg_rlhf.overlay.controller import rollout_dump
from sg_rlhf.overlay.learner import micro_batches
from tests.unit.overlay.learner.test_overlapped_reference import (
    TWO_STEPS,
    Counting,
    TwoSteps,
    arguments,
    one_rank,
    plain,
    policy_trainer,
    rollout,
)

__all__ = ["one_rank"]  # a fixture


def experiences_of(args: Any, actor: Any) -> list[Any]:
    samples = rollout(plain(actor))
    for i, sample in enumerate(samples):
        sample.index, sample.prompts = [i], [f"prompt {i}"]
    return micro_batches.training_micro_batches(samples, args, 0, 0)


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_replay_is_the_update_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlapped: bool
) -> None:
    monkeypatch.setattr(ray, "get", lambda values: values)
    args = arguments("grpo", TWO_STEPS)
    actor, other = Counting(), Counting()
    experiences = experiences_of(args, actor)
    dumped, reference = experiences_of(args, actor), None
    if overlapped:
        values = [e.base_action_log_probs for e in dumped]
        half = len(values) // 2
        reference = [[values[:half]], [values[half:]]]
        for e in dumped:
            e.base_action_log_probs = None
    file = rollout_dump.dump(tmp_path, 7, dumped, 1, reference)
    assert file == tmp_path / "rollouts" / "step_7.pt"
    trainer = policy_trainer(TwoSteps(args), actor)
    for experience in experiences:
        trainer.replay_buffer.append(experience)
    expected = trainer.ppo_train(args.algo.kl.init_coef)
    content = torch.load(file, weights_only=True)
    assert (content["step"], content["ranks"]) == (7, 1)
    trainer = policy_trainer(TwoSteps(args), other)
    for experience in rollout_dump.experiences(content["experiences"]):
        trainer.replay_buffer.append(experience)
    replayed = trainer.ppo_train(args.algo.kl.init_coef)
    assert torch.equal(other.table, actor.table)
    assert replayed["sg_optimizer_steps"] == expected["sg_optimizer_steps"]
