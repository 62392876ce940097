"""Which weights sampled a token, and how old those were when the token was trained.

A version is the number of rollouts that the policy had been trained on. A response has runs of
(start, version): from its own token ``start`` on, until the next run, ``version`` sampled it. Text
that an environment wrote is none of a response's own tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

VersionRuns = Sequence[Sequence[int]]

#: Keys of metrics.jsonl: behind the first stands the age in weight syncs.
SHARE_OF_AGE, DROPPED_SHARE = "async/staleness_share_", "async/dropped_share"
DROPPED_TOKENS = "async/dropped_tokens"


def append_version(runs: list[list[int]], tokens: int, version: int) -> None:
    """Other weights sample what follows a response's first ``tokens``."""
    if runs and runs[-1][0] == tokens:  # the latest weights sampled none of it
        runs.pop()
    if not runs or runs[-1][1] != version:
        runs.append([tokens, version])


def oldest_version(runs: VersionRuns) -> int:
    """The oldest weights that sampled a token of the response."""
    return min(version for _, version in runs)


def tokens_by_version(runs: VersionRuns, tokens: int) -> Counter[int]:
    """Version -> how many of the response's ``tokens`` it sampled."""
    found: Counter[int] = Counter()
    for (start, version), end in zip(
        runs, [start for start, _ in runs[1:]] + [tokens], strict=True
    ):
        found[version] += max(0, min(end, tokens) - start)
    return +found


def staleness(
    responses: Iterable[tuple[VersionRuns, int]], version: int, bound: int, dropped: int
) -> dict[str, float]:
    """The ``async/*`` values of a rollout's row.

    Args:
        responses: (runs, tokens) of each response that is trained.
        version: of the policy before the rollout's update.
        bound: the largest staleness that is trained.
        dropped: tokens that were sampled and left out for their age since the last row.

    Returns:
        ``staleness_mean`` and ``_max`` over tokens, ``staleness_share_S`` for S from 0 to ``bound``
        (the histogram), ``dropped_tokens``, ``dropped_share`` of all that was sampled and taken.
    """
    by_age: Counter[int] = Counter()
    for runs, tokens in responses:
        for sampled_by, count in tokens_by_version(runs, tokens).items():
            by_age[version - sampled_by] += count
    total = by_age.total()
    shares = {f"{SHARE_OF_AGE}{age}": by_age[age] / max(total, 1) for age in range(bound + 1)}
    return {
        "async/staleness_mean": sum(a * n for a, n in by_age.items()) / max(total, 1),
        "async/staleness_max": float(max(by_age, default=0)),
        **shares,
        DROPPED_TOKENS: float(dropped),
        DROPPED_SHARE: dropped / max(total + dropped, 1),
    }
