"""Which samples of a rollout are computed together: a matter of prompts, lengths and a seed alone.

Ranks of ZeRO-3 wait for each other in every layer, so that a micro-batch takes as long as the
rank with the most tokens in it. Here each rank has nearly as many as the others in every
micro-batch, and the same rollout gives the same micro-batches, whatever was finished first.

Which samples share an optimizer step is drawn by a seed and never asks for lengths: a step of the
long answers and then one of the short ones would be another optimizer.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from typing import Any

#: [rank][micro-batch] -> the places of its samples.
Assignment = list[list[list[int]]]


def optimizer_steps(samples: int, step: int, seed: int, rollout: int) -> list[list[int]]:
    """The samples of each optimizer step, by a permutation that seed and rollout decide.

    Args:
        samples: of the rollout.
        step: samples of an optimizer step.
        seed: of the run.
        rollout: its number in the run, so that a resumed run goes on as it would have.

    Raises:
        ValueError: the samples are no whole number of steps.
    """
    if samples % step:
        raise ValueError(f"{samples} samples: no multiple of the {step} of an optimizer step")
    places = list(range(samples))
    random.Random(f"{seed}/{rollout}").shuffle(places)
    return [places[i : i + step] for i in range(0, samples, step)]


def balance(
    lengths: Sequence[int], ranks: int, size: int, *, packed: bool, neighbours: bool = False
) -> Assignment:
    """Micro-batches of ``size`` samples for every rank, the longest first.

    Padded to its longest sample, a micro-batch should have samples of like length: they are dealt
    to the ranks by length in snake order (1 2 3 3 2 1 1 2 3 ...), ``size`` rounds a micro-batch.
    Packed, it takes the time of its tokens, whatever their samples: from the longest on, each
    sample goes to the micro-batch with the fewest tokens that has room (Graham's rule; of two a
    micro-batch it is snake order), and these are dealt to the ranks by tokens in snake order. So
    no micro-batch has many more tokens than the mean, on which the peak of memory depends.

    Where a prompt is computed once for all its responses in a micro-batch, these should be in one.
    A single rank, for which nobody waits, gets neighbours together instead.

    Args:
        lengths: tokens of each sample.
        ranks: that wait for each other.
        size: samples of a micro-batch; a single rank may have a smaller one.
        packed: whether a micro-batch is one row of tokens.
        neighbours: whether to keep them together, on a single rank.

    Returns:
        For each rank as many micro-batches as for the others, each sample once.

    Raises:
        ValueError: the samples do not divide evenly among several ranks.
    """
    if ranks > 1 and len(lengths) % (ranks * size):
        raise ValueError(f"{len(lengths)} samples: no multiple of {ranks} ranks times {size}")
    if neighbours and ranks == 1:
        places = list(range(len(lengths)))
        return [[places[i : i + size] for i in range(0, len(places), size)]]
    by_length = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    if not packed:
        rounds = [by_length[i : i + ranks] for i in range(0, len(by_length), ranks)]
        hands = _snake_order(rounds, ranks)
        return [[hand[i : i + size] for i in range(0, len(hand), size)] for hand in hands]
    count = -(-len(lengths) // size)
    micro_batches: list[list[int]] = [[] for _ in range(count)]
    with_room = [(0, i) for i in range(count)]
    for sample in by_length:
        tokens, i = heapq.heappop(with_room)
        micro_batches[i].append(sample)
        if len(micro_batches[i]) < size:
            heapq.heappush(with_room, (tokens + lengths[sample], i))
    micro_batches.sort(key=lambda samples: -sum(lengths[i] for i in samples))
    rounds_of = [micro_batches[i : i + ranks] for i in range(0, count, ranks)]
    return _snake_order(rounds_of, ranks)


def idle_fraction(costs: Sequence[Sequence[float]]) -> float:
    """Share of the ranks' time in which they wait for the slowest, micro-batch by micro-batch.

    Args:
        costs: [rank][micro-batch], seconds or whatever is proportional to them.
    """
    slowest = sum(max(at_once) for at_once in zip(*costs, strict=True))
    return 1 - sum(sum(of_rank) for of_rank in costs) / (len(costs) * slowest)


def _snake_order(rounds: Sequence[Sequence[Any]], ranks: int) -> list[list[Any]]:
    """What each rank is dealt, one of every round, every second round from the last rank on."""
    hands: list[list[Any]] = [[] for _ in range(ranks)]
    for number, dealt in enumerate(rounds):
        for place, what in enumerate(dealt):
            hands[place if number % 2 == 0 else ranks - 1 - place].append(what)
    return hands


def balance_steps(
    lengths: Sequence[int],
    steps: Sequence[Sequence[int]],
    ranks: int,
    size: int,
    *,
    packed: bool,
    neighbours: bool = False,
) -> Assignment:
    """:func:`deal` for each of the optimizer steps, one after the other; neighbours by place."""
    dealt: Assignment = [[] for _ in range(ranks)]
    for drawn in steps:
        step = sorted(drawn) if neighbours else drawn
        of_step = balance(
            [lengths[i] for i in step], ranks, size, packed=packed, neighbours=neighbours
        )
        for hand, micro_batches in zip(dealt, of_step, strict=True):
            hand.extend([step[i] for i in samples] for samples in micro_batches)
    return dealt
