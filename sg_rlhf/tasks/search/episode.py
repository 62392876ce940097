"""A search dialogue in text, turn by turn, by the rules of `sg_rlhf.tasks.search.dialogue`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sg_rlhf.tasks.episode import Reply
from sg_rlhf.tasks.grade import Grader
from sg_rlhf.tasks.search.dialogue import SearchFailed
from sg_rlhf.tasks.search.grading import parse_golds, score
from sg_rlhf.tasks.search.protocol import (
    CORRECTION,
    FAILED,
    OBSERVATION_END,
    OBSERVATION_START,
    Kind,
    clean_query,
    format_passages,
    parse_action,
)
from sg_rlhf.tasks.search.retriever.client import RetrieverClient
from sg_rlhf.tasks.search.settings import SearchSettings

#: A tokenizer's tokens have about this many characters: `observation_tokens` becomes a length.
CHARACTERS_OF_A_TOKEN = 4


class SearchEpisode:
    """Search until an answer: `max_turns` turns may search, one more may only answer.

    Args:
        row: of a data set: `input` is the prompt, `answer` a JSON array of reference answers.
        grade: unused; the answer is graded by `settings.reward`.
        settings: `sg.search.*`; `turn_tokens` is the client's business.
    """

    def __init__(self, row: Mapping[str, Any], grade: Grader, settings: SearchSettings) -> None:
        self.prompt = str(row["input"])
        self._golds = parse_golds(str(row["answer"]))
        self._settings = settings
        self._client = RetrieverClient.from_settings(settings)
        self._turns_left = settings.max_turns

    async def step(self, turn: str) -> Reply:
        action = parse_action(turn)
        is_last = not self._turns_left
        self._turns_left -= 1
        if action.kind is Kind.ANSWER:
            return self._end(action.content)
        if is_last or (action.kind is Kind.INVALID and self._settings.invalid == "end"):
            return self._end(None)
        if action.kind is Kind.INVALID:
            return Reply(CORRECTION)
        query = clean_query(action.content, self._settings.max_query_chars)
        try:
            body = format_passages(await self._client.search(query))
        except SearchFailed:
            body = FAILED
        limit = self._settings.observation_tokens * CHARACTERS_OF_A_TOKEN
        return Reply(f"{OBSERVATION_START}{body[:limit]}{OBSERVATION_END}")

    async def close(self) -> None:
        await self._client.aclose()

    def _end(self, answer: str | None) -> Reply:
        return Reply(grade=score(answer, self._golds, self._settings.reward))
