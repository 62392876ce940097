"""An epoch ends where its prompts no longer fill a rollout; upstream's loop does the rest."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import openrlhf.trainer.ppo_utils.samples_generator as upstream
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from sg_rlhf.overlay import layout
from sg_rlhf.overlay.samples import SGSamplesGenerator

BATCH, RESPONSES = 4, 2


class Generator(SGSamplesGenerator):
    """Upstream's loop over engines that answer at once; prompts in ``solved`` give no signal."""

    def __init__(self, prompts: int, solved: set[int] | None = None, filtering: bool = False):
        args = SimpleNamespace(
            rollout=SimpleNamespace(batch_size=BATCH, n_samples_per_prompt=RESPONSES),
            vllm=SimpleNamespace(enable_sleep=False),
            algo=SimpleNamespace(
                dynamic_filtering_enable=filtering, dynamic_filtering_range=(0.0, 1.0)
            ),
        )
        loader = StatefulDataLoader(
            [("kk", i, "", None) for i in range(prompts)],
            batch_size=1,
            collate_fn=lambda rows: [list(column) for column in zip(*rows, strict=True)],
        )
        super().__init__(SimpleNamespace(args=args), loader, loader, None, [])  # type: ignore[arg-type]
        self.solved = solved or set()
        self.generated: list[int] = []
        self.responses = 0

    def _dispatch_prompts_to_vllm(self, prompts: Any, labels: Any, **_: Any) -> list[Any]:
        self.generated += prompts
        return [[prompt] * RESPONSES for prompt in prompts]

    def _process_response_into_experience(self, response: Any, **_: Any) -> Any:
        score = SimpleNamespace(item=lambda: 1.0 if response in self.solved else 0.5)
        self.responses += 1
        return SimpleNamespace(
            prompts=[response],
            labels=[""],
            scores=[score],
            sequences=torch.tensor([[response, self.responses]]),
        )

    def epoch(self) -> list[list[int]]:
        """The prompts of every rollout until upstream's loop would end the epoch."""
        rollouts = []
        while True:
            samples, _, _, exhausted = self.generate_samples()
            if samples:
                assert len(samples) == BATCH * RESPONSES
                prompts = [s.prompts[0] for s in samples]
                rollouts.append(prompts[::RESPONSES])
                assert prompts == [p for p in rollouts[-1] for _ in range(RESPONSES)]
            if exhausted:
                return rollouts


@pytest.fixture(autouse=True)
def engines_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(0)

    def wait(refs: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        """Any of them is finished first."""
        rest = chance.sample(refs, len(refs))
        return [rest.pop()], rest

    local = SimpleNamespace(wait=wait, get=lambda ref: ref)
    monkeypatch.setattr(upstream, "ray", local)


def test_the_rest_of_an_epoch_is_drawn_but_not_generated() -> None:
    generator = Generator(10)
    assert generator.epoch() == generator.epoch() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert generator.generated == [*range(8), *range(8)]
    generator = Generator(10)
    consumed = [generator.generate_samples()[2] for _ in range(3)]
    assert consumed == [4, 4, 2]  # upstream counts epochs by them


def test_data_that_divide_evenly_are_all_used() -> None:
    assert Generator(8).epoch() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_run_that_resumes_in_mid_epoch_drops_the_same_rest() -> None:
    first = Generator(10)
    first.generate_samples()
    resumed = Generator(10)
    resumed.prompts_dataloader.load_state_dict(first.prompts_dataloader.state_dict())
    assert resumed.epoch() == [[4, 5, 6, 7]]
    assert resumed.epoch() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    at_the_end = Generator(10)
    first.generate_samples()
    at_the_end.prompts_dataloader.load_state_dict(first.prompts_dataloader.state_dict())
    assert at_the_end.epoch() == [] and len(at_the_end.epoch()) == 2


def test_filtered_prompts_are_replaced_from_the_rest_until_no_rollout_is_whole() -> None:
    generator = Generator(10, solved={1, 2}, filtering=True)
    assert generator.epoch() == [[0, 3, 4, 5], [6, 7, 8, 9]]
    generator = Generator(10, solved={1, 2, 9}, filtering=True)
    assert generator.epoch() == [[0, 3, 4, 5]]
    assert generator.epoch() == [[0, 3, 4, 5]]


def test_an_evaluation_takes_every_prompt() -> None:
    generator = Generator(10)
    found = [s.prompts[0] for s in generator.generate_eval_samples()[::RESPONSES]]
    assert sorted(found) == [*range(10)]
    generator.generate_samples()
    assert len(generator.generate_eval_samples()) == 10 * RESPONSES


def arguments(filtering: bool = False, **train: int) -> Any:
    return SimpleNamespace(
        rollout=SimpleNamespace(batch_size=64, n_samples_per_prompt=8),
        train=SimpleNamespace(**{"batch_size": 256, "num_episodes": 5, "max_epochs": 1} | train),
        algo=SimpleNamespace(dynamic_filtering_enable=filtering),
    )


def test_the_paper_has_5_epochs_of_70_rollouts() -> None:
    plan = layout.plan(4500, arguments())
    assert (plan.epoch_rollouts, plan.rollouts, plan.optimizer_steps) == (70, 350, 700)
    assert plan.remark() == (
        "20 of 4500 prompts are left out of each epoch: the last rollout would be incomplete"
    )
    assert layout.plan(4480, arguments()).remark() == ""
    assert layout.plan(4480, arguments(max_epochs=2)).optimizer_steps == 1400
    assert layout.plan(63, arguments()).epoch_rollouts == 0


def test_filtering_says_nothing_of_a_rest_that_it_draws_from() -> None:
    plan = layout.plan(4500, arguments(filtering=True))
    assert (plan.rollouts, plan.remark()) == (350, "")
