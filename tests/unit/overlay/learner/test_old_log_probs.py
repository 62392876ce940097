"""Old log-probs from the update's own pass: the same update as with upstream's pass before it."""

from __future__ import annotations

import gc
import math
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from transformers import GPT2Config, LlamaConfig, Qwen2Config

from sg_rlhf.overlay.learner import old_log_probs, overlapped_reference
from sg_rlhf.overlay.learner.experience_maker import ExperienceMaker, ScoredRollout
from sg_rlhf.overlay.learner.old_log_probs import has_train_time_noise
from sg_rlhf.overlay.learner.update import SGActorPPOTrainer
from sg_rlhf.overlay.reporting.errors import NonFiniteError
from sg_rlhf.overlay.reporting.timing import PhaseTimer
from tests.unit.overlay.learner.test_update import (
    ALGORITHMS,
    MICRO_BATCH,
    RESPONSES,
    Strategy,
    Table,
    arguments,
    one_rank,
    policy_trainer,
    rollout,
)

__all__ = ["one_rank"]

#: Algorithms that read no old log-probs before the update.
READERS = ("lopti", "ar_lopti", "grpo_sg_normalized", "stare")
WITHOUT_A_PASS = [name for name in ALGORITHMS if name not in READERS]
#: Two optimizer steps a rollout: eight responses in steps of four.
TWO_STEPS = f"train.batch_size={RESPONSES // 2}"
LENGTHS = ["train.dynamic_batch_enable=true", "train.max_tokens_per_gpu=40"]


class Counting(Table):
    """A policy that notes its passes: (training mode, samples)."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.passes: list[tuple[bool, int]] = []

    def forward(self, sequences: Any, action_mask: Any, **more: Any) -> Any:
        self.passes.append((self.training, len(sequences)))
        found = super().forward(sequences, action_mask, **more)
        return found if more.get("return_output") else found[0]


def plain(actor: Counting) -> Table:
    """The same policy, which counts nothing."""
    found = Table("cpu")
    found.table = actor.table
    return found


class TwoSteps(Strategy):
    """Of as many optimizer steps as the recipe says."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        steps = RESPONSES // args.train.batch_size
        if not args.train.dynamic_batch_enable:
            self.accumulated_gradient = RESPONSES // MICRO_BATCH // steps


def trained(args: Any, *, skip: bool, twist: Any = None) -> tuple[Any, Counting, dict[str, Any]]:
    """The trainer, its policy and its status after two rollouts of two optimizer steps."""
    strategy, actor = TwoSteps(args), Counting()
    trainer = policy_trainer(strategy, actor)
    status: dict[str, Any] = {}
    for _ in range(2):
        for experience in rollout(plain(actor)):
            with torch.no_grad():  # upstream's pass
                old = actor(experience.sequences, experience.action_mask)
            experience.action_log_probs = None if skip else old
            experience.prompts = [f"prompt of {experience.sequences.shape[1]} tokens"]
            trainer.replay_buffer.append(experience)
        actor.passes.clear()
        if twist:
            twist(actor)
        status = trainer.ppo_train(args.algo.kl.init_coef)
        trainer.replay_buffer.clear()
    return trainer, actor, status


@pytest.mark.parametrize("epochs", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("batches", [[], LENGTHS], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", WITHOUT_A_PASS)
def test_the_update_is_the_same_bit_for_bit(name: str, batches: list[str], epochs: int) -> None:
    args = arguments(name, TWO_STEPS, f"train.max_epochs={epochs}", *batches)
    assert old_log_probs.rule_of(args).of == "later"
    _, expected, rows = trained(args, skip=False)
    _, found, skipped = trained(args, skip=True)
    assert torch.equal(found.table, expected.table)
    assert not torch.equal(found.table, Table("cpu").table)
    for row, other in zip(skipped["sg_optimizer_steps"], rows["sg_optimizer_steps"], strict=True):
        assert row == other


def test_the_samples_of_the_first_step_are_computed_once() -> None:
    args = arguments("grpo_sg", TWO_STEPS)
    _, actor, status = trained(args, skip=True)
    evaluated = [samples for training, samples in actor.passes if not training]
    learned = [samples for training, samples in actor.passes if training]
    assert sum(evaluated) == RESPONSES // 2 and sum(learned) == RESPONSES
    assert actor.passes[: len(evaluated)] == [(False, n) for n in evaluated]  # before the update
    assert actor.training and status["timing/update_old_log_probs"] > 0
    _, whole, without = trained(arguments("grpo_sg"), skip=True)
    assert all(training for training, _ in whole.passes)
    assert without["timing/update_old_log_probs"] == 0
    assert without["sg_optimizer_steps"][0]["ppo_kl"] == 0


def test_the_run_log_gets_those_of_the_policy_that_sampled() -> None:
    args = arguments("grpo_sg", TWO_STEPS, "train.max_epochs=2")
    before: list[torch.Tensor] = []
    trainer, _, _ = trained(args, skip=True, twist=lambda a: before.append(a.table.clone()))
    reference = Table("cpu")
    with torch.no_grad():
        reference.table.copy_(before[-1])
        for index, experience in enumerate(rollout(reference)):
            expected, _ = reference(experience.sequences, experience.action_mask)
            mask = experience.action_mask
            found, other = trainer.token_record.lookup([index, RESPONSES])
            assert found is not None and found["log_probs"] == expected[mask].tolist()
            assert len(found["update_log_probs"]) == int(mask.sum()) and other is None


def test_nothing_else_of_the_samples_stays_until_the_next_update() -> None:
    """Images above all, of which a rollout has gigabytes."""
    advantages: list[Any] = []

    class Buffer(list[Any]):
        def clear(self) -> None:
            advantages.extend(weakref.ref(item.advantages) for item in self)
            super().clear()

    made = SGActorPPOTrainer.__init__

    def with_buffer(self: SGActorPPOTrainer, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.replay_buffer.items = Buffer()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SGActorPPOTrainer, "__init__", with_buffer)
        trainer, _, _ = trained(arguments("grpo_sg", TWO_STEPS), skip=True)
    gc.collect()
    assert len(advantages) == 2 * RESPONSES and not any(found() is not None for found in advantages)
    assert trainer.token_record.lookup([RESPONSES]) == [None]


@pytest.mark.parametrize(
    ("name", "place"), [*((name, 0) for name in WITHOUT_A_PASS), ("grpo", RESPONSES - 1)]
)
def test_a_log_prob_that_is_not_finite_stops_before_the_step(name: str, place: int) -> None:
    """In the update's own pass, and in the one before it; an advantage of 0 does not hide it."""
    args = arguments(name, TWO_STEPS)
    actor = Counting()
    trainer = policy_trainer(TwoSteps(args), actor)
    for i, experience in enumerate(rollout(plain(actor))):
        experience.action_log_probs = None
        experience.prompts = [f"prompt {i}"]
        experience.advantages = torch.zeros_like(experience.advantages)
        if i == place:
            # One transition that the other samples do not have.
            experience.sequences[0, -2:] = torch.tensor([10, 10])
        else:
            experience.sequences[experience.sequences == 10] = 9
        trainer.replay_buffer.append(experience)
    with torch.no_grad():
        actor.table[10, 10] = -torch.inf
    before = actor.table.clone()
    with pytest.raises(NonFiniteError, match=rf"prompt: 'prompt {place}'.*nothing was trained on"):
        trainer.ppo_train(0.0)
    assert torch.equal(actor.table, before)


def test_a_log_prob_that_is_not_finite_leaves_its_sample_out() -> None:
    args = arguments("grpo", TWO_STEPS, "sg.on_nonfinite=skip")
    args.rollout.n_samples_per_prompt = 4
    actor = Counting()
    trainer = policy_trainer(TwoSteps(args), actor)
    last = RESPONSES - 1
    for i, experience in enumerate(rollout(plain(actor))):
        experience.action_log_probs = None
        experience.prompts = [f"prompt {i}"]
        if i == last:
            experience.sequences[0, -2:] = torch.tensor([10, 10])
        else:
            experience.sequences[experience.sequences == 10] = 9
        trainer.replay_buffer.append(experience)
    with torch.no_grad():
        actor.table[10, 10] = -torch.inf
    assert trainer.old_log_probs.compute_missing()
    masked = [not bool(item.action_mask.any()) for item in trainer.replay_buffer.items]
    assert masked == [False] * last + [True]
    assert trainer.skips is not None
    (row,) = trainer.skips.pop_rows()["sg_nonfinite"]
    assert row["left_out"] == 1 and row["cause"] == "log-probs of the policy"
    assert row["prompts"] == [last // 4]
    assert trainer.skips.pop_rows() == {"sg_nonfinite": []}


def test_a_sample_that_is_left_out_has_no_part_in_the_update() -> None:
    """Nor has its whole micro-batch: the same step whatever is in it, and figures without it."""
    found = []
    for other in (False, True):
        args = arguments("grpo_sg", "sg.on_nonfinite=skip")
        actor = Counting()
        trainer = policy_trainer(TwoSteps(args), actor)
        for i, experience in enumerate(rollout(plain(actor))):
            if i in (2, 3, 5):
                experience.action_mask = torch.zeros_like(experience.action_mask)
                if other:
                    experience.sequences = (experience.sequences + 1) % 11
                    experience.advantages = -3 * experience.advantages
            trainer.replay_buffer.append(experience)
        status = trainer.ppo_train(args.algo.kl.init_coef)
        (row,) = status["sg_optimizer_steps"]
        found.append((actor.table.detach().clone(), row))
        assert all(math.isfinite(v) for v in status.values() if isinstance(v, float))
    (table, row), (same, other_row) = found
    assert torch.equal(table, same) and not torch.equal(table, Table("cpu").table)
    assert row == other_row and row["micro_batches"] == RESPONSES // MICRO_BATCH


def test_a_policy_that_drops_out_has_a_pass_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its training pass draws at random, so its log-probs are not those that sampled."""
    made = Counting.__init__

    def with_dropout(self: Counting) -> None:
        made(self)
        self.dropout = torch.nn.Dropout(0.1)

    monkeypatch.setattr(Counting, "__init__", with_dropout)
    _, actor, _ = trained(arguments("grpo_sg", TWO_STEPS), skip=True)
    assert sum(samples for training, samples in actor.passes if not training) == RESPONSES


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"attention_dropout": 0.0, "classifier_dropout": None}, False),
        ({"attention_dropout": 0.1}, True),
        ({"text_config": {"resid_pdrop": 0.1}}, True),
        ({"router_jitter_noise": 0.01}, True),
        ({"hidden_size": 64.0, "use_dropout": True}, False),
        (Qwen2Config().to_dict(), False),
        (LlamaConfig().to_dict(), False),
        (GPT2Config().to_dict(), True),
    ],
)
def test_a_models_configuration_tells_whether_it_draws(
    settings: dict[str, Any], found: bool
) -> None:
    actor = Table("cpu")
    config = SimpleNamespace(to_dict=lambda: settings)
    actor.model.module = SimpleNamespace(config=config)
    assert has_train_time_noise(actor) is found


class Maker(ExperienceMaker):
    """Over models that answer at once."""

    def __init__(self, args: Any) -> None:
        self.asked: list[str] = []
        kl: Any = SimpleNamespace(value=0.1)
        policy, reference = self.group("policy"), self.group("reference")
        super().__init__(args, policy, reference, None, kl, 0, PhaseTimer())

    def group(self, name: str) -> Any:
        def run(method_name: str, **kwargs: Any) -> list[Any]:
            if method_name != "forward":
                return []
            self.asked.append(name)
            level = -1.0 if name == "policy" else -2.0
            return [[torch.full(mask.shape, level) for mask in kwargs["action_mask"]]]

        return SimpleNamespace(async_run_method_batch=run, async_run_method=run)


def made(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> tuple[Maker, ScoredRollout]:
    monkeypatch.setattr(ray, "get", lambda refs: refs)
    monkeypatch.setattr(ray, "put", lambda value: value)
    args = arguments("grpo", "algo.advantage.estimator=reinforce", TWO_STEPS, *overrides)
    maker = Maker(args)
    samples = rollout(Table("cpu"))
    for i, sample in enumerate(samples):
        sample.rewards = sample.info["reward"] = torch.tensor([float(i)])
        sample.prompts, sample.labels = [f"prompt {i}"], [""]
        sample.action_log_probs = sample.base_action_log_probs = None
        sample.advantages = sample.rollout_log_probs = None
    return maker, maker.score(samples, 0)


def test_the_policys_pass_is_left_out_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else the reference's pass would be the update's business, too.
    monkeypatch.setattr(overlapped_reference, "can_overlap", lambda _args: False)
    maker, scored = made(monkeypatch)
    experiences = scored.micro_batches
    assert maker.asked == ["reference"]
    everywhere = old_log_probs.OldLogProbRule("all", 1.0, "as upstream")
    monkeypatch.setattr(old_log_probs, "rule_of", lambda _args: everywhere)
    whole = made(monkeypatch)[1].micro_batches
    assert len(experiences) == len(whole)
    for found, expected in zip(experiences, whole, strict=True):
        assert found.action_log_probs is None and expected.action_log_probs is not None
        assert torch.equal(found.advantages, expected.advantages)
        assert torch.equal(found.base_action_log_probs, expected.base_action_log_probs)
        assert found.info.keys() == expected.info.keys()
        for key in found.info:
            assert torch.equal(found.info[key], expected.info[key]), key
    row = maker._clock.pop_row()
    assert row["timing/reference_log_probs"] > 0


@pytest.mark.parametrize("damaged", ["policy", "reference"])
def test_a_nan_before_the_response_reaches_neither_the_kl_in_the_reward_nor_the_advantages(
    monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:
    in_reward = ["algo.kl.use_loss=false", "algo.kl.estimator=k3"]
    _, expected = made(monkeypatch, *in_reward)

    def group(self: Maker, name: str) -> Any:
        def run(method_name: str, **kwargs: Any) -> list[Any]:
            if method_name != "forward":
                return []
            level = -1.0 if name == "policy" else -2.0
            of_masked = torch.nan if name == damaged else level
            return [[torch.where(m.bool(), level, of_masked) for m in kwargs["action_mask"]]]

        return SimpleNamespace(async_run_method_batch=run, async_run_method=run)

    monkeypatch.setattr(Maker, "group", group)
    _, found = made(monkeypatch, *in_reward)
    for ours, whole in zip(found.micro_batches, expected.micro_batches, strict=True):
        mask = ours.action_mask.bool()
        assert torch.equal(ours.advantages[mask], whole.advantages[mask])
        for key in ("kl", "logprobs_diff", "return"):
            assert bool(ours.info[key].isfinite().all()), key
            assert torch.equal(ours.info[key], whole.info[key]), key


def test_the_kl_in_the_reward_has_its_log_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    maker, scored = made(monkeypatch, "algo.kl.use_loss=false", "algo.kl.estimator=k1")
    assert maker.asked == ["policy", "reference"]
    for experience in scored.micro_batches:
        assert torch.equal(experience.info["kl"], torch.ones(len(experience.sequences)))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_noise_is_found_in_a_real_models_configuration(dropout: float) -> None:
    """Whose labels have numbers for keys."""
    actor = torch.nn.Module()
    actor.model = torch.nn.Module()
    actor.model.config = Qwen2Config(attention_dropout=dropout, id2label={0: "a", 1: "b"})
    assert has_train_time_noise(actor) is bool(dropout)
