"""Limits of a retrieval server: sizes of requests, the queue, batches and the cache."""

from __future__ import annotations

from dataclasses import dataclass

#: Passages in one answer: about 160 MB of JSON.
MAX_PASSAGES = 262_144
#: Longest time that a query may wait for others, in ms.
MAX_WAIT_MS = 60_000


@dataclass(frozen=True)
class Limits:
    """Limits of one server. `server.LIMIT_FLAGS` explains them."""

    max_queries: int = 16_384
    max_query_chars: int = 8192
    max_topk: int = 100
    default_topk: int = 3
    max_body_mb: int = 64
    busy_status: int = 429
    max_batch: int = 256
    max_wait_ms: float = 3
    max_pending: int = 65_536
    cache_size: int = 100_000
    cache_mb: int = 256

    def check(self) -> None:
        """Refuse limits that contradict each other.

        Raises:
            ValueError: naming the flags.
        """
        if self.max_topk > MAX_PASSAGES:
            raise ValueError(
                f"--max-topk {self.max_topk}: an answer has at most {MAX_PASSAGES} passages"
            )
        if self.max_wait_ms > MAX_WAIT_MS:
            raise ValueError(f"--max-wait-ms {self.max_wait_ms:g}: at most {MAX_WAIT_MS}")
        if self.default_topk > self.max_topk:
            raise ValueError(f"--topk {self.default_topk}: above --max-topk {self.max_topk}")
        if self.max_queries > self.max_pending:
            raise ValueError(
                f"--max-queries {self.max_queries}: above --max-pending {self.max_pending}, "
                "so such a request could never be accepted"
            )

    @property
    def max_body(self) -> int:
        """Bytes of the largest request."""
        return self.max_body_mb * 2**20
