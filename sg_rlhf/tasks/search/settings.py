"""What a search dialogue may do: the recipe's `sg.search.*` keys."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from sg_rlhf.tasks.search.grading import Scheme
from sg_rlhf.tasks.settings import DomainSettings, checked_url

Invalid = Literal["correct", "end"]

#: A shorter cap has no room for the tags around a result.
MIN_OBSERVATION_TOKENS = 32


class SearchSettings(DomainSettings):
    """Limits of a dialogue and of the retriever's client; defaults are Search-R1's (v0.2)."""

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
    max_query_chars: int = Field(8192, ge=1, description="a longer query is cut")
    invalid: Invalid = Field(
        "correct",
        description="a turn without an action: correct: the model gets a correction (Search-R1), "
        "end: the dialogue ends (VerlTool)",
    )
    reward: Scheme = Field("sign", description="sign: +1/-1 (Eq. 20), binary: 1/0, f1: token F1")
    timeout_s: float = Field(10.0, gt=0, description="seconds that one request may take")
    retries: int = Field(3, ge=0, description="further requests after a failed one")
    outage_s: float = Field(
        60.0, ge=0, description="seconds to wait for a retriever that is away or fails"
    )
    backoff_s: float = Field(
        0.25, ge=0, description="seconds before the first retry; doubles, with jitter"
    )
    max_connections: int = Field(
        8, ge=1, description="requests of one rollout engine under way at once"
    )
    max_batch: int = Field(64, ge=1, description="most queries of a request")
    max_failure_rate: float = Field(
        0.1, ge=0, lt=1, description="share of failed searches above which the run stops"
    )
    failure_window: int = Field(
        200, ge=1, description="latest searches of an engine that the share is taken over"
    )
    min_searches: int = Field(
        16, ge=1, description="searches of an engine before its share of failures counts"
    )

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        return checked_url(url, "http://HOST:PORT/retrieve")

    @model_validator(mode="after")
    def _window_holds_enough(self) -> SearchSettings:
        if self.min_searches > self.failure_window:
            raise ValueError(
                f"min_searches={self.min_searches} is above failure_window={self.failure_window}: "
                "the run could never stop"
            )
        return self
