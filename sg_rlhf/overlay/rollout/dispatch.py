"""Prompts that are handed to the rollout engines, and again where an engine is lost.

A prompt's responses depend on its place in the run alone (:mod:`sg_rlhf.sampling.request_seeds`),
so
that an engine in another one's place gives the same ones. All of the lost engine's prompts of the
batch are asked again, the answered ones too: where rounding depends on what is computed together,
only the whole batch repeats itself.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import ray

from sg_rlhf.overlay.reporting.errors import EngineReplaced, cause_chain
from sg_rlhf.sampling.request_seeds import SeedKey

#: What vLLM raises where the process of its core is gone (vllm.v1.engine.exceptions).
DEAD_CORE = "EngineDeadError"


class RequestTag(NamedTuple):
    """What an engine is told of a prompt beside it.

    Attributes:
        draw: seeds the responses.
        incarnation: name of the engine that is meant: one in its place has other weights.
        batch: names the prompts that are asked together; None for one that comes later.
        expected: responses of the batch.
    """

    draw: SeedKey
    incarnation: str
    batch: str | None
    expected: int


class EngineInstance(NamedTuple):
    """One start of an engine.

    Attributes:
        name: that no other has.
        node: Ray's id of the machine.
        processes: (id, time of its start) of the engine's own and of those under it.
        group: Ray's id of its placement group; None for none.
    """

    name: str
    node: str
    processes: tuple[tuple[int, float], ...]
    group: str | None = None


class Engines(Protocol):
    """The rollout engines of a run, which may change."""

    handles: Sequence[Any]

    @property
    def incarnations(self) -> list[EngineInstance]:
        """Which they are now."""

    def replace(self, number: int, lost: str) -> None:
        """Have an engine in the place of a lost one, with the policy's weights.

        Args:
            number: of the engine.
            lost: name of its incarnation that is lost; there is nothing to do if it is another now.

        Raises:
            RunStopped: it was lost too often, or does not come back.
        """


@dataclass
class _Prompt:
    number: int
    engine: int
    arguments: dict[str, Any]
    batch: str | None
    expected: int = 0
    meant: str = ""
    answered: bool = field(default=False)


class RolloutDispatcher:
    """The prompts of one rollout or evaluation.

    Args:
        engines: whom to ask.
        seed: of the run.
        purpose: see :class:`sg_rlhf.sampling.request_seeds.SeedKey`, as is ``step``.
        numbers: of the prompts, in the order of asking; from 0 if None.
        together: whether an engine computes them as one batch, for which it is paused shortly; not
            where a weight sync pauses it.
    """

    def __init__(
        self,
        engines: Engines,
        seed: int,
        purpose: str,
        step: int,
        numbers: Iterator[int] | None = None,
        together: bool = True,
    ) -> None:
        self._engines = engines
        self._draw_of: Callable[[int], SeedKey] = lambda number: SeedKey(
            seed, purpose, step, number
        )
        self._together = together
        self._numbers = itertools.count() if numbers is None else numbers
        self._prompts: list[_Prompt] = []
        self._unsent: list[_Prompt] = []
        self._pending: dict[Any, _Prompt] = {}

    def stand_ins(self) -> list[Any]:
        """For upstream's choice of engines: they say how busy the engines are, and take notes."""
        return [
            SimpleNamespace(
                # Not asked of the engine, which may be lost without anybody's knowing yet.
                get_num_unfinished_requests=SimpleNamespace(
                    remote=lambda engine=number: ray.put(self._unfinished(engine))
                ),
                generate_responses=SimpleNamespace(
                    remote=lambda engine=number, **arguments: self._note(engine, arguments)
                ),
            )
            for number in range(len(self._engines.handles))
        ]

    def _unfinished(self, engine: int) -> int:
        waiting = (p for p in self._pending.values() if p.engine == engine)
        return sum(int(p.arguments["num_samples"]) for p in waiting)

    def _note(self, engine: int, arguments: dict[str, Any]) -> None:
        noted = _Prompt(next(self._numbers), engine, arguments, None)
        self._prompts.append(noted)
        self._unsent.append(noted)

    def send(self) -> None:
        """Ask what has been noted; the first time as one batch of each engine."""
        unsent, self._unsent = self._unsent, []
        if self._together and len(unsent) == len(self._prompts):
            _assign_batches(unsent)
        for prompt in unsent:
            self._send(prompt)

    def _send(self, prompt: _Prompt) -> None:
        prompt.meant = self._engines.incarnations[prompt.engine].name
        asked = RequestTag(
            self._draw_of(prompt.number), prompt.meant, prompt.batch, prompt.expected
        )
        handle = self._engines.handles[prompt.engine]
        self._pending[handle.generate_responses.remote(asked=asked, **prompt.arguments)] = prompt

    def answers(self) -> Iterator[tuple[int, list[Any]]]:
        """A prompt's number and its responses, as they are finished.

        Raises:
            RunStopped: an engine is lost and cannot be replaced.
        """
        lost: dict[int, str] = {}
        while self._pending or lost:
            if not self._pending:  # the other engines' weights are not touched while they compute
                for engine in sorted(lost):
                    self._ask_again(engine, lost[engine])
                lost.clear()
                continue
            ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=10.0)
            for reference in ready:
                prompt = self._pending.pop(reference)
                try:
                    responses = ray.get(reference)
                except Exception as error:
                    if not is_engine_failure(error):
                        raise
                    lost[prompt.engine] = prompt.meant
                    continue
                if not prompt.answered:
                    prompt.answered = True
                    yield prompt.number, responses

    def _ask_again(self, engine: int, lost: str) -> None:
        self._engines.replace(engine, lost)
        again = [prompt for prompt in self._prompts if prompt.engine == engine]
        if not all(prompt.answered for prompt in again):
            if self._together:
                _assign_batches(again)
            for prompt in again:
                self._send(prompt)


def _assign_batches(prompts: Sequence[_Prompt]) -> None:
    """Have each engine compute its prompts as one batch."""
    name = uuid.uuid4().hex
    responses: dict[int, int] = {}
    for prompt in prompts:
        count = int(prompt.arguments["num_samples"])
        responses[prompt.engine] = responses.get(prompt.engine, 0) + count
    for prompt in prompts:
        prompt.batch, prompt.expected = name, responses[prompt.engine]


def is_engine_failure(error: BaseException) -> bool:
    """Whether an engine's answer says that its process, or that of its core, is gone."""
    return any(
        isinstance(e, (ray.exceptions.RayActorError, EngineReplaced))
        or type(e).__name__ == DEAD_CORE
        for e in cause_chain(error)
    )
