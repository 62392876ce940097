"""Assigns the samples of a rollout to ranks and micro-batches, by length.

Under ZeRO-3 the ranks wait for each other in every layer: micro-batch k of all ranks takes as long
as the slowest of them. Here micro-batch k costs nearly the same on every rank. The result depends
on prompts, lengths and a seed alone, not on the order in which responses were finished.

Which samples share an optimizer step is drawn by the seed, whatever their lengths: one step of
long responses and one of short ones would be another optimizer.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from typing import Any

#: [rank][micro-batch] -> indices of its samples.
Assignment = list[list[list[int]]]

#: Numbers of micro-batches per rank that :func:`variable_size_steps` tries, from the fewest that
#: the tokens allow.
_TRIED_COUNTS = 4
#: More micro-batches, each of which gathers the model's weights anew, must save this share of time.
_MIN_GAIN = 0.01


def optimizer_steps(samples: int, step: int, seed: int, rollout: int) -> list[list[int]]:
    """The samples of each optimizer step, by a permutation that seed and rollout decide.

    Args:
        samples: number of samples of the rollout.
        step: samples per optimizer step.
        seed: of the run.
        rollout: its number in the run, so that a resumed run draws the same steps.

    Raises:
        ValueError: ``samples`` is no multiple of ``step``.
    """
    if samples % step:
        raise ValueError(f"{samples} samples: no multiple of the {step} of an optimizer step")
    order = list(range(samples))
    random.Random(f"{seed}/{rollout}").shuffle(order)
    return [order[i : i + step] for i in range(0, samples, step)]


def balance(
    lengths: Sequence[int], ranks: int, size: int, *, packed: bool, neighbours: bool = False
) -> Assignment:
    """Micro-batches of ``size`` samples for every rank, the longest first.

    Padded: a micro-batch takes the time of its longest sample, so its samples should have similar
    lengths. Samples go to the ranks by length in snake order (1 2 3 3 2 1 1 2 3 ...).

    Packed: a micro-batch takes the time of its tokens. From the longest on, each sample goes to the
    micro-batch with the fewest tokens that is not full (Graham's rule). The micro-batches then go
    to the ranks by tokens in snake order. None has many more tokens than the mean, which limits the
    peak of memory.

    Args:
        lengths: tokens of each sample.
        ranks: data-parallel ranks.
        size: samples of a micro-batch; a single rank may have a smaller last one.
        packed: whether a micro-batch is one row of tokens, without padding.
        neighbours: on a single rank, keep the samples in order instead. Responses to one prompt
            then share a micro-batch, which computes the prompt once.

    Raises:
        ValueError: the samples are no multiple of ``ranks * size``.
    """
    if ranks > 1 and len(lengths) % (ranks * size):
        raise ValueError(f"{len(lengths)} samples: no multiple of {ranks} ranks times {size}")
    if neighbours and ranks == 1:
        order = range(len(lengths))
        return [[list(order[i : i + size]) for i in range(0, len(order), size)]]
    by_length = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    if not packed:
        rows = [by_length[i : i + ranks] for i in range(0, len(by_length), ranks)]
        per_rank = _snake_order(rows, ranks)
        return [[own[i : i + size] for i in range(0, len(own), size)] for own in per_rank]
    count = -(-len(lengths) // size)
    micro_batches: list[list[int]] = [[] for _ in range(count)]
    not_full = [(0, i) for i in range(count)]
    for sample in by_length:
        tokens, i = heapq.heappop(not_full)
        micro_batches[i].append(sample)
        if len(micro_batches[i]) < size:
            heapq.heappush(not_full, (tokens + lengths[sample], i))
    micro_batches.sort(key=lambda samples: -sum(lengths[i] for i in samples))
    return _snake_order([micro_batches[i : i + ranks] for i in range(0, count, ranks)], ranks)


def balance_steps(
    lengths: Sequence[int],
    steps: Sequence[Sequence[int]],
    ranks: int,
    size: int,
    *,
    packed: bool,
    neighbours: bool = False,
) -> Assignment:
    """:func:`balance` for each optimizer step, one after the other.

    Args:
        lengths: tokens of each sample.
        steps: indices of the samples of each optimizer step.
        ranks: data-parallel ranks.
        size: samples of a micro-batch.
        packed: see :func:`balance`.
        neighbours: see :func:`balance`.
    """
    assignment: Assignment = [[] for _ in range(ranks)]
    for drawn in steps:
        step = sorted(drawn) if neighbours else drawn
        in_step = balance(
            [lengths[i] for i in step], ranks, size, packed=packed, neighbours=neighbours
        )
        for of_rank, micro_batches in zip(assignment, in_step, strict=True):
            of_rank.extend([step[i] for i in samples] for samples in micro_batches)
    return assignment


def variable_size_steps(
    lengths: Sequence[int],
    steps: Sequence[Sequence[int]],
    ranks: int,
    size: int,
    costs: Sequence[float],
    *,
    max_tokens: int,
    packed: bool = True,
) -> list[Assignment]:
    """Packed micro-batches of any number of samples, filled to a number of tokens.

    Micro-batch k costs the same on every rank: next to one long response, the other ranks get
    several short ones. The fewest micro-batches that the tokens allow are tried, and a few more.
    For each number the samples are assigned by Graham's rule from the costliest on, and
    micro-batches of similar cost run together. The number that waits least is taken. Padded
    micro-batches keep ``size`` samples.

    Args:
        lengths: tokens of each sample.
        steps: indices of the samples of each optimizer step.
        ranks: data-parallel ranks.
        size: samples of a micro-batch that always fits.
        costs: of each sample, in seconds or proportional to them.
        max_tokens: of a micro-batch, for which memory is reserved; at least the longest sample's.
        packed: whether a micro-batch is one row of tokens, without padding.

    Returns:
        An assignment per step, with the same number of micro-batches for each rank, none empty.

    Raises:
        ValueError: see :func:`balance`.
    """
    fixed = [balance_steps(lengths, [step], ranks, size, packed=packed) for step in steps]
    if not packed:
        return fixed
    return [
        _variable_size(lengths, step, ranks, max(max_tokens, *lengths), costs, of_fixed_size)
        for step, of_fixed_size in zip(steps, fixed, strict=True)
    ]


def _variable_size(
    lengths: Sequence[int],
    step: Sequence[int],
    ranks: int,
    max_tokens: int,
    costs: Sequence[float],
    fixed: Assignment,
) -> Assignment:
    fewest = -(-sum(lengths[i] for i in step) // (max_tokens * ranks))
    order = sorted(step, key=lambda i: -costs[i])
    best, best_time = fixed, float("inf")
    for count in range(fewest, min(fewest + _TRIED_COUNTS, len(fixed[0]) + 1)):
        micro_batches = _by_cost(lengths, order, ranks * count, max_tokens, costs)
        if micro_batches is None:
            continue
        together = [micro_batches[k : k + ranks] for k in range(0, ranks * count, ranks)]
        assignment = [list(of_rank) for of_rank in zip(*together, strict=True)]
        time = _time(assignment, costs)
        if time < best_time * (1 - _MIN_GAIN):
            best, best_time = assignment, time
    return fixed if _time(fixed, costs) < best_time * (1 - _MIN_GAIN) else best


def _by_cost(
    lengths: Sequence[int],
    order: Sequence[int],
    count: int,
    max_tokens: int,
    costs: Sequence[float],
) -> list[list[int]] | None:
    """``count`` micro-batches, the costliest first; None if they do not fit ``max_tokens``.

    Args:
        lengths: tokens of each sample.
        order: the samples to assign, each to the cheapest micro-batch that it fits into.
        count: number of micro-batches, at most one per sample.
        max_tokens: of a micro-batch.
        costs: of each sample.
    """
    micro_batches: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    by_cost = [(0.0, k) for k in range(count)]
    for i in order:
        full = []
        while by_cost and tokens[by_cost[0][1]] + lengths[i] > max_tokens:
            full.append(heapq.heappop(by_cost))
        if not by_cost:
            return None
        cost, k = by_cost[0]
        micro_batches[k].append(i)
        tokens[k] += lengths[i]
        heapq.heapreplace(by_cost, (cost + costs[i], k))
        for entry in full:
            heapq.heappush(by_cost, entry)
    return sorted(micro_batches, key=lambda samples: -sum(costs[i] for i in samples))


def _time(assignment: Assignment, costs: Sequence[float]) -> float:
    per_rank = [[sum(costs[i] for i in samples) for samples in own] for own in assignment]
    return sum(max(together) for together in zip(*per_rank, strict=True))


def idle_fraction(costs: Sequence[Sequence[float]]) -> float:
    """Share of the ranks' time in which they wait for the slowest, micro-batch by micro-batch.

    Args:
        costs: [rank][micro-batch], in seconds or proportional to them.
    """
    slowest = sum(max(together) for together in zip(*costs, strict=True))
    return 1 - sum(sum(of_rank) for of_rank in costs) / (len(costs) * slowest)


def _snake_order(rows: Sequence[Sequence[Any]], ranks: int) -> list[list[Any]]:
    """One item of every row for each rank; every second row from the last rank on."""
    per_rank: list[list[Any]] = [[] for _ in range(ranks)]
    for number, row in enumerate(rows):
        for index, item in enumerate(row):
            per_rank[index if number % 2 == 0 else ranks - 1 - index].append(item)
    return per_rank
