"""How old a trained sample can be, what batches are made of, and what a checkpoint keeps."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from torchdata.stateful_dataloader import StatefulDataLoader

from sg_rlhf.config.derived.async_config import AsyncConfig
from sg_rlhf.overlay.reporting.errors import RunStopped
from sg_rlhf.overlay.rollout.async_buffer import AsyncRolloutBuffer, OnPromptDone, PromptBatch

BATCH = 2


def config(max_in_flight: int, **settings: Any) -> AsyncConfig:
    given = {"max_staleness": max_in_flight, "request_size": BATCH, **settings}
    return AsyncConfig(max_in_flight=max_in_flight, batch_size=BATCH, **given)


class Run:
    """The controller's loop; engines answer at once, or when they are told to.

    Attributes:
        version: of the weights.
        held: prompts whose answers wait for :meth:`release`.
        solved: prompts that the filter leaves out.
        trained: (rollout, prompt, version that sampled it).
    """

    def __init__(self, settings: AsyncConfig, prompts: int = 8, epochs: int = 1) -> None:
        self.version = 0
        self.held: dict[int, threading.Event] = {}
        self.solved: set[int] = set()
        self.trained: list[tuple[int, int, int]] = []
        self.asked: list[tuple[int, int, int]] = []
        self.loader = StatefulDataLoader(
            range(prompts), batch_size=1, collate_fn=lambda rows: rows[0]
        )
        self.rollouts = AsyncRolloutBuffer(settings, self.loader, epochs, self.sample)

    def sample(self, batch: PromptBatch, answer: OnPromptDone) -> None:
        todo = [(place, batch.prompts[place], self.version) for place in batch.pending()]
        self.asked += [(batch.number, place, prompt) for place, prompt, _ in todo]
        while todo:
            todo.sort(key=lambda one: one[1] in self.held)
            place, prompt, version = todo.pop(0)
            if prompt in self.held:
                assert self.held[prompt].wait(300)
            samples = [] if prompt in self.solved else [_sample(prompt, version)]
            for instead in answer(place, samples):
                todo.append((len(batch.prompts) - 1, instead, self.version))

    def step(self) -> bool:
        """Train one rollout; False at the end of an epoch."""
        taken = self.rollouts.pop_batch(self.version)
        samples = taken.samples
        if not samples:
            assert taken.is_epoch_over
            return False
        assert len(samples) == BATCH
        self.trained += [(self.version, int(s.labels[0]), s.weight_runs[0][1]) for s in samples]
        self.rollouts.submit(self.version, self.version + 1)
        if not self.rollouts.config.partial:
            self.rollouts.drain()
        self.version += 1
        return True

    def ages(self) -> list[int]:
        return [rollout - version for rollout, _, version in self.trained]

    def prompts(self) -> list[int]:
        return [prompt for _, prompt, _ in self.trained]


def _sample(prompt: int, version: int) -> Any:
    made: Any = Experience(
        sequences=torch.tensor([[prompt, prompt]]), action_mask=torch.ones(1, 3), labels=[prompt]
    )
    made.weight_runs = [[0, version]]
    return made


@pytest.mark.parametrize("bound", [0, 1, 2, 3])
def test_waiting_every_sample_is_as_old_as_allowed_and_no_older(bound: int) -> None:
    run = Run(config(bound), prompts=12)
    while run.step():
        pass
    assert run.prompts() == list(range(12))
    assert run.ages() == [min(rollout, bound) for rollout in range(6) for _ in range(BATCH)]


@pytest.mark.parametrize("unit", [3, 4])
def test_more_prompts_at_once_serve_later_rollouts(unit: int) -> None:
    run = Run(config(1, request_size=unit), prompts=10)
    while run.step():
        pass
    assert run.prompts() == list(range(10))
    assert max(run.ages()) == 1


def test_a_filtered_prompt_is_replaced_and_batches_stay_whole() -> None:
    run = Run(config(1, dynamic_filtering=True), prompts=11)
    run.solved = {1, 4, 5}
    while run.step():
        pass
    assert sorted(run.prompts()) == [0, 2, 3, 6, 7, 8, 9, 10]
    assert max(run.ages()) == 1


def test_no_rollout_has_prompts_of_two_epochs() -> None:
    run = Run(config(2), prompts=5, epochs=2)
    while run.step():
        pass
    while run.step():
        pass
    assert run.prompts() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert not any(prompt == 4 for _, _, prompt in run.asked), "the rest is trained by nobody"


@pytest.mark.parametrize("stopped_after", [1, 2, 3])
@pytest.mark.parametrize(
    "settings", [config(1), config(2), config(1, request_size=4), config(1, dynamic_filtering=True)]
)
def test_a_resumed_run_loses_and_repeats_nothing(settings: AsyncConfig, stopped_after: int) -> None:
    def start(epochs: int) -> Run:
        run = Run(settings, prompts=9, epochs=epochs)
        run.solved = {2} if settings.dynamic_filtering else set()
        return run

    whole = start(2)
    for _ in range(2):
        while whole.step():
            pass
    first = start(2)
    for _ in range(stopped_after):
        assert first.step()
    state = first.rollouts.state()
    resumed = start(2)
    resumed.version = first.version
    resumed.loader.load_state_dict(state.pop("loader"))
    resumed.rollouts.restore(state)
    for _ in range(2):
        while resumed.step():
            pass
    assert first.trained + resumed.trained == whole.trained


def test_a_run_that_is_resumed_with_a_lower_bound_trains_no_sample_above_it() -> None:
    first = Run(config(2), prompts=12)
    assert first.step() and first.step()
    state = first.rollouts.state()
    resumed = Run(config(1), prompts=12)
    resumed.version = first.version
    resumed.loader.load_state_dict(state.pop("loader"))
    resumed.rollouts.restore(state)
    with pytest.raises(RunStopped, match=r"2 weight syncs old, above sg.max_staleness=1: resume"):
        resumed.step()
    assert not resumed.trained


def test_prompts_under_way_are_asked_again_by_their_own_numbers() -> None:
    first = Run(config(2, partial=True), prompts=8)
    first.held = {3: threading.Event()}
    assert first.step()
    with first.rollouts._changed:
        answered = lambda: sum(len(b.completed) for b in first.rollouts._batches if b.number) == 3  # noqa: E731
        assert first.rollouts._changed.wait_for(answered, timeout=300)
    state = first.rollouts.state()
    resumed = Run(config(2, partial=True), prompts=8)
    resumed.version = first.version
    resumed.loader.load_state_dict(state.pop("loader"))
    resumed.rollouts.restore(state)
    while resumed.step():
        pass
    first.held[3].set()
    assert first.prompts() + resumed.prompts() == list(range(8))
    assert (1, 1, 3) in resumed.asked and len(resumed.asked) == 3, (
        "the unit's number and the place of its prompt"
    )


@pytest.mark.parametrize("settings", [config(2), config(1, request_size=4)])
def test_a_checkpoint_before_the_first_prompt_of_a_resumed_run_is_the_one_it_resumed_from(
    settings: AsyncConfig,
) -> None:
    """It makes a lost evaluation again before it samples, and saves its best checkpoint by it."""
    first = Run(settings, prompts=9)
    assert first.step()
    saved = first.rollouts.state()
    assert saved["batches"] and saved["next"]
    resumed = Run(settings, prompts=9)
    resumed.rollouts.restore(saved)
    again = resumed.rollouts.state()
    assert again == saved
    again.pop("loader")  # as the controller does
    assert resumed.rollouts.state() == saved
    resumed.version = first.version
    resumed.loader.load_state_dict(saved["loader"])
    while first.step():
        pass
    while resumed.step():
        pass
    assert resumed.trained == [row for row in first.trained if row[0] >= 1]


def test_a_synchronous_runs_checkpoint_keeps_the_loaders_place() -> None:
    loader = StatefulDataLoader(range(8), batch_size=1, collate_fn=lambda rows: rows[0])
    rows = iter(loader)
    assert [next(rows) for _ in range(2)] == [0, 1]
    place = loader.state_dict()
    resumed = Run(config(1))
    resumed.rollouts.restore({"loader": place})
    assert resumed.rollouts.state()["loader"] == place
    resumed.loader.load_state_dict(place)
    while resumed.step():
        pass
    assert resumed.prompts() == list(range(2, 8))


def test_what_fails_in_a_thread_ends_the_run() -> None:
    def fail(batch: PromptBatch, answer: OnPromptDone) -> None:
        raise RuntimeError("the engine is gone")

    loader = StatefulDataLoader(range(4), batch_size=1)
    rollouts = AsyncRolloutBuffer(config(1), loader, 1, fail)
    with pytest.raises(RuntimeError, match="the engine is gone"):
        rollouts.pop_batch(0)
