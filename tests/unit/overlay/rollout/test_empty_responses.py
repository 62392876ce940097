"""Responses without a token, and rollouts that wait for each other."""

from __future__ import annotations

import asyncio
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

from sg_rlhf.overlay.learner.advantages import add_advantages
from sg_rlhf.overlay.rollout.batch_barrier import BatchBarrier
from sg_rlhf.overlay.rollout.generator import SamplesGenerator
from sg_rlhf.overlay.rollout.samples import Sampling, to_experience
from tests.unit.overlay.learner.test_micro_batches import (
    DYNAMIC,
    GROUP,
    SAMPLES,
    Maker,
    arguments,
    rollout,
    without_a_cluster,
)

# -- Responses without a token that the policy sampled, as an agent gives them -------------------


__all__ = ["without_a_cluster"]  # a fixture for every test here

EMPTY = 5  # its group is 4 to 7
LEFT = [4, 6, 7]
ESTIMATORS = ["group_norm", "dr_grpo", "rloo", "reinforce_baseline", "flash_reinforce"]


def with_empty(*places: int) -> list[Any]:
    samples = rollout()
    for place in places:
        samples[place].action_mask = torch.zeros_like(samples[place].action_mask)
    return samples


def advantages(maker: Maker, samples: list[Any]) -> tuple[dict[int, float], int]:
    """Of each sample that has a token: its advantage, the same for all its tokens. And the number
    of responses without one.
    """
    found = {}
    scored = maker.score(samples, 0)
    for e in scored.micro_batches:
        for sequence, row, mask in zip(
            e.sequences, e.advantages, e.action_mask.bool(), strict=True
        ):
            assert bool(row.isfinite().all())
            if mask.any():
                assert len(set(row[mask].tolist())) == 1
                found[int(sequence[0])] = float(row[mask][0])
    return found, scored.empty_responses


def by_hand(estimator: str) -> dict[int, float]:
    """Of the group's other responses, and of those of other groups, by plain arithmetic."""
    samples = rollout()
    reward = {place: float(sample.rewards) for place, sample in enumerate(samples)}
    del reward[EMPTY]
    groups = [[p for p in reward if p // GROUP == g] for g in range(SAMPLES // GROUP)]
    found = {}
    for group in groups:
        of_group = [reward[p] for p in group]
        mean, n = statistics.fmean(of_group), len(of_group)
        for place in group:
            found[place] = {
                "group_norm": (reward[place] - mean) / (statistics.stdev(of_group) + 1e-9),
                "rloo": reward[place] - (sum(of_group) - reward[place]) / (n - 1),
                "flash_reinforce": reward[place] - statistics.fmean(reward.values()),
            }.get(estimator, reward[place] - mean)
    if estimator == "reinforce_baseline":  # over all tokens
        tokens = {place: int(samples[place].action_mask.sum()) for place in found}
        total = sum(tokens.values())
        mean = sum(found[p] * tokens[p] for p in found) / total
        variance = sum((found[p] - mean) ** 2 * tokens[p] for p in found) / total
        found = {p: (value - mean) / variance**0.5 for p, value in found.items()}
    return found


@pytest.mark.parametrize("batches", [[], DYNAMIC])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_others_of_its_group_are_compared_among_themselves(
    estimator: str, batches: list[str]
) -> None:
    maker = Maker(arguments(f"algo.advantage.estimator={estimator}", *batches))
    found, empty = advantages(maker, with_empty(EMPTY))
    assert empty == 1
    assert found == pytest.approx(by_hand(estimator), abs=1e-5)


def test_its_reward_is_of_no_account() -> None:
    for reward in (100.0, -100.0):
        samples = with_empty(EMPTY)
        samples[EMPTY].rewards = torch.tensor([reward])
        found, _ = advantages(Maker(arguments()), samples)
        assert found == pytest.approx(by_hand("group_norm"), abs=1e-5)


def test_a_response_that_is_left_alone_has_no_signal() -> None:
    found, _ = advantages(Maker(arguments()), with_empty(4, 5, 6))
    assert found[7] == 0.0 and set(range(SAMPLES)) - set(found) == {4, 5, 6}


def upstreams(samples: list[Any], args: Any) -> None:
    """OpenRLHF's advantages, which know no equal and no missing rewards."""
    strategy = SimpleNamespace(args=args)
    maker = RemoteExperienceMaker(
        None, None, None, None, SimpleNamespace(value=0.0), strategy, None
    )
    maker.compute_advantages_and_returns(samples)


@pytest.mark.parametrize("estimator", [*ESTIMATORS, "reinforce"])
@pytest.mark.parametrize("clip", [[], ["reward.clip_range=[-0.5,0.4]"]])
def test_without_one_all_is_upstreams(estimator: str, clip: list[str]) -> None:
    """Bit for bit."""
    args = arguments(
        f"algo.advantage.estimator={estimator}", "reward.stop_properly_penalty_coef=0.5", *clip
    )

    def scored() -> list[Any]:
        samples = rollout()
        samples[2].truncated = torch.tensor([True])
        for place, sample in enumerate(samples):
            sample.index, sample.kl = [place], torch.zeros(sample.action_mask.shape)
        return samples

    ours, expected = scored(), scored()
    add_advantages(ours, [torch.tensor([True])] * SAMPLES, args, 0.0)
    upstreams(expected, args)
    for e, other in zip(ours, expected, strict=True):
        assert torch.equal(e.advantages, other.advantages)
        assert torch.equal(e.returns, other.returns)
        for name in ("return", "reward", "group_reward_std"):
            assert torch.equal(e.info[name], other.info[name]), name


def test_a_filter_by_scores_does_not_look_at_it() -> None:
    generator: Any = object.__new__(SamplesGenerator)
    generator.args = SimpleNamespace(algo=SimpleNamespace(dynamic_filtering_range=(0.0, 1.0)))
    generator._filtered = []

    def sample(score: float, tokens: int) -> Any:
        mask = torch.arange(3)[None] < tokens
        return SimpleNamespace(scores=torch.tensor([score]), action_mask=mask)

    assert not generator._is_filtered_out([sample(1.0, 2), sample(0.0, 2)])
    assert generator._is_filtered_out([sample(1.0, 2), sample(0.0, 0)])
    assert generator._is_filtered_out([sample(1.0, 0), sample(0.0, 0)])


def response(tokens: int, *turns: tuple[int, int]) -> dict[str, Any]:
    return {
        "observation_tokens": list(range(tokens)), "action_ranges": list(turns), "reward": 0.0,
        "scores": 0.0, "rollout_log_probs": None, "prompt": "", "label": "", "truncated": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "truncated"),
    [
        (response(12, (2, 5)), True),  # upstream's executor stops here, behind its feedback
        (response(10, (2, 5)), True),
        (response(9, (2, 5)), False),
        (response(10, (2, 5), (7, 10)), False),  # the model's own last token
        (response(12), True),  # the first prompt left no room
    ],
)
def test_a_dialogue_whose_context_an_environment_fills_is_truncated(
    given: dict[str, Any], truncated: bool
) -> None:
    assert bool(to_experience(given, 10).truncated) is truncated  # type: ignore[arg-type]


def test_a_response_may_end_with_its_first_token() -> None:
    """The engine's log-probs of first tokens are those of the trainer: no token is masked."""
    sent: list[Any] = []
    dispatcher: Any = SimpleNamespace(submit=lambda prompts, n: sent.extend(prompts))
    generator: Any = object.__new__(SamplesGenerator)
    generator._tokenizer = None
    generator._submit(dispatcher, [(["kk"], ["p"], ["l"], [None])], Sampling(2, 1.0, 1.0, 4, 64))
    (prompt,) = sent
    assert prompt["sampling_params"].min_tokens == 0


# -- Requests of a batch enter together and in one order, whatever comes first or not at all -----


class Engine:
    """Notes what happens to it."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    async def pause(self) -> None:
        self.log.append("pause")

    async def resume(self) -> None:
        self.log.append("resume")

    async def add(self, key: Any) -> Any:
        await asyncio.sleep(0)
        self.log.append(key)
        return f"output of {key}"


@given(st.permutations(range(6)), st.sets(st.integers(0, 5)))
def test_requests_enter_in_their_order_when_all_are_there(
    arrivals: list[int], skipped: set[int]
) -> None:
    engine = Engine()

    async def batch() -> list[Any]:
        barrier = BatchBarrier(6, engine.pause, engine.resume)

        async def request(key: int) -> Any:
            for _ in range(arrivals.index(key)):
                await asyncio.sleep(0)
            if key in skipped:
                barrier.skip()
                return None
            return await barrier.arrive(key, lambda: engine.add(key))

        return await asyncio.wait_for(asyncio.gather(*map(request, range(6))), 300)

    outputs = asyncio.run(batch())
    entered = sorted(set(range(6)) - skipped)
    assert engine.log == (["pause", *entered, "resume"] if entered else [])
    assert outputs == [None if key in skipped else f"output of {key}" for key in range(6)]


def test_nothing_is_computed_before_the_last_request_is_there() -> None:
    engine = Engine()

    async def batch() -> None:
        barrier = BatchBarrier(2, engine.pause, engine.resume)
        first = asyncio.create_task(barrier.arrive(0, lambda: engine.add(0)))
        await asyncio.sleep(0.05)
        assert engine.log == ["pause"] and not first.done()
        await barrier.arrive(1, lambda: engine.add(1))
        assert await first == "output of 0"

    asyncio.run(batch())


def test_one_refused_request_holds_nobody_up_and_a_dead_engine_is_told_to_all() -> None:
    engine = Engine()

    async def refused() -> str:
        raise ValueError("a prompt without room")

    async def dead() -> None:
        raise ConnectionError("the engine is dead")

    async def batch(barrier: BatchBarrier) -> list[Any]:
        requests = [barrier.arrive(0, refused), barrier.arrive(1, lambda: engine.add(1))]
        return await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 300)

    first, second = asyncio.run(batch(BatchBarrier(2, engine.pause, engine.resume)))
    assert isinstance(first, ValueError) and second == "output of 1"
    found = asyncio.run(batch(BatchBarrier(2, dead, engine.resume)))
    assert [type(error) for error in found] == [ConnectionError, ConnectionError]


def test_who_comes_after_the_engine_died_hears_of_it() -> None:
    async def dead() -> None:
        raise ConnectionError("the engine is dead")

    async def batch() -> None:
        barrier = BatchBarrier(3, dead, Engine().resume)
        for key in range(3):  # the first one's task has found out when the second comes
            with pytest.raises(ConnectionError):
                await asyncio.wait_for(barrier.arrive(key, dead), 300)

    asyncio.run(batch())


@pytest.mark.parametrize("missing", [1, 2])
def test_all_may_be_excused(missing: int) -> None:
    barrier = BatchBarrier(missing, Engine().pause, Engine().resume)
    for _ in range(missing):
        barrier.skip()
