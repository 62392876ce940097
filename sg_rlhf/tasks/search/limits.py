"""Limits of the retriever's client and of failed searches; every run has the same ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of an engine's searches; tests pass other values."""

    max_query_chars: int = 8192  # a longer query is cut
    timeout_s: float = 60.0  # of one request of up to max_batch queries
    retries: int = 3
    outage_s: float = 60.0  # to wait for a retriever that is away or fails
    backoff_s: float = 0.25  # before the first retry; doubles, with jitter
    max_connections: int = 8
    max_batch: int = 64
    max_failure_rate: float = 0.1  # of the latest failure_window searches, above which a run stops
    failure_window: int = 200
    min_searches: int = 16  # before the share counts


#: The limits of every run.
LIMITS = Limits()
