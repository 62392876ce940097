"""Micro-batches of any number of samples, so that those of all ranks at a time cost the same.

With a fixed number of samples a micro-batch, a long response is one of many tokens beside others of
few, and every rank waits for it. Here the others of that moment get more samples: a round, one
micro-batch on every rank, costs as much as its longest sample, for as long as that is more than a
micro-batch's share of what is left. What is left then is dealt evenly. Padded micro-batches, each
sample of which costs as much as its longest, have a dealer of their own
(:mod:`sg_rlhf.batching.padded_rounds`).
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Sequence

from sg_rlhf.batching import padded_rounds
from sg_rlhf.batching.balance import Assignment
from sg_rlhf.batching.balance import balance_steps as deal_fixed

#: Steps in which costs are counted where a round is filled.
GRAINS = 2048
#: Of the samples that fit, so many of the costliest and of the cheapest are looked at.
WINDOW = 64
#: Numbers of rounds that are tried, from the fewest on that the tokens allow.
TRIED = 3
#: The same of padded ones, whose fewest rounds are of much padding: more, and further apart.
PADDED_TRIED, PADDED_GROWTH = 6, 1.15
#: More rounds, each of which gathers the weights of a model anew, must save this share of the time.
WORTH = 0.01


def variable_size_steps(
    lengths: Sequence[int],
    steps: Sequence[Sequence[int]],
    ranks: int,
    size: int,
    costs: Sequence[float],
    *,
    packed: bool = True,
) -> list[Assignment]:
    """Micro-batches for every rank, step by step.

    None has more tokens, those of padding too, than the largest one of ``size`` samples would have
    in all these steps.

    Args:
        lengths: tokens of each sample.
        steps: the samples of each.
        ranks: that wait for each other.
        size: samples of the micro-batches that say how many tokens fit.
        costs: of each sample, seconds or whatever is proportional to them.
        packed: whether a micro-batch is one row of tokens.

    Returns:
        For each step and rank as many micro-batches as for the others, none empty, each sample
        once.

    Raises:
        ValueError: of :func:`sg_rlhf.batching.balance.balance`.
    """
    fixed = [deal_fixed(lengths, [step], ranks, size, packed=packed) for step in steps]
    if ranks == 1:
        return fixed
    of = sum if packed else padded_rounds.padded
    most = max(of(lengths[i] for i in s) for dealt in fixed for hand in dealt for s in hand)
    return [
        _step(lengths, step, ranks, int(most), costs, dealt, packed)
        for step, dealt in zip(steps, fixed, strict=True)
    ]


def _step(
    lengths: Sequence[int],
    step: Sequence[int],
    ranks: int,
    most: int,
    costs: Sequence[float],
    fixed: Assignment,
    packed: bool,
) -> Assignment:
    best, best_time, tried = fixed, _time(fixed, costs, packed), 0
    fewest = -(-sum(lengths[i] for i in step) // (most * ranks))
    numbers = range(fewest, len(fixed[0]) + 1)
    way, most_tried = (_in_rounds, TRIED) if packed else (padded_rounds.in_rounds, PADDED_TRIED)
    for rounds in numbers if packed else _spread_out(numbers):
        dealt = way(lengths, step, ranks, rounds, most, costs)
        if dealt is None:
            continue
        tried += 1
        time = _time(dealt, costs, packed)
        if time < best_time * (
            1 - WORTH if best is not fixed or rounds == len(fixed[0]) else 1 + WORTH
        ):
            best, best_time = dealt, time
        if tried == most_tried:
            break
    return best


def _spread_out(numbers: range) -> Iterator[int]:
    """Some of them, each larger than the last one by a share."""
    number = numbers.start
    while number in numbers:
        yield number
        number = max(number + 1, round(number * PADDED_GROWTH))


def _time(dealt: Assignment, costs: Sequence[float], packed: bool) -> float:
    of = sum if packed else padded_rounds.padded
    of_ranks = [[of(costs[i] for i in samples) for samples in hand] for hand in dealt]
    return sum(max(at_once) for at_once in zip(*of_ranks, strict=True))


def _in_rounds(
    lengths: Sequence[int],
    step: Sequence[int],
    ranks: int,
    rounds: int,
    most: int,
    costs: Sequence[float],
) -> Assignment | None:
    """So many rounds; None where a micro-batch would have more than ``most`` tokens."""
    left = sorted(step, key=lambda i: -costs[i])
    sizes = [-costs[i] for i in left]  # in order, to be searched
    found: list[list[list[int]]] = []
    while len(found) < rounds:
        micro_batches = ranks * (rounds - len(found))
        share = -sum(sizes) / micro_batches
        if len(found) == rounds - 1 or -sizes[0] <= share:
            found += _alike(left, micro_batches, ranks, costs)
            break
        goal, at_once = -sizes[0], []
        for rank in range(ranks):
            # One at least for each micro-batch that is still to come.
            spare = len(left) - (micro_batches - rank - 1)
            places = _fill(sizes, goal)[: max(spare, 1)]
            while len(places) > 1 and sum(lengths[left[k]] for k in places) > most:
                places.pop()
            at_once.append([left[k] for k in places])
            for k in reversed(places):
                del left[k], sizes[k]
        found.append(at_once)
    of_all = [samples for at_once in found for samples in at_once]
    if not all(of_all) or any(sum(lengths[i] for i in samples) > most for samples in of_all):
        return None
    return [list(hand) for hand in zip(*found, strict=True)]


def _alike(
    left: Sequence[int], count: int, ranks: int, costs: Sequence[float]
) -> list[list[list[int]]]:
    """So many micro-batches, in rounds of those whose costs are nearest: of samples from the
    costliest on, each goes to the micro-batch that costs least (Graham's rule)."""
    micro_batches: list[list[int]] = [[] for _ in range(count)]
    loads = [(0.0, k) for k in range(count)]
    for i in left:
        load, k = heapq.heappop(loads)
        micro_batches[k].append(i)
        heapq.heappush(loads, (load + costs[i], k))
    micro_batches.sort(key=lambda samples: -sum(costs[i] for i in samples))
    return [micro_batches[k : k + ranks] for k in range(0, count, ranks)]


def _fill(sizes: Sequence[float], goal: float) -> list[int]:
    """Places of the costliest sample, and of others with which it comes near to ``goal``.

    A subset sum over whole grains: bit n of ``reached[k]`` says that some of the first k others
    cost n grains. Of the sets with that sum it is one of costlier samples: short ones are left for
    later.

    Args:
        sizes: costs of the samples, negative, in order.
    """
    room = goal + sizes[0]
    fits = max(1, bisect.bisect_left(sizes, -room))
    others = [*range(fits, len(sizes))]
    if len(others) > 2 * WINDOW:
        others = others[:WINDOW] + others[-WINDOW:]
    grain = goal / GRAINS
    grains = [max(1, round(-sizes[k] / grain)) for k in others]
    within = (1 << (round(room / grain) + 1)) - 1
    reached = [1]
    for n in grains:
        reached.append((reached[-1] | reached[-1] << n) & within)
    total = reached[-1].bit_length() - 1
    chosen = []
    for number in range(len(others) - 1, -1, -1):
        if not reached[number] >> total & 1:
            chosen.append(others[number])
            total -= grains[number]
    return [0, *reversed(chosen)]
