"""The environment of the search domain: the model searches, reads passages, and answers."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sg_rlhf.common.text import single_line
from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.rollout import (
    Codec,
    Environment,
    EnvironmentFailed,
    EpisodeAborted,
    Reply,
    Turn,
)
from sg_rlhf.tasks.search.grading import occurs_in, parse_golds, score
from sg_rlhf.tasks.search.limits import LIMITS, Limits
from sg_rlhf.tasks.search.protocol import (
    CHARS_PER_TOKEN,
    CORRECTION,
    FAILED,
    OBSERVATION_END,
    OBSERVATION_START,
    STOP_STRINGS,
    Kind,
    Passage,
    claims_information,
    clean_query,
    count_tags,
    format_passages,
    headings,
    parse_action,
)
from sg_rlhf.tasks.search.retriever.client import RetrieverClient, RetrieverError
from sg_rlhf.tasks.search.settings import SearchSettings

_NO_WORD = re.compile(r"[^\w\s]")


class SearchEnvironment(Environment):
    """Search dialogues with one retriever.

    With `strict` a failed search aborts its episode. Otherwise the model is told, and too many
    failures (`max_failure_rate`) stop the run.
    """

    stop = STOP_STRINGS

    def __init__(
        self,
        settings: SearchSettings,
        *,
        strict: bool = False,
        notify: Callable[[str], None] | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        super().__init__(settings, strict=strict, notify=notify)
        self.settings = settings
        self.turn_tokens = self.settings.turn_tokens
        self.limits = limits
        self.client = RetrieverClient(settings, limits=limits, notify=notify)
        #: Whether each of the latest searches failed.
        self._failed: deque[bool] = deque(maxlen=limits.failure_window)

    def begin(self, row: Mapping[str, Any], codec: Codec) -> SearchEpisode:
        return SearchEpisode(self, parse_golds(str(row["answer"])), codec)

    async def check(self) -> None:
        try:
            await self.client.search("Beijing")
        except RetrieverError as error:
            raise EnvironmentFailed(
                f"{error}; start it with `sg-rlhf serve --index DIR --port P` and set sg.search.url"
            ) from None

    async def aclose(self) -> None:
        await self.client.aclose()

    async def search(self, query: str) -> list[Passage] | None:
        """The passages that a query finds, best first; None if the search failed."""
        try:
            passages = await self.client.search(query)
        except RetrieverError as error:
            if self.strict:
                raise EpisodeAborted(single_line(error)) from None
            self._failed.append(True)
            failed, searches = sum(self._failed), len(self._failed)
            limit = self.limits.max_failure_rate
            if searches >= self.limits.min_searches and failed > limit * searches:
                raise EnvironmentFailed(
                    f"{failed} of the last {searches} searches of a rollout engine failed "
                    f"(limit: {100 * limit:g} %); the last: {error}"
                ) from None
            return None
        self._failed.append(False)
        return passages


class SearchEpisode:
    """`max_turns` turns may search; one more follows that may only answer: a search there is not
    carried out.

    The answer comes from the model's own text. Retrieved text never counts.
    """

    def __init__(self, environment: SearchEnvironment, golds: Sequence[str], codec: Codec) -> None:
        self._environment = environment
        self._settings = environment.settings
        self._golds = golds
        self._codec = codec
        self._turns_left = self._settings.max_turns
        self._answer: str | None = None
        self._retrieved: list[str] = []
        self._made_up = False
        self._searches = self._failures = self._empty = self._invalid = 0
        self._seconds = 0.0

    async def step(self, turn: Turn) -> Reply:
        action = parse_action(turn.text)
        self._made_up |= claims_information(turn.text)
        is_search, is_invalid = action.kind is Kind.SEARCH, action.kind is Kind.INVALID
        self._invalid += is_invalid
        if action.kind is Kind.ANSWER:
            self._answer = action.content
            return Reply(done=True)
        if not self._turns_left:
            return Reply(done=True, truncated=turn.cut or is_search)
        self._turns_left -= 1
        if turn.is_last:
            return Reply(done=True, truncated=True)
        if is_search:
            longest = self._environment.limits.max_query_chars
            return await self._search(clean_query(action.content, longest))
        if self._settings.invalid == "correct":
            return Reply(CORRECTION, drop_end_of_turn=True)
        # VerlTool ends the dialogue, unless a closing tag ended the turn.
        if any(tag in turn.text for tag in STOP_STRINGS):
            return Reply()
        return Reply(done=True, truncated=turn.cut)

    def grade(self) -> Grade:
        """Exact match of the answer.

        `format_ok`: the dialogue ended in an answer, every action was valid, and no search result
        was made up. `logs["gold_retrieved"]`: a reference answer is in the passages shown.
        """
        found = score(self._answer, self._golds, self._settings.reward)
        shown = "\n".join(self._retrieved)
        logs = {
            **found.logs,
            "answered": float(self._answer is not None),
            "searches": float(self._searches),
            "invalid_actions": float(self._invalid),
            "made_up_information": float(self._made_up),
            "search_seconds": self._seconds,
            "retrieval_failures": float(self._failures),
            "retrieval_empty": float(self._empty),
            "gold_retrieved": float(any(occurs_in(gold, shown) for gold in self._golds)),
            "answer_retrieved": float(occurs_in(self._answer or "", shown)),
        }
        is_ok = bool(self._answer) and not self._invalid and not self._made_up
        return replace(found, format_ok=is_ok, logs=logs)

    async def _search(self, query: str) -> Reply:
        cap = self._settings.observation_tokens * self._codec.ids_per_token
        self._searches += 1
        started = time.monotonic()
        try:
            passages = await self._environment.search(query)
        finally:
            self._seconds += time.monotonic() - started
        if passages is None:
            self._failures += 1
            token_ids = encode_observation(FAILED, self._codec, cap)
            return Reply(self._codec.decode(token_ids), token_ids)
        self._empty += not passages
        token_ids, shown = encode_passages(passages, self._codec, cap)
        if passages:
            inside = shown
            for tag in (OBSERVATION_START, OBSERVATION_END):
                inside = inside.replace(tag.strip(), " ")
            self._retrieved.append(inside)
        return Reply(shown, token_ids)


def encode_passages(passages: Sequence[Passage], codec: Codec, cap: int) -> tuple[list[int], str]:
    """A search result as token ids, at most `cap`, and as the text that they stand for.

    A tokenizer that normalises (NFKC) reads a fullwidth `＜answer＞` as the tag. Where its reading
    has a tag too many, or a control token, the passages are neutralised as it reads them. If that
    does not help, all but letters and digits go.
    """
    empty = "\n".join(f"Doc {number}(" for number in range(1, len(passages) + 1))
    frame = codec.encode(f"{OBSERVATION_START}{empty}{OBSERVATION_END}")
    expected = codec.decode(frame)
    control = codec.control_ids.difference(frame)
    max_chars = cap * CHARS_PER_TOKEN
    readings: tuple[Callable[[str], str], ...] = (
        str,
        lambda text: codec.decode(codec.encode(text)),
        lambda text: _NO_WORD.sub(" ", text),
    )
    for reading in readings:
        some = []
        for passage in passages:
            title, text = reading(passage.title[:max_chars]), reading(passage.text[:max_chars])
            some.append(replace(passage, title=title, text=text))
        token_ids = encode_observation(format_passages(some, codec.control_tokens), codec, cap)
        shown = codec.decode(token_ids)
        if (
            count_tags(shown) <= count_tags(expected)
            and headings(shown) == headings(expected)[: len(headings(shown))]
            and control.isdisjoint(token_ids)
        ):
            break
    return token_ids, shown


def encode_observation(body: str, codec: Codec, cap: int) -> list[int]:
    """Token ids of a search result with its tags, at most `cap`: the text is cut, the tag kept."""
    token_ids = codec.encode(f"{OBSERVATION_START}{body}{OBSERVATION_END}")
    if len(token_ids) <= cap:
        return token_ids
    closing = codec.encode(OBSERVATION_END)
    kept = token_ids[: cap - len(closing)]
    for _ in range(3):  # a character of four bytes can be cut in three places
        if not codec.decode(kept).endswith("\N{REPLACEMENT CHARACTER}"):
            break
        kept.pop()
    return kept + closing
