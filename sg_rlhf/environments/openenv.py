"""A domain as an OpenEnv environment (https://github.com/huggingface/OpenEnv), version 0.10.

An action is one turn of the model, `{"text": ...}`. An observation is what the model reads next,
`{"text": ...}`. The first one of a row of messages has these as `messages`, and the last message as
`text`. The last observation has the reward, and in `metadata` the verdict: `correct`, `reason`,
`extracted`, `format_ok` and the domain's own figures. `reset(index=N)` takes row N of the file,
`reset(seed=N)` a row drawn with that seed, `reset()` any.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import Field

from sg_rlhf.tasks import rollout
from sg_rlhf.tasks.codec import CharacterCodec
from sg_rlhf.tasks.grade import Grade

if TYPE_CHECKING:
    from fastapi import FastAPI

Row = Mapping[str, Any]


class TurnAction(Action):
    """One turn of the model."""

    text: str = Field(description="what the model wrote")


class TurnObservation(Observation):
    """What the model reads next; at the end, its reward."""

    text: str = Field(default="", description="what the model reads next")
    messages: list[dict[str, Any]] = Field(
        default=[], description="the prompt as a conversation, where the row has one"
    )


class DomainEnvironment(Environment[TurnAction, TurnObservation, State]):
    """One episode at a time of a domain's rows."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, rows: Sequence[Row], environment: rollout.Environment) -> None:
        super().__init__()
        self._rows = rows
        self._environment = environment
        self._episode: rollout.Episode | None = None
        self._state = State()

    def num_tasks(self, split: str) -> int:
        """Number of rows; there is one split."""
        return len(self._rows)

    def list_splits(self) -> list[str]:
        """The one split's name."""
        return ["rows"]

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> TurnObservation:
        """See `reset_async`, which the server calls."""
        raise NotImplementedError("episodes are asynchronous: call reset_async")

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> TurnObservation:
        """Begin an episode; ValueError for an `index` outside the rows."""
        index = options.get("index")
        if index is None:
            index = random.Random(seed).randrange(len(self._rows))
        if (
            isinstance(index, bool)
            or not isinstance(index, int)
            or not (0 <= index < len(self._rows))
        ):
            raise ValueError(f"index={index!r}: expected 0 to {len(self._rows) - 1}")
        row = self._rows[index]
        self._episode = self._environment.begin(row, CharacterCodec())
        self._state = State(episode_id=episode_id or str(uuid.uuid4()), step_count=0)
        metadata = {"index": index, "datasource": row.get("datasource")}
        prompt = row["input"]
        messages = [] if isinstance(prompt, str) else prompt
        text = str(messages[-1]["content"] if messages else prompt)
        return TurnObservation(text=text, messages=messages, metadata=metadata)

    def step(self, action: TurnAction, timeout_s: float | None = None, **_: Any) -> TurnObservation:
        """See `step_async`, which the server calls."""
        raise NotImplementedError("episodes are asynchronous: call step_async")

    async def step_async(
        self, action: TurnAction, timeout_s: float | None = None, **_: Any
    ) -> TurnObservation:
        """Give the model's turn to the episode; RuntimeError without one."""
        if self._episode is None:
            raise RuntimeError("no episode: reset first")
        self._state.step_count += 1
        reply = await self._episode.step(rollout.Turn(action.text))
        if not reply.done:
            return TurnObservation(text=reply.text)
        episode, self._episode = self._episode, None
        # A grader may take seconds (mathematics): other episodes go on meanwhile.
        return _verdict(await asyncio.to_thread(episode.grade))

    @property
    def state(self) -> State:
        return self._state


def _verdict(grade: Grade) -> TurnObservation:
    verdict = {
        "correct": grade.correct, "reason": grade.reason, "extracted": grade.extracted,
        "format_ok": grade.format_ok, **grade.logs,
    }  # fmt: skip
    return TurnObservation(done=True, reward=grade.reward, metadata=verdict)


def application(
    rows: Sequence[Row], environment: rollout.Environment, name: str, max_sessions: int
) -> FastAPI:
    """The server's application, with at most `max_sessions` episodes at a time."""
    return create_app(
        lambda: DomainEnvironment(rows, environment), TurnAction, TurnObservation, env_name=name,
        max_concurrent_envs=max_sessions,
    )  # fmt: skip
