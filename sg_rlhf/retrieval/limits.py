"""Limits of a retrieval server: sizes of requests, the queue, batches and the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: Passages in one answer: about 160 MB of JSON.
MAX_PASSAGES = 262_144


def _limit(default: int, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class Limits:
    """Limits of one server; each is a flag of the same name."""

    topk: int = _limit(3, "passages per query if the request has no topk")
    max_topk: int = _limit(100, "maximum topk of a request, else status 422")
    max_queries: int = _limit(16_384, "maximum queries per request, else status 422")
    max_query_chars: int = _limit(8192, "characters per query; the rest is cut off")
    max_body_mb: int = _limit(64, "maximum MiB of a request, else status 413")
    max_batch: int = _limit(256, "maximum queries that are searched together")
    max_wait_ms: int = _limit(5, "ms that a query waits for others after a batch of several")
    max_pending: int = _limit(65_536, "maximum queries in the queue; more are refused")
    cache_size: int = _limit(10_000, "maximum answers in the cache; 0: no cache")
    busy_status: int = _limit(429, "status of a refused request: 429, or 503 for clients that "
        "retry only after 5xx")  # fmt: skip
