"""Stage b: packed attention without flash-attn, and log-probs without logits."""

from __future__ import annotations

from tests.gpu import log_prob_head, packed_attention
from tests.gpu.result import Job, Record


def run(record: Record, job: Job) -> None:
    """Both; neither needs the other."""
    packed_attention.run(record, job)
    log_prob_head.run(record, job)
