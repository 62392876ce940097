"""The server's figures, for Prometheus to read at `/metrics`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class Metrics:
    """All figures of one server; each has a registry of its own, so tests can make several."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        name = "sg_retrieval_"
        self.requests = Counter(
            f"{name}requests", "Answers of /retrieve by status", ["status"], registry=registry
        )
        self.queries = Counter(f"{name}queries", "Queries answered", registry=registry)
        self.request_seconds = Histogram(
            f"{name}request_seconds", "From request to answer", buckets=SECONDS, registry=registry
        )
        self.search_seconds = Histogram(
            f"{name}search_seconds", "One batch", buckets=SECONDS, registry=registry
        )
        self.batch_size = Histogram(
            f"{name}batch_size",
            "Queries searched together",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
            registry=registry,
        )
        self.pending = Gauge(f"{name}pending", "Queries waiting or searched", registry=registry)
        self.cache_hits = Counter(f"{name}cache_hits", "Queries from the cache", registry=registry)
        self.cache_misses = Counter(f"{name}cache_misses", "Queries searched", registry=registry)

    def text(self) -> bytes:
        """Everything in Prometheus's text format."""
        return generate_latest(self._registry)
