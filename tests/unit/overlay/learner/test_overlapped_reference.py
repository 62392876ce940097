"""The reference's log-probs computed during the update: the same update, and nothing before it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from sg_rlhf.overlay.cpu import platform
from sg_rlhf.overlay.learner import micro_batches, overlapped_reference
from sg_rlhf.overlay.reporting.errors import NonFiniteError
from tests.unit.overlay.learner.test_old_log_probs import (
    LENGTHS,
    TWO_STEPS,
    Counting,
    TwoSteps,
    made,
    plain,
)
from tests.unit.overlay.learner.test_update import (
    MICRO_BATCH,
    RESPONSES,
    Table,
    arguments,
    one_rank,
    policy_trainer,
    rollout,
)

__all__ = ["one_rank"]


@pytest.mark.parametrize(
    ("overrides", "fits"),
    [
        ([], True),
        (["algo.kl.use_loss=false", "algo.kl.estimator=k1"], False),
        (["algo.kl.init_coef=0"], False),
        (["sg.on_nonfinite=skip"], False),
        (LENGTHS, False),
        (["actor.num_gpus_per_node=2", "ref.num_gpus_per_node=2", "vllm.num_engines=2"], True),
    ],
)
def test_where_nothing_reads_them_before_the_update(overrides: list[str], fits: bool) -> None:
    assert overlapped_reference.can_overlap(arguments("grpo", TWO_STEPS, *overrides)) is fits


def test_not_where_models_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "is_cpu", lambda: False)
    assert not overlapped_reference.can_overlap(arguments("grpo", TWO_STEPS))


def test_the_experience_is_handed_over_before_the_reference_has_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    maker, scored = made(monkeypatch)
    experiences = scored.micro_batches
    assert maker.asked == ["reference"] * 2  # once a step
    assert all(e.base_action_log_probs is None for e in experiences)
    assert scored.pending_reference is not None
    asked = [values for of_step in scored.pending_reference for values in of_step[0]]
    assert [v.shape for v in asked] == [e.action_mask.shape for e in experiences]


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_finds_its_own(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """By step, then by rank, in the order in which the rank trains them."""
    gpus = [f"{name}.num_gpus_per_node={ranks}" for name in ("actor", "ref")]
    args = arguments(
        "grpo", TWO_STEPS, "train.micro_batch_size=2", *gpus, f"vllm.num_engines={ranks}"
    )
    samples = rollout(Table("cpu"))
    for i, sample in enumerate(samples):
        sample.index, sample.prompts = [i], [f"prompt {i}"]
    experiences = micro_batches.training_micro_batches(samples, args, 0, 0)

    def run(method_name: str, **inputs: list[Any]) -> list[Any]:
        """Upstream's, with what it was given as the answer."""
        assert method_name == "forward"
        size = len(inputs["sequences"]) // ranks
        return [inputs["sequences"][r * size : (r + 1) * size] for r in range(ranks)]

    group = SimpleNamespace(async_run_method_batch=run)
    results = overlapped_reference.submit(group, experiences, args)
    assert len(results) == 2
    own = len(experiences) // ranks
    for rank in range(ranks):
        expected = experiences[rank * own : (rank + 1) * own]
        found = [sequences for of_step in results for sequences in of_step[rank]]
        assert all(torch.equal(f, e.sequences) for f, e in zip(found, expected, strict=True))


def updated(monkeypatch: pytest.MonkeyPatch, *, late: bool, spoilt: bool = False) -> Any:
    """The policy after a rollout of two optimizer steps in two epochs, and its status."""
    monkeypatch.setattr(ray, "get", lambda refs: refs)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 0)
    args = arguments("grpo", TWO_STEPS, "train.max_epochs=2")
    actor = Counting()
    trainer = policy_trainer(TwoSteps(args), actor)
    samples = rollout(plain(actor))
    for i, sample in enumerate(samples):
        sample.index, sample.prompts = [i], [f"prompt {i}"]
    experiences = micro_batches.training_micro_batches(samples, args, 0, 0)
    values = [e.base_action_log_probs.clone() for e in experiences]
    if spoilt:
        values[-1][0, 2] = float("nan")  # the first token of a response
    if late:
        half = len(values) // 2
        trainer.reference.set_pending([[values[:half]], [values[half:]]])
    for experience in experiences:
        if late:
            experience.base_action_log_probs = None
        trainer.replay_buffer.append(experience)
    status = trainer.ppo_train(args.algo.kl.init_coef)
    return actor.table.detach(), status, trainer


def test_the_update_is_the_same_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    table, status, trainer = updated(monkeypatch, late=True)
    expected, before, _ = updated(monkeypatch, late=False)
    assert torch.equal(table, expected)
    assert status["sg_optimizer_steps"] == before["sg_optimizer_steps"]
    assert status["sg_optimizer_steps"][0]["kl"] > 0
    assert len(status["sg_optimizer_steps"]) == 4 and RESPONSES > MICRO_BATCH
    # The next rollout's are told anew.
    assert trainer.reference._pending == [] and trainer.reference._fetched == {}


def test_one_that_is_not_finite_stops_before_it_is_trained_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(NonFiniteError, match="1 of .* log-probs of the reference model"):
        updated(monkeypatch, late=True, spoilt=True)
