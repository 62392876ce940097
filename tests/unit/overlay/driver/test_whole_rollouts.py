"""An epoch ends where its prompts no longer fill a rollout; upstream's loop does the rest."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from sg_rlhf.config.derived.async_config import AsyncConfig
from sg_rlhf.overlay.reporting.errors import EngineLost, RewardError
from sg_rlhf.overlay.rollout import dispatch
from sg_rlhf.overlay.rollout.async_buffer import AsyncRolloutBuffer
from sg_rlhf.overlay.rollout.dispatch import RequestTag
from sg_rlhf.overlay.rollout.engine_pool import EngineInstance
from sg_rlhf.overlay.rollout.generator import SamplesGenerator
from sg_rlhf.overlay.settings import rollout_plan

BATCH, RESPONSES = 4, 2
ENGINES = 2


class Engines:
    """Answer at once, unless they are to be lost; in place of Ray's actors."""

    def __init__(self) -> None:
        self.handles = [self.handle(number) for number in range(ENGINES)]
        self.instances = [EngineInstance(f"first {n}", "", ()) for n in range(ENGINES)]
        #: (engine, prompt, what it was told) of every request.
        self.requests: list[tuple[int, Any, RequestTag]] = []
        #: Requests, by their number, whose answer is an error.
        self.errors: dict[int, Exception] = {}
        self.replaced: list[int] = []
        self.answered: set[int] = set()

    def handle(self, number: int) -> Any:
        def generate(tag: RequestTag, prompt: Any, num_samples: int, **_: Any) -> Any:
            self.requests.append((number, prompt, tag))
            assert num_samples == RESPONSES
            return self.errors.get(len(self.requests) - 1, [prompt] * num_samples)

        return SimpleNamespace(
            generate_responses=SimpleNamespace(remote=lambda **told: Answer(generate(**told))),
        )

    def replace(self, number: int, lost: str) -> None:
        assert lost == self.instances[number].name
        if number in self.replaced:
            raise EngineLost("lost again")
        self.replaced.append(number)
        self.instances[number] = EngineInstance(f"second {number}", "", ())


class Answer:
    """A reference to it."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Generator(SamplesGenerator):
    """The loop over engines that answer at once; prompts in ``solved`` give no signal."""

    def __init__(self, prompts: int, solved: set[int] | None = None, filtering: bool = False):
        args = SimpleNamespace(
            rollout=SimpleNamespace(
                batch_size=BATCH,
                n_samples_per_prompt=RESPONSES,
                temperature=1.0,
                top_p=1.0,
                max_new_tokens=None,
            ),
            data=SimpleNamespace(max_len=2048),
            train=SimpleNamespace(seed=42),
            sg=SimpleNamespace(on_nonfinite="stop"),
            vllm=SimpleNamespace(enable_sleep=False),
            algo=SimpleNamespace(
                dynamic_filtering_enable=filtering,
                dynamic_filtering_range=(0.0, 1.0),
            ),
        )
        loader = StatefulDataLoader(
            [("kk", i, "", None) for i in range(prompts)],
            batch_size=1,
            collate_fn=lambda rows: [list(column) for column in zip(*rows, strict=True)],
        )
        super().__init__(args, loader, None)  # type: ignore[arg-type]
        self.engines = Engines()  # type: ignore[assignment]
        self.solved = solved or set()
        self.responses = 0

    @property
    def generated(self) -> list[int]:
        return [prompt for _, prompt, _ in self.engines.requests]

    def _experiences(self, responses: Any, may_skip: bool = True) -> list[Any]:
        return [self.experience(response) for response in responses]

    def experience(self, response: Any) -> Any:
        score = SimpleNamespace(item=lambda: 1.0 if response in self.solved else 0.5)
        self.responses += 1
        return SimpleNamespace(
            prompts=[response],
            labels=[""],
            scores=[score],
            weight_runs=None,
            rewards=None,
            sequences=torch.tensor([[response, self.responses]]),
            action_mask=torch.ones(1, 3),
        )

    def epoch(self) -> list[list[int]]:
        """The prompts of every rollout until upstream's loop would end the epoch."""
        rollouts = []
        while True:
            made = self.generate_samples()
            if samples := made.samples:
                assert len(samples) == BATCH * RESPONSES
                prompts = [s.prompts[0] for s in samples]
                rollouts.append(prompts[::RESPONSES])
                assert prompts == [p for p in rollouts[-1] for _ in range(RESPONSES)]
            if made.is_epoch_over:
                return rollouts


@pytest.fixture(autouse=True)
def engines_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(0)

    def wait(refs: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        """Any of them is finished first."""
        rest = chance.sample(refs, len(refs))
        return [rest.pop()], rest

    def get(reference: Any) -> Any:
        if isinstance(reference, list):
            return [get(one) for one in reference]
        value = getattr(reference, "value", reference)
        if isinstance(value, Exception):
            raise value
        return value

    local = SimpleNamespace(wait=wait, get=get, put=Answer, exceptions=ray.exceptions)
    monkeypatch.setattr(dispatch, "ray", local)


def test_the_rest_of_an_epoch_is_drawn_but_not_generated() -> None:
    generator = Generator(10)
    assert generator.epoch() == generator.epoch() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert generator.generated == [*range(8), *range(8)]
    generator = Generator(10)
    consumed = [generator.generate_samples().prompts_drawn for _ in range(3)]
    assert consumed == [4, 4, 2]  # upstream counts epochs by them


def test_data_that_divide_evenly_are_all_used() -> None:
    assert Generator(8).epoch() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_run_that_resumes_in_mid_epoch_drops_the_same_rest() -> None:
    first = Generator(10)
    first.generate_samples()
    resumed = Generator(10)
    resumed.prompts.load_state_dict(first.prompts.state_dict())
    assert resumed.epoch() == [[4, 5, 6, 7]]
    assert resumed.epoch() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    at_the_end = Generator(10)
    first.generate_samples()
    at_the_end.prompts.load_state_dict(first.prompts.state_dict())
    assert at_the_end.epoch() == [] and len(at_the_end.epoch()) == 2


def test_filtered_prompts_are_replaced_from_the_rest_until_no_rollout_is_whole() -> None:
    generator = Generator(10, solved={1, 2}, filtering=True)
    assert generator.epoch() == [[0, 3, 4, 5], [6, 7, 8, 9]]
    generator = Generator(10, solved={1, 2, 9}, filtering=True)
    assert generator.epoch() == [[0, 3, 4, 5]]
    assert generator.epoch() == [[0, 3, 4, 5]]


def test_the_share_that_passed_the_filter_is_of_prompts() -> None:
    generator = Generator(10, solved={1, 2}, filtering=True)
    made = generator.generate_samples()
    assert (made.pass_rate, made.prompts_drawn) == (100.0 * 4 / 6, 6)
    generator = Generator(10, filtering=True)
    assert generator.generate_samples().pass_rate == 100.0
    assert Generator(10).generate_samples().pass_rate is None


@pytest.mark.parametrize("solved", [set(), {1, 2}, {0, 5, 6, 11}, {1, 2, 3, 9, 10}, set(range(9))])
def test_with_filtering_a_bound_of_0_is_the_synchronous_run(solved: set[int]) -> None:
    def rollouts(ahead: bool) -> tuple[list[Any], set[Any]]:
        generator = Generator(14, solved, filtering=True)
        generator.args.train.partial_rollout_enable = False
        if ahead:
            config = AsyncConfig(0, 0, batch_size=BATCH, request_size=BATCH, dynamic_filtering=True)

            def sample(unit: Any, answer: Any) -> None:
                generator.generate_async(unit, answer, generator.engines)

            made = AsyncRolloutBuffer(config, generator.prompts, 2, sample)
            generator.buffer = made
        found: list[Any] = []
        for _ in range(2):  # epochs
            over = False
            while not over:
                taken = generator.generate_samples()
                over = taken.is_epoch_over
                if taken.samples:
                    generator.step += 1
                    found.append(([s.prompts[0] for s in taken.samples], taken.pass_rate))
        return found, {(p, tuple(told.seed_key)) for _, p, told in generator.engines.requests}

    assert rollouts(ahead=True) == rollouts(ahead=False)


def evaluated(generator: Generator) -> list[Any]:
    return generator.generate_eval_samples(generator.prompts, generator.sampling)


def test_an_evaluation_takes_every_prompt() -> None:
    generator = Generator(10)
    found = [s.prompts[0] for s in evaluated(generator)[::RESPONSES]]
    assert sorted(found) == [*range(10)]
    generator.generate_samples()
    assert len(evaluated(generator)) == 10 * RESPONSES


def test_a_response_is_seeded_by_its_place_and_not_by_its_engine() -> None:
    generator = Generator(10)
    generator.step = 3
    generator.generate_samples()
    told = {prompt: asked for _, prompt, asked in generator.engines.requests}
    assert [tuple(told[p].seed_key) for p in range(4)] == [(42, "rollout", 3, p) for p in range(4)]
    # Each engine computes its two prompts' responses as one batch.
    assert {asked.batch_size for asked in told.values()} == {2 * RESPONSES}
    assert len({asked.batch for asked in told.values()}) == 1
    engines = {prompt: engine for engine, prompt, _ in generator.engines.requests}
    assert sorted(engines.values()) == [0, 0, 1, 1]


def test_replacements_of_filtered_prompts_are_asked_alone_and_seeded_by_their_own_place() -> None:
    generator = Generator(10, solved={1}, filtering=True)
    generator.generate_samples()
    *_, (_, prompt, asked) = generator.engines.requests
    assert (prompt, asked.seed_key.prompt, asked.batch) == (4, 4, None)


@pytest.mark.parametrize("lost_at", range(BATCH))
def test_all_prompts_of_a_lost_engine_are_asked_again_with_the_same_seeds(lost_at: int) -> None:
    generator = Generator(10)
    engines = generator.engines
    engines.errors = {lost_at: ray.exceptions.RayActorError()}
    made = generator.generate_samples()
    assert [s.prompts[0] for s in made.samples[::RESPONSES]] == [0, 1, 2, 3]
    assert made.prompts_drawn == 4
    first, again = engines.requests[:BATCH], engines.requests[BATCH:]
    lost = first[lost_at][0]
    assert engines.replaced == [lost]
    assert [(e, p, a.seed_key) for e, p, a in again] == [
        (e, p, a.seed_key) for e, p, a in first if e == lost
    ]
    assert {a.instance_id for _, _, a in again} == {f"second {lost}"}
    assert {a.batch for _, _, a in again}.isdisjoint({a.batch for _, _, a in first})


def test_filtering_counts_a_prompt_once_though_it_was_asked_twice() -> None:
    generator = Generator(10, solved={0, 2}, filtering=True)
    # The first answer of the first engine is filtered before its second one is lost.
    generator.engines.errors = {2: ray.exceptions.RayActorError()}
    made = generator.generate_samples()
    assert [s.prompts[0] for s in made.samples[::RESPONSES]] == [1, 3, 4, 5]
    assert made.prompts_drawn == 6
    assert (
        generator.pop_filtered_tokens() == 2 * RESPONSES * 3
        and generator.pop_filtered_tokens() == 0
    )


def test_an_engine_that_is_lost_again_ends_the_rollout_and_another_error_is_none_of_it() -> None:
    generator = Generator(10)
    gone = ray.exceptions.RayActorError()
    generator.engines.errors = {0: gone, BATCH: gone}
    with pytest.raises(EngineLost):
        generator.generate_samples()
    generator = Generator(10)
    generator.engines.errors = {1: RewardError("no reward")}
    with pytest.raises(RewardError):
        generator.generate_samples()
    assert not generator.engines.replaced


def arguments(filtering: bool = False, **train: int) -> Any:
    return SimpleNamespace(
        rollout=SimpleNamespace(batch_size=64, n_samples_per_prompt=8),
        train=SimpleNamespace(**{"batch_size": 256, "num_episodes": 5, "max_epochs": 1} | train),
        algo=SimpleNamespace(dynamic_filtering_enable=filtering),
    )


def test_the_paper_has_5_epochs_of_70_rollouts() -> None:
    plan = rollout_plan.plan(4500, arguments())
    assert (plan.epoch_rollouts, plan.rollouts, plan.optimizer_steps) == (70, 350, 700)
    assert plan.remark() == (
        "20 of 4500 prompts are left out of each epoch: the last rollout would be incomplete"
    )
    assert rollout_plan.plan(4480, arguments()).remark() == ""
    assert rollout_plan.plan(4480, arguments(max_epochs=2)).optimizer_steps == 1400
    assert rollout_plan.plan(63, arguments()).epoch_rollouts == 0


def test_filtering_says_nothing_of_a_rest_that_it_draws_from() -> None:
    plan = rollout_plan.plan(4500, arguments(filtering=True))
    assert (plan.rollouts, plan.remark()) == (350, "")
