"""Any OpenEnv environment as a domain of several turns.

The model's turns are actions, the observations are the replies, and the reward of an episode is the
sum of the rewards of its steps.

``SG_DOMAINS=sg_rlhf.environments.openenv_domain:OPENENV`` gives recipes the section ``sg.openenv``
and ``sg-rlhf data`` the subcommand ``openenv``. A row's ``input`` is the text that the environment
begins with, its ``answer`` the options that reset it to that text, as JSON.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field, field_validator

from sg_rlhf.data_io.dataset_writer import Records
from sg_rlhf.environments.session import OpenEnvError, Session
from sg_rlhf.tasks.data_source import Generator, generated_records
from sg_rlhf.tasks.domain import Domain
from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.rollout import (
    Codec,
    Environment,
    EnvironmentFailed,
    EpisodeAborted,
    Reply,
    Turn,
)
from sg_rlhf.tasks.settings import DomainSettings, checked_url


class OpenEnvSettings(DomainSettings):
    """The recipe's `sg.openenv.*`."""

    section: ClassVar[str] = "openenv"
    about: ClassVar[str] = "rollouts in an OpenEnv environment"

    url: str = Field("http://127.0.0.1:8001", description="of the environment's server")
    action: str = Field("text", description="field of an action that takes the model's text")
    observation: str = Field("text", description="field of an observation that the model reads")
    between: str = Field(
        "{text}", description="how an observation stands between two turns, with {text} for it: "
        "a chat model needs its template's marks around it",
    )  # fmt: skip
    stop: list[str] = Field([], description="strings that end a turn; without, its end token does")
    max_turns: int = Field(8, ge=1, description="turns of the model in an episode")
    turn_tokens: int = Field(512, ge=1, description="most tokens that the model writes in a turn")
    observation_tokens: int = Field(512, ge=1, description="most tokens of an observation")
    timeout_s: float = Field(60.0, gt=0, description="seconds that an answer may take")

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        return checked_url(url, "http://HOST:PORT")

    @field_validator("between")
    @classmethod
    def _has_text(cls, between: str) -> str:
        if "{text}" not in between:
            raise ValueError("expected {text} in it")
        return between

    def text_of(self, observation: Mapping[str, Any]) -> str:
        """What the model reads of an observation."""
        if self.observation not in observation:
            known = ", ".join(sorted(observation)) or "none"
            raise OpenEnvError(
                f"sg.openenv.observation={self.observation}: the observations of {self.url} have "
                f"the fields {known}"
            )
        value = observation[self.observation]
        return value if isinstance(value, str) else json.dumps(value)


def reset_options(label: str) -> dict[str, Any]:
    """A row's `answer`, a JSON object: the options of its episode's reset."""
    try:
        options = json.loads(label)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ValueError(f'{label[:80]!r}: expected a JSON object such as {{"seed": 0}}')
    return options


def grade(response: str, label: str) -> Grade:
    """Nothing is graded here; ValueError for a label that is not that of an episode."""
    reset_options(label)
    return Grade(reward=0.0, correct=False, reason="ungraded")


class OpenEnvEnvironment(Environment):
    """Episodes of one server.

    Args:
        settings: `sg.openenv.*`.
        strict: an error of the server aborts its episode, instead of ending the run.
    """

    def __init__(
        self,
        settings: OpenEnvSettings,
        *,
        strict: bool = False,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(settings, strict=strict, notify=notify)
        self.settings = settings
        self.stop = tuple(self.settings.stop)
        self.turn_tokens = self.settings.turn_tokens

    def begin(self, row: Mapping[str, Any], codec: Codec) -> OpenEnvEpisode:
        return OpenEnvEpisode(self, reset_options(str(row["answer"])), codec)

    async def check(self) -> None:
        try:
            await beginnings(self.settings, [{"seed": 0}])
        except OpenEnvError as error:
            raise EnvironmentFailed(str(error)) from None


class OpenEnvEpisode:
    """One episode: a session of its own, from the first turn to the verdict."""

    def __init__(
        self, environment: OpenEnvEnvironment, options: Mapping[str, Any], codec: Codec
    ) -> None:
        self._environment, self._settings = environment, environment.settings
        self._options, self._codec = options, codec
        self._session: Session | None = None
        self._turns = 0
        self._reward = 0.0
        self._ended = False
        self._correct: bool | None = None

    async def step(self, turn: Turn) -> Reply:
        self._turns += 1
        try:
            if self._session is None:
                self._loop = asyncio.get_running_loop()
                self._session = Session(self._settings.url, self._settings.timeout_s)
                await self._session.reset(self._options)
            text = _without_end(turn.text, self._codec.control_tokens)
            step = await self._session.step({self._settings.action: text})
            self._reward += step.reward or 0.0
            self._ended = step.done
            verdict = (step.observation.get("metadata") or {}).get("correct")
            if isinstance(verdict, bool):
                self._correct = verdict
            if step.done:
                return Reply(done=True)
            if turn.is_last or self._turns == self._settings.max_turns:
                return Reply(done=True, truncated=True)
            return self._reply(self._settings.text_of(step.observation))
        except OpenEnvError as error:
            await self._session.close()  # type: ignore[union-attr]
            failed = EpisodeAborted if self._environment.strict else EnvironmentFailed
            raise failed(str(error)) from None

    def _reply(self, text: str) -> Reply:
        """An observation between two turns. A control token in its text is text."""
        codec, limit = self._codec, self._settings.observation_tokens * self._codec.ids_per_token
        for token in codec.control_tokens:
            text = text.replace(token, f"{token[:1]} {token[1:]}")
        before, after = map(codec.encode, self._settings.between.split("{text}", 1))
        token_ids = [*before, *codec.encode(text)[:limit], *after]
        return Reply(codec.decode(token_ids), token_ids)

    def grade(self) -> Grade:
        """Without a verdict of the environment, an episode with a reward above 0 is correct."""
        if self._session is not None:  # grading has a thread of its own
            asyncio.run_coroutine_threadsafe(self._session.close(), self._loop)
        correct = self._reward > 0 if self._correct is None else self._correct
        reason = "correct" if correct else "wrong"
        return Grade(self._reward, correct, reason, logs={"ended": float(self._ended)})


def _without_end(text: str, control_tokens: Sequence[str]) -> str:
    """A turn without the control tokens that end it."""
    shorter = text
    for token in control_tokens:
        shorter = shorter.removesuffix(token)
    return text if shorter == text else _without_end(shorter, control_tokens)


async def beginnings(settings: OpenEnvSettings, options: Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts that episodes begin with."""
    texts = []
    for each in options:
        session = Session(settings.url, settings.timeout_s)
        try:
            texts.append(settings.text_of((await session.reset(each)).observation))
        finally:
            await session.close()
    return texts


def check(settings: OpenEnvSettings) -> None:
    """See that the environment answers, before Ray starts."""
    try:
        asyncio.run(beginnings(settings, [{"seed": 0}]))
    except OpenEnvError as error:
        raise ValueError(f"{error}; sg.openenv.url is the address of a running server") from None


def generate(
    url: str, observation: str, options: str, count: int, test_count: int, seed: int
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]], Mapping[str, Records]]:
    """Rows of an environment's episodes, by their seeds: the first ones are the test rows."""
    settings = OpenEnvSettings(url=url, observation=observation)
    numbers = range(seed, seed + test_count + count)
    resets = [{**reset_options(options), "seed": number} for number in numbers]
    try:
        texts = asyncio.run(beginnings(settings, resets))
    except OpenEnvError as error:
        raise ValueError(str(error)) from None
    rows: list[Mapping[str, Any]] = [
        {"input": text, "answer": json.dumps(each), "datasource": "openenv"}
        for text, each in zip(texts, resets, strict=True)
    ]
    return rows[test_count:], rows[:test_count], {}


_FIELDS = OpenEnvSettings.model_fields
DATA = generated_records(
    "Ask an OpenEnv environment for the beginnings of its episodes, one row for each.\n\n"
    "example:\n"
    "  sg-rlhf data openenv --out data/env --generate url=http://127.0.0.1:8001 \\\n"
    "      count=256 test_count=64\n\n"
    "keys of --generate: url (of the server), observation (the field that the model reads),\n"
    "options (of every reset, as JSON), count and test_count (episodes), seed (of the first one)",
    Generator(
        "openenv",
        {
            **{name: _FIELDS[name].default for name in ("url", "observation")},
            "options": "{}",
            "count": 64,
            "test_count": 16,
            "seed": 0,
        },
        generate,
    ),
)
OPENENV = Domain(
    name="openenv",
    title="episodes of an OpenEnv environment",
    grade=grade,
    data=DATA,
    settings=OpenEnvSettings,
    check=check,
    environment=OpenEnvEnvironment,
)
