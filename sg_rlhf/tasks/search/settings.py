"""What a search dialogue may do: the recipe's `sg.search.*` keys."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from sg_rlhf.tasks.search.grading import Scheme
from sg_rlhf.tasks.settings import DomainSettings, checked_url

Invalid = Literal["correct", "end"]

#: A shorter cap has no room for the tags around a result.
MIN_OBSERVATION_TOKENS = 32


class SearchSettings(DomainSettings):
    """Limits of a dialogue; defaults are Search-R1's (v0.2)."""

    section: ClassVar[str] = "search"
    about: ClassVar[str] = "dialogues with a search engine"

    url: str = Field("http://127.0.0.1:8000/retrieve", description="where queries are posted")
    topk: int = Field(3, ge=1, le=100, description="passages for a query")
    max_turns: int = Field(
        4, ge=0, description="turns that may search; one more follows that may only answer"
    )
    turn_tokens: int = Field(500, ge=1, description="most tokens that the model writes in a turn")
    observation_tokens: int = Field(
        500,
        ge=MIN_OBSERVATION_TOKENS,
        description="most tokens of a search result, its tags included",
    )
    invalid: Invalid = Field(
        "correct",
        description="a turn without an action: correct: the model gets a correction (Search-R1), "
        "end: the dialogue ends (VerlTool)",
    )
    reward: Scheme = Field("sign", description="sign: +1/-1 (Eq. 20), binary: 1/0, f1: token F1")

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        return checked_url(url, "http://HOST:PORT/retrieve")
