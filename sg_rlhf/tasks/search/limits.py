"""Limits of the retriever's client and of failed searches; every run has the same ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of an engine's searches; tests pass other values.

    Attributes:
        max_query_chars: a longer query is cut.
        timeout_s: seconds that one request may take, from the connection to the whole answer.
        retries: further requests after a failed one.
        outage_s: seconds to wait for a retriever that is away or fails.
        backoff_s: seconds before the first retry; doubles, with jitter.
        max_connections: requests in flight at once.
        max_batch: maximum queries of a request.
        max_failure_rate: share of failed searches above which the run stops.
        failure_window: number of latest searches that the share is taken over.
        min_searches: number of searches before the share counts.
    """

    max_query_chars: int = 8192
    timeout_s: float = 10.0
    retries: int = 3
    outage_s: float = 60.0
    backoff_s: float = 0.25
    max_connections: int = 8
    max_batch: int = 64
    max_failure_rate: float = 0.1
    failure_window: int = 200
    min_searches: int = 16


#: The limits of every run.
LIMITS = Limits()
