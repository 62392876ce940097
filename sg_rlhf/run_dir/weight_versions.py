"""Weight version of each token, and its staleness when it is trained.

A weight version is the number of rollouts that the policy had been trained on. A response has runs
(start, version): ``version`` sampled its tokens from ``start`` until the next run. Only the model's
own tokens count, over all turns of a dialogue; text of an environment does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

VersionRuns = Sequence[Sequence[int]]

#: Key of metrics.jsonl, to which the age in weight syncs is appended.
SHARE_OF_AGE = "async/staleness_share_"


def append_version(runs: list[list[int]], tokens: int, version: int) -> None:
    """Record that ``version`` samples the tokens after a response's first ``tokens``, in place."""
    if runs and runs[-1][0] == tokens:  # the previous version sampled no token
        runs.pop()
    if not runs or runs[-1][1] != version:
        runs.append([tokens, version])


def oldest_version(runs: VersionRuns) -> int:
    """The oldest weight version of a response's tokens."""
    return min(version for _, version in runs)


def tokens_by_version(runs: VersionRuns, tokens: int) -> Counter[int]:
    """Weight version -> number of the response's ``tokens`` that it sampled."""
    counts: Counter[int] = Counter()
    for (start, version), end in zip(
        runs, [start for start, _ in runs[1:]] + [tokens], strict=True
    ):
        counts[version] += max(0, min(end, tokens) - start)
    return +counts


def staleness(
    responses: Iterable[tuple[VersionRuns, int]], version: int, bound: int
) -> dict[str, float]:
    """The ``async/*`` metrics of a rollout step.

    Args:
        responses: (runs, tokens) of each trained response.
        version: weight version of the policy before the update.
        bound: largest staleness that is trained.

    Returns:
        ``staleness_mean`` and ``_max`` over tokens, and ``staleness_share_S`` for S from 0 to
        ``bound`` (a histogram).
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
    }
