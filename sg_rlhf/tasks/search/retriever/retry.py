"""Which failed requests are sent again, and how long a retriever that is away is waited for."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum, auto

#: The longest wait between two requests, in seconds: so late an end of an outage is noticed.
MAX_BACKOFF_S = 2.0
#: An outage is told when it has lasted this long: a server that sheds load is away for less.
TOLD_AFTER_S = 1.0
#: Statuses of a gateway without a server behind it, and of a server that asks to come back later.
_AWAY = frozenset({429, 502, 503, 504})
#: Statuses of one bad query among others.
_OF_CONTENT = frozenset({400, 413, 422})


class Kind(Enum):
    """Why a request has no answer."""

    AWAY = auto()
    SLOW = auto()
    FAILING = auto()
    BAD_QUERY = auto()
    REFUSED = auto()


class Problem(Exception):
    """A request without a usable answer.

    Args:
        retry_after_s: how long the server asks to stay away.
    """

    def __init__(self, kind: Kind, said: str, retry_after_s: float = 0.0) -> None:
        super().__init__(said)
        self.kind = kind
        self.retry_after_s = retry_after_s

    def halves(self, patience: Patience) -> bool:
        """Whether its queries shall be asked in two requests: one of them may be at fault."""
        if self.kind is Kind.FAILING:  # once: of whatever cause, and likely to pass
            return patience.over or patience.failures > 1
        return self.kind is Kind.BAD_QUERY or (self.kind is Kind.SLOW and not patience.over)


def problem_of_status(status: int, said: str, retry_after: str | None) -> Problem:
    """What an HTTP status means; `retry_after` is the header, in seconds or as a date."""
    if status in _AWAY:
        return Problem(Kind.AWAY, said, _seconds(retry_after))
    if status in (408, 425) or status >= 500:
        return Problem(Kind.FAILING, said)
    return Problem(Kind.BAD_QUERY if status in _OF_CONTENT else Kind.REFUSED, said)


class Outage:
    """Since when a retriever is away, for all requests of a client.

    Args:
        limit_s: how long it is waited for; 0: not at all.
        tell: is told when the waiting starts and ends.
    """

    def __init__(self, limit_s: float, tell: Callable[[str], None]) -> None:
        self.limit_s = limit_s
        self._tell = tell
        self._since: float | None = None
        self._told = False

    def goes_on(self, problem: Problem) -> float:
        """A request failed; since when the retriever is away."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if self.limit_s and not self._told and now - self._since >= TOLD_AFTER_S:
            self._told = True
            self._tell(f"{problem}; waiting for it, up to {self.limit_s:g} s (outage_s)")
        return self._since

    def ended(self) -> None:
        """A request was answered."""
        if self._told and self._since is not None:
            self._tell(f"answers again after {time.monotonic() - self._since:.0f} s")
        self._since, self._told = None, False


class Patience:
    """How often, and for how long, one request is tried again.

    Attributes:
        failures: requests that failed and could have been tried again.
        over: there shall be no other request.
    """

    def __init__(self, outage: Outage, retries: int, backoff_s: float, rng: random.Random) -> None:
        self.failures = 0
        self.over = False
        self._outage = outage
        self._retries = retries
        self._backoff_s = backoff_s
        self._rng = rng
        self._first_failure: float | None = None

    def wait(self, problem: Problem) -> float | None:
        """Seconds to the next request; None: there shall be none."""
        if problem.kind in (Kind.BAD_QUERY, Kind.REFUSED):
            return None
        until = now = time.monotonic()
        if problem.kind is not Kind.FAILING:
            since = self._outage.goes_on(problem)
            if self._first_failure is None:
                self._first_failure = now
            # While others are answered the outage begins anew, and this one must end too.
            until = min(since, self._first_failure) + self._outage.limit_s
        limit = min(self._backoff_s * 2**self.failures, MAX_BACKOFF_S)
        self.failures += 1
        self.over = (self.failures > self._retries and now >= until) or (
            problem.retry_after_s > max(self._outage.limit_s, MAX_BACKOFF_S)
        )
        if self.over:
            return None
        drawn = self._rng.uniform(0.0, limit)
        return max(min(drawn, until - now) if now < until else drawn, problem.retry_after_s)


def _seconds(retry_after: str | None) -> float:
    """The header's seconds, 0 where it says nothing readable."""
    if retry_after is None:
        return 0.0
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        until = parsedate_to_datetime(retry_after)
    except ValueError:
        return 0.0
    return max(0.0, (until.replace(tzinfo=until.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
