"""What of a rollout is left out because a reward or a log-prob is not finite, and what stays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sg_rlhf.config import ConfigError
from sg_rlhf.overlay.driver.arguments import UsageError
from sg_rlhf.overlay.learner import micro_batches, nonfinite
from sg_rlhf.overlay.reporting.errors import RewardError
from sg_rlhf.overlay.rollout.engine import SGRolloutActor
from sg_rlhf.overlay.rollout.generator import SamplesGenerator
from sg_rlhf.overlay.rollout.samples import Response, Sampling
from tests.unit.overlay.learner.test_micro_batches import (
    DYNAMIC,
    GROUP,
    SAMPLES,
    Maker,
    arguments,
    ranks_of,
    rollout,
    without_a_cluster,
)

__all__ = ["without_a_cluster"]  # a fixture for every test here

SKIP = "sg.on_nonfinite=skip"
BAD = 5  # its group is 4 to 7
MATES = range(4, 8)
#: What is left of the advantages must be what a rollout without that group has.
ESTIMATORS = ["group_norm", "dr_grpo", "rloo", "reinforce_baseline"]


class Faulty(Maker):
    """Whose models give log-probs that are not finite for one sample."""

    bad_log_probs = ""

    def add_scores(self, samples_list: list[Any]) -> None:
        super().add_scores(samples_list)
        for sample in samples_list:
            sample.rollout_log_probs = sample.action_log_probs - 0.01
            sample.info["kl"] = sample.kl.sum(-1)
            for row, first in enumerate(sample.sequences[:, 0].tolist()):
                if self.bad_log_probs and first == BAD:
                    # Behind the prompt: what stands before is nobody's business.
                    getattr(sample, self.bad_log_probs)[row, 3] = -torch.inf
                    sample.info["kl"][row] = torch.nan


def with_bad_reward(value: float) -> list[Any]:
    samples = rollout()
    samples[BAD].rewards = torch.tensor([value])
    samples[BAD].info["reward"] = torch.tensor([value])
    return samples


def by_place(maker: Maker, samples: list[Any]) -> tuple[dict[int, Any], list[dict[str, Any]]]:
    """A rollout as its maker's arguments have it trained: the samples of all ranks as their buffers
    have them, without padding; and the rows about masked samples.
    """
    scored = maker.score(samples, 0)
    ranks = ranks_of(maker.args, scored.micro_batches)
    items = [item for rank in ranks for item in rank.buffer.items]
    return {int(item.sequences[0]): item for item in items}, scored.masked_rows


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_takes_its_group_along(
    estimator: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(SKIP, f"algo.advantage.estimator={estimator}")
    found, (row,) = by_place(Maker(args), with_bad_reward(value))
    assert (row["cause"], row["left_out"], row["optimizer_step"]) == ("reward", GROUP, None)
    assert row["prompts"] == [BAD // GROUP] and row["message"].startswith("1 responses")
    assert len(found) == SAMPLES
    # Without the group in the rollout at all, in a run that stops at such a value.
    rest = [sample for place, sample in enumerate(rollout()) if place not in MATES]
    monkeypatch.setattr(micro_batches, "balances_micro_batches", lambda _args: False)
    monkeypatch.setattr(micro_batches, "training_micro_batches", lambda given, *_: given)
    monkeypatch.setattr(
        micro_batches, "scoring_micro_batches", lambda given, _: [[i] for i in range(len(given))]
    )
    fewer = arguments(f"algo.advantage.estimator={estimator}")
    expected = {
        int(sequence[0]): (advantages, mask)
        for e in Maker(fewer).score(rest, 0).micro_batches
        for sequence, advantages, mask in zip(e.sequences, e.advantages, e.action_mask, strict=True)
    }
    for place, item in found.items():
        assert bool(item.advantages.isfinite().all()) and bool(item.rewards.isfinite())
        assert int(item.info[micro_batches.SAMPLE_INDEX]) == place
        if place in MATES:
            assert not item.action_mask.any()
        else:
            advantages, mask = expected[place]
            length = int(mask.nonzero()[-1]) + 1
            assert torch.equal(item.action_mask, mask[:length])
            kept = item.action_mask.bool()
            torch.testing.assert_close(item.advantages[kept], advantages[:length][kept])


def test_the_rollouts_mean_reward_is_that_of_the_finite_ones() -> None:
    maker = Maker(arguments(SKIP))
    experiences = maker.score(with_bad_reward(float("nan")), 0).micro_batches
    rewards = torch.cat([e.info["reward"] for e in experiences])
    others = [float(s.rewards) for place, s in enumerate(rollout()) if place != BAD]
    assert float(rewards.mean()) == pytest.approx(sum(others) / len(others))


@pytest.mark.parametrize("batches", [[], DYNAMIC])
@pytest.mark.parametrize(
    ("field", "cause"),
    [
        ("action_log_probs", "log-probs of the policy"),
        ("base_action_log_probs", "log-probs of the reference model"),
        ("rollout_log_probs", "log-probs of the rollout engine"),
        ("kl", "the KL to the reference model"),
    ],
)
def test_log_probs_leave_out_their_response_alone(
    field: str, cause: str, batches: list[str]
) -> None:
    maker = Faulty(arguments(SKIP, *batches))
    maker.bad_log_probs = field
    found, (row,) = by_place(maker, rollout())
    expected, _ = by_place(Faulty(arguments(*batches)), rollout())
    assert (row["cause"], row["left_out"]) == (cause, 1)
    assert row["prompts"] == [BAD // GROUP]
    for place, item in found.items():
        for name in ("action_log_probs", "base_action_log_probs", "rollout_log_probs"):
            assert bool(getattr(item, name).isfinite().all())
        assert bool(item.info["kl"].isfinite())
        if place == BAD:
            assert not item.action_mask.any()
        else:
            # Its reward is still one of the group's.
            assert torch.equal(item.advantages, expected[place].advantages)
            assert torch.equal(item.action_mask, expected[place].action_mask)


def test_a_sample_is_told_once_and_a_finite_rollout_not_at_all() -> None:
    maker = Faulty(arguments(SKIP))
    maker.bad_log_probs = "action_log_probs"
    scored = maker.score(with_bad_reward(float("nan")), 0)
    assert [row["cause"] for row in scored.masked_rows] == ["reward"]
    maker.bad_log_probs = ""
    assert maker.score(rollout(), 1).masked_rows == []
    status: dict[str, Any] = {nonfinite.ROWS: [{"optimizer_step": 3, "in_a_row": 1}]}
    rows = nonfinite.collect_rows(status, [{"optimizer_step": None, "left_out": GROUP}])
    assert len(rows) == 2 and len(scored.micro_batches) > 0
    assert status == {nonfinite.SKIPPED_STEPS: 1.0, nonfinite.MASKED_SAMPLES: float(GROUP)}


def test_without_a_finite_reward_nothing_is_left() -> None:
    samples = rollout()
    for sample in samples:
        sample.rewards = sample.info["reward"] = torch.tensor([float("nan")])
    maker = Maker(arguments(SKIP))
    scored = maker.score(samples, 0)
    assert not any(e.action_mask.any() for e in scored.micro_batches)
    assert scored.masked_rows[0]["left_out"] == SAMPLES
    assert scored.masked_rows[0]["prompts"] == list(range(SAMPLES // GROUP))
    assert all(bool(e.advantages.isfinite().all()) for e in scored.micro_batches)


def test_stopping_leaves_the_samples_as_they_are() -> None:
    scored = Maker(arguments()).score(rollout(), 0)
    assert not scored.masked_rows
    assert all(bool(e.action_mask.any(-1).all()) for e in scored.micro_batches)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("ds.zero_stage=0", "ds.zero_stage=0; use 1, 2 or 3"),
        (
            "ds.zero_stage=1 ds.grad_accum_dtype=fp32 ds.adam_offload=false",
            "ds.zero_stage=1, ds.grad_accum_dtype=fp32; use ds.zero_stage=2",
        ),
        ("actor.optim=muon", "actor.optim=muon"),
    ],
)
def test_what_skipping_needs_is_one_line(overrides: str, words: str) -> None:
    with pytest.raises(UsageError, match=rf"^sg.on_nonfinite=skip: not with {words}"):
        arguments(SKIP, *overrides.split())
    arguments(*overrides.split())
    arguments(SKIP, "ds.zero_stage=1")


def test_a_value_that_is_none_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"sg.on_nonfinite=.*go on.*: Input should be") as error:
        arguments("sg.on_nonfinite=go on")
    assert "\n" not in str(error.value)


class Engine(SGRolloutActor):
    """The rollout engine without a model: of its outputs only the reward is looked at."""

    def __init__(self) -> None:
        self.executor, self._expects_reward = SimpleNamespace(), True


class Letters:
    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(map(chr, tokens))


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), torch.tensor(float("inf")), None])
def test_the_engine_hands_on_a_number_and_nothing_else(value: Any) -> None:
    output: Any = {
        "reward": value, "scores": value, "label": "A", "prompt": "p",
        "observation_tokens": [72, 105],
    }  # fmt: skip
    if value is None:
        with pytest.raises(RewardError, match="the reward function failed"):
            Engine()._check_reward(output, Letters())
    else:
        Engine()._check_reward(output, Letters())
        torch.testing.assert_close(output["reward"], float(value), equal_nan=True)


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_reward_that_is_not_finite_stops_unless_the_update_skips_it(
    on_nonfinite: str, evaluates: bool
) -> None:
    response: Response = {
        "observation_tokens": [72, 105, 33], "action_ranges": [(2, 3)], "reward": float("nan"),
        "scores": float("nan"), "rollout_log_probs": None, "prompt": "Hi", "label": "A",
        "truncated": False,
    }  # fmt: skip
    generator: Any = object.__new__(SamplesGenerator)
    generator.args = SimpleNamespace(sg=SimpleNamespace(on_nonfinite=on_nonfinite))
    generator._tokenizer, generator._log_names = Letters(), None
    generator.sampling = Sampling(1, 1.0, 1.0, None, 64)
    if evaluates or on_nonfinite == "stop":
        with pytest.raises(
            RewardError, match=r"`rewards` is nan, expected a finite .* ends: 'Hi!'"
        ):
            generator._experiences([response], may_skip=not evaluates)
    else:
        (kept,) = generator._experiences([response])
        assert bool(kept.rewards.isnan()) and kept.scores.tolist() == [0.0]
