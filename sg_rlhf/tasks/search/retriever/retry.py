"""Which failed requests are sent again, and for how long.

One rule holds for every temporary failure: the request is sent again up to `retries` times, and
after that as long as the retriever has been away for less than `outage_s` seconds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum, auto

#: Maximum seconds between two requests; the end of an outage is noticed this late at most.
MAX_BACKOFF_S = 2.0
#: An outage is reported after this many seconds. A server that sheds load is away for less.
REPORTED_AFTER_S = 1.0
#: Statuses of a gateway without a server behind it, and of a server that asks to come back later.
_AWAY = frozenset({429, 502, 503, 504})
#: Statuses of one bad query among others.
_OF_CONTENT = frozenset({400, 413, 422})


class Cause(Enum):
    """Why a request has no answer."""

    AWAY = auto()
    TIMEOUT = auto()
    SERVER_ERROR = auto()
    BAD_QUERY = auto()
    BAD_ANSWER = auto()

    @property
    def is_temporary(self) -> bool:
        """Whether the same request may succeed later."""
        return self in (Cause.AWAY, Cause.TIMEOUT, Cause.SERVER_ERROR)


class RequestError(Exception):
    """A request without a usable answer.

    Args:
        retry_after_s: seconds that the server asks to wait.
    """

    def __init__(self, cause: Cause, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.cause = cause
        self.retry_after_s = retry_after_s


def error_of_status(status: int, message: str, retry_after: str | None) -> RequestError:
    """The error of an HTTP status; `retry_after` is the header, in seconds or as a date."""
    if status in _AWAY:
        return RequestError(Cause.AWAY, message, _seconds(retry_after))
    if status in (408, 425) or status >= 500:
        return RequestError(Cause.SERVER_ERROR, message)
    return RequestError(Cause.BAD_QUERY if status in _OF_CONTENT else Cause.BAD_ANSWER, message)


class OutageClock:
    """Measures how long a retriever has been away, for all requests of a client.

    Args:
        limit_s: maximum seconds to wait for it; 0: do not wait.
        notify: called when an outage is reported and when it ends.
    """

    def __init__(self, limit_s: float, notify: Callable[[str], None]) -> None:
        self.limit_s = limit_s
        self._notify = notify
        self._since: float | None = None
        self._reported = False

    def failed(self, error: RequestError) -> float:
        """Record a temporary failure; returns the start of the outage (monotonic seconds)."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if self.limit_s and not self._reported and now - self._since >= REPORTED_AFTER_S:
            self._reported = True
            self._notify(f"{error}; waiting for it, up to {self.limit_s:g} s (outage_s)")
        return self._since

    def answered(self) -> None:
        """Record an answer: an outage ends."""
        if self._reported and self._since is not None:
            self._notify(f"answers again after {time.monotonic() - self._since:.0f} s")
        self._since, self._reported = None, False


class RetryPolicy:
    """Decides whether one request is sent again, and after how long.

    Attributes:
        failures: number of its temporary failures.
        exhausted: it is not sent again.
    """

    def __init__(
        self, clock: OutageClock, retries: int, backoff_s: float, rng: random.Random
    ) -> None:
        self.failures = 0
        self.exhausted = False
        self._clock = clock
        self._retries = retries
        self._backoff_s = backoff_s
        self._rng = rng
        self._first_failure: float | None = None

    def wait(self, error: RequestError) -> float | None:
        """Seconds until the next request; None: there is none."""
        if not error.cause.is_temporary:
            return None
        now = time.monotonic()
        outage_start = self._clock.failed(error)
        if self._first_failure is None:
            self._first_failure = now
        # Answers to other requests restart the clock, but this request must end too.
        until = min(outage_start, self._first_failure) + self._clock.limit_s
        limit = min(self._backoff_s * 2**self.failures, MAX_BACKOFF_S)
        self.failures += 1
        self.exhausted = (self.failures > self._retries and now >= until) or (
            error.retry_after_s > max(self._clock.limit_s, MAX_BACKOFF_S)
        )
        if self.exhausted:
            return None
        drawn = self._rng.uniform(0.0, limit)
        return max(min(drawn, until - now) if now < until else drawn, error.retry_after_s)

    def should_split(self, error: RequestError) -> bool:
        """Whether the queries of a failed request are sent in two: one of them may be the cause.

        A server error is likely to pass, so the queries stay together for one more request. A
        retriever that hangs would hang for each part, so an exhausted request is not split.
        """
        if error.cause is Cause.SERVER_ERROR:
            return self.failures > 1 or self.exhausted
        return error.cause is Cause.BAD_QUERY or (
            error.cause is Cause.TIMEOUT and not self.exhausted
        )


def _seconds(retry_after: str | None) -> float:
    """Seconds of the header; 0 if it cannot be read."""
    if retry_after is None:
        return 0.0
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        until = parsedate_to_datetime(retry_after)
    except ValueError:
        return 0.0
    return max(0.0, (until.replace(tzinfo=until.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
