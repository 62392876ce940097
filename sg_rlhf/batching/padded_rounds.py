"""Padded micro-batches of any number of samples: those of all ranks at a time cost the same.

Each sample costs what its micro-batch's longest does, so samples of like length stand together: in
order of length a micro-batch is a stretch. Where one long sample fills a round, the other ranks get
stretches of n samples whose longest costs an n-th of it.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence

from sg_rlhf.batching.balance import Assignment

#: A stretch whose samples, without padding, cost this share of a round is good enough.
ENOUGH = 0.99
#: One of more and shorter samples must have that much more of it in them.
BETTER = 1.002
#: Halvings in the search for what all of the last rounds cost.
HALVINGS = 20


def padded(values: Iterable[float]) -> float:
    """Of a micro-batch whose samples all count as the largest."""
    values = list(values)
    return len(values) * max(values)


def in_rounds(
    lengths: Sequence[int],
    step: Sequence[int],
    ranks: int,
    rounds: int,
    most: int,
    costs: Sequence[float],
) -> Assignment | None:
    """So many rounds; None where a micro-batch would have more than ``most`` tokens.

    Args:
        lengths: tokens of each sample.
        step: the samples that are dealt.
        ranks: that wait for each other.
        rounds: micro-batches of each.
        most: tokens of a micro-batch, those of padding too.
        costs: of each sample; the longer, the more.
    """
    left = sorted(step, key=lambda i: -costs[i])
    found: list[list[list[int]]] = []
    while len(found) < rounds:
        micro_batches = ranks * (rounds - len(found))
        if len(left) < micro_batches:
            return None
        sizes = [-costs[i] for i in left]  # in order, to be searched
        tokens = [lengths[i] for i in left]
        share = -sum(sizes) / micro_batches
        if len(found) == rounds - 1 or -sizes[0] <= share:
            starts = _alike(sizes, tokens, micro_batches, most)
            if starts is None:
                return None
            parts = [left[a:b] for a, b in itertools.pairwise([*starts, len(left)])]
            parts.sort(key=lambda samples: -len(samples) * costs[samples[0]])
            found += [parts[k : k + ranks] for k in range(0, micro_batches, ranks)]
            break
        goal, at_once = -sizes[0], [left[:1]]
        del left[0], sizes[0], tokens[0]
        for rank in range(1, ranks):
            # One at least for each micro-batch that is still to come.
            spare = len(left) - (micro_batches - rank - 1)
            start, count = _stretch(sizes, tokens, goal, most, spare)
            at_once.append(left[start : start + count])
            for of_each in (left, sizes, tokens):
                del of_each[start : start + count]
        found.append(at_once)
    return [list(hand) for hand in zip(*found, strict=True)]


def _stretch(
    sizes: Sequence[float], tokens: Sequence[int], goal: float, most: int, spare: int
) -> tuple[int, int]:
    """Where it starts and how many samples it has: the most of ``goal`` without padding."""
    before = list(itertools.accumulate((-size for size in sizes), initial=0.0))
    best, found = 0.0, (len(sizes) - 1, 1)
    for count in range(1, spare + 1):
        # Rounding must not part samples that are alike.
        start = bisect.bisect_left(sizes, -goal / count * (1 + 1e-9))
        if start + count > len(sizes):
            break
        if count * tokens[start] <= most:
            used = before[start + count] - before[start]
            if used > best * BETTER:
                best, found = used, (start, count)
            if used >= ENOUGH * goal:
                break
    return found


def _alike(
    sizes: Sequence[float], tokens: Sequence[int], count: int, most: int
) -> list[int] | None:
    """Where so many stretches of all samples start, the costliest of which costs little."""
    low, high = -sizes[0], -sum(sizes)
    starts = _cut(sizes, tokens, high, most)
    if len(starts) > count:
        return None
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        tried = _cut(sizes, tokens, middle, most)
        if len(tried) <= count:
            high, starts = middle, tried
        else:
            low = middle
    while len(starts) < count:
        ends = [*starts[1:], len(sizes)]
        several = [(a, b) for a, b in zip(starts, ends, strict=True) if b - a > 1]
        a, b = max(several, key=lambda part: -(part[1] - part[0]) * sizes[part[0]])
        starts = sorted([*starts, (a + b) // 2])
    return starts


def _cut(sizes: Sequence[float], tokens: Sequence[int], cost: float, most: int) -> list[int]:
    """Where stretches start of which each costs at most ``cost``, or is one sample."""
    starts, start = [], 0
    while start < len(sizes):
        starts.append(start)
        start += max(1, min(int(cost / -sizes[start] * (1 + 1e-9)), most // tokens[start]))
    return starts
