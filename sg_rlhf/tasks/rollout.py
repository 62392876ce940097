"""Rollouts of several turns: a model writes, an environment answers, a grader gives the verdict.

An `Environment` begins one `Episode` per row, which answers the model's turns and grades them at
the end. Training and evaluation call `rollout`, the only loop over turns, with their own
`generate`. The model's tokens are kept as the engine returned them and never encoded again, so
training scores exactly what was sampled. Only the environment's texts are encoded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sg_rlhf.tasks.grade import Grade, Grader
from sg_rlhf.tasks.settings import DomainSettings

#: Tokens that must be left behind an answer of the environment; the model could not react to it.
MIN_TURN_TOKENS = 16


class EpisodeAborted(Exception):
    """The environment failed (a search engine is down). Evaluation does not store the episode."""


class EnvironmentFailed(Exception):
    """The environment cannot be used. It ends the run; the message is one line for the user."""


class Codec(Protocol):
    """The model's tokenizer, without adding or dropping special tokens."""

    @property
    def ids_per_token(self) -> int:
        """Ids that stand for about one token: 1, or 4 where they are characters."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens written out."""

    @property
    def control_tokens(self) -> Sequence[str]:
        """Strings that it reads as control tokens wherever they stand."""

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids of its control tokens."""


@dataclass(frozen=True)
class Turn:
    """What the model wrote in one turn; `cut` by the token limit, `is_last`: no tokens are left."""

    text: str
    cut: bool = False
    is_last: bool = False


@dataclass(frozen=True)
class Reply:
    """The environment's answer to one turn.

    Attributes:
        token_ids: the tokens of the text; None: as the codec encodes it.
        done: the episode has ended.
        truncated: it ended because a limit was reached.
        drop_end_of_turn: remove the control token that ended the turn, before the text is appended.
    """

    text: str = ""
    token_ids: Sequence[int] | None = None
    done: bool = False
    truncated: bool = False
    drop_end_of_turn: bool = False


class Episode(Protocol):
    """One problem, from its prompt to its verdict."""

    async def step(self, turn: Turn) -> Reply:
        """Answer a turn; `EpisodeAborted` or, to end the run, `EnvironmentFailed`."""

    def grade(self) -> Grade:
        """The verdict on the turns so far. `Grade.logs` has the same keys for every episode."""


class Environment(ABC):
    """What the episodes of one process share: settings, connections, statistics.

    Attributes:
        stop: strings that end a turn; they are part of it.
        turn_tokens: maximum tokens of a turn; None: what is left of the response.

    Args:
        settings: of the domain (`sg.NAME.*`); None for a domain without settings.
        strict: abort an episode if the environment fails (evaluation), instead of telling the model
            (training).
        notify: called with messages for the user; default: print them.
    """

    stop: tuple[str, ...] = ()
    turn_tokens: int | None = None

    def __init__(
        self,
        settings: DomainSettings | None = None,
        *,
        strict: bool = False,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        self.strict = strict
        self.notify = notify

    @abstractmethod
    def begin(self, row: Mapping[str, Any], codec: Codec) -> Episode:
        """An episode of a row (`answer`: the reference answer); a `ValueError` if it is wrong."""

    async def check(self) -> None:  # noqa: B027  (a hook that may stay empty)
        """Called before the first episode of a training run; raises `EnvironmentFailed`."""

    async def aclose(self) -> None:  # noqa: B027
        """Release what is shared."""


class SingleTurn(Environment):
    """A prompt, one response, its grade: the environment of a domain without one of its own."""

    def __init__(self, grade: Grader) -> None:
        super().__init__()
        self._grade = grade

    def begin(self, row: Mapping[str, Any], codec: Codec) -> Episode:
        return _Response(self._grade, str(row["answer"]))


@dataclass
class _Response:
    grader: Grader
    answer: str
    text: str = ""

    async def step(self, turn: Turn) -> Reply:
        self.text = turn.text
        return Reply(done=True, truncated=turn.cut)

    def grade(self) -> Grade:
        return self.grader(self.text, self.answer)


@dataclass(frozen=True)
class Generation:
    """What the engine sampled in one turn; `cut` by the token limit, a log-prob per token."""

    token_ids: Sequence[int]
    cut: bool
    log_probs: Sequence[float] | None = None


#: (tokens so far, maximum new tokens, stop strings) -> what was sampled.
Generate = Callable[[list[int], int, tuple[str, ...]], Awaitable[Generation]]


@dataclass
class Trajectory:
    """The tokens of an episode: the prompt, then turns and replies alternately.

    Attributes:
        log_probs: one per token of `token_ids`, 0 where it is not the model's; None without.
        action_ranges: (start, end) of the model's tokens in `token_ids`.
        truncated: the episode ended because a limit was reached.
    """

    token_ids: list[int]
    log_probs: list[float] | None = None
    action_ranges: list[tuple[int, int]] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    truncated: bool = False

    @property
    def sampled_tokens(self) -> int:
        """Number of the model's tokens."""
        return sum(end - start for start, end in self.action_ranges)

    def logs(self, grade: Grade) -> dict[str, float]:
        """What is logged of the episode, beside its reward; the same keys for each."""
        start = self.action_ranges[0][0] if self.action_ranges else len(self.token_ids)
        return {
            "correct": float(grade.correct),
            "format_ok": float(grade.format_ok),
            "turns": float(len(self.turns)),
            "observation_tokens": float(len(self.token_ids) - start - self.sampled_tokens),
            **grade.logs,
        }

    def add_turn(self, generation: Generation, text: str) -> None:
        """Append what the model sampled."""
        start = len(self.token_ids)
        self.token_ids.extend(generation.token_ids)
        self.action_ranges.append((start, len(self.token_ids)))
        self.turns.append(text)
        if self.log_probs is not None:
            assert generation.log_probs is not None
            assert len(generation.log_probs) == len(generation.token_ids)
            self.log_probs.extend(generation.log_probs)

    def drop_end_of_turn(self, codec: Codec, stop: tuple[str, ...]) -> None:
        """Remove the control token that ended the last turn, unless the turn is nothing else."""
        start, end = self.action_ranges[-1]
        if end - start < 2 or self.token_ids[-1] not in codec.control_ids:
            return
        # A tokenizer may have the stop strings as control tokens of its own.
        if codec.decode(self.token_ids[-1:]).strip() in stop:
            return
        del self.token_ids[-1]
        self.action_ranges[-1] = (start, end - 1)
        self.turns[-1] = codec.decode(self.token_ids[start:])
        if self.log_probs is not None:
            del self.log_probs[-1]

    def add_reply(self, token_ids: Sequence[int]) -> None:
        """Append tokens that are not the model's."""
        self.token_ids.extend(token_ids)
        if self.log_probs is not None:
            self.log_probs.extend([0.0] * len(token_ids))


async def rollout(
    environment: Environment,
    episode: Episode,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    generate: Generate,
    codec: Codec,
    *,
    with_log_probs: bool = False,
) -> Trajectory:
    """Let the model and the environment take turns until the episode or the tokens end.

    A reply that leaves the model fewer than `MIN_TURN_TOKENS` is not appended. Raises as `step`.

    Args:
        max_new_tokens: of turns and replies together, behind the prompt.
        with_log_probs: whether `generate` returns log-probs.
    """
    found = Trajectory(list(prompt_ids), [0.0] * len(prompt_ids) if with_log_probs else None)
    end = len(prompt_ids) + max_new_tokens
    while True:
        limit = end - len(found.token_ids)
        if environment.turn_tokens is not None:
            limit = min(environment.turn_tokens, limit)
        generation = await generate(list(found.token_ids), limit, environment.stop)
        text = codec.decode(generation.token_ids)
        found.add_turn(generation, text)
        left = end - len(found.token_ids)
        reply = await episode.step(Turn(text, generation.cut, left <= MIN_TURN_TOKENS))
        if reply.done:
            found.truncated = reply.truncated
            return found
        added = codec.encode(reply.text) if reply.token_ids is None else reply.token_ids
        if left <= MIN_TURN_TOKENS or left - len(added) < MIN_TURN_TOKENS:
            found.truncated = True
            return found
        if reply.drop_end_of_turn:
            found.drop_end_of_turn(codec, environment.stop)
        found.add_reply(added)
