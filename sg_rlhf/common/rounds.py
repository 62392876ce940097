"""Micro-batches of any number of samples, so that those of all ranks at a time cost the same.

With a fixed number of samples a micro-batch, a long response is one of many tokens beside others of
few, and every rank waits for it. Here the others of that moment get more samples: each round, one
micro-batch on every rank, costs as much as its longest sample, or a round's share of what is left.
Long samples are dealt first, short ones fill what they leave.
"""

from __future__ import annotations

from collections.abc import Sequence

from sg_rlhf.common.dealing import Dealt, deal

#: Steps in which costs are counted where a round is filled.
GRAINS = 2048
#: Numbers of rounds that are tried, from the fewest on that the tokens allow.
TRIED = 3
#: More rounds, each of which gathers the weights of a model anew, must save this share of the time.
WORTH = 0.01


def deal_rounds(lengths: Sequence[int], ranks: int, size: int, costs: Sequence[float]) -> Dealt:
    """Packed micro-batches for every rank, with no more tokens than ones of ``size`` have at most.

    Args:
        lengths: tokens of each sample.
        ranks: that wait for each other.
        size: samples of the micro-batches that say how many tokens fit.
        costs: of each sample, seconds or whatever is proportional to them.

    Returns:
        For each rank as many micro-batches as for the others, none empty, each sample once.

    Raises:
        ValueError: of :func:`sg_rlhf.common.dealing.deal`.
    """
    best = deal(lengths, ranks, size, packed=True)
    if ranks == 1:
        return best
    most = max(sum(lengths[i] for i in samples) for hand in best for samples in hand)
    best_time = _time(best, costs)
    tried = 0
    fewest = -(-sum(lengths) // (most * ranks))
    for rounds in range(max(fewest, 1), len(best[0]) + 1):
        dealt = _in_rounds(lengths, ranks, rounds, most, costs)
        if dealt is None:
            continue
        tried += 1
        time = _time(dealt, costs)
        fewer = rounds < len(best[0])
        if time < best_time * ((1 + WORTH) if fewer and tried == 1 else (1 - WORTH)):
            best, best_time = dealt, time
        if tried == TRIED:
            break
    return best


def _time(dealt: Dealt, costs: Sequence[float]) -> float:
    of_ranks = [[sum(costs[i] for i in samples) for samples in hand] for hand in dealt]
    return sum(max(at_once) for at_once in zip(*of_ranks, strict=True))


def _in_rounds(
    lengths: Sequence[int], ranks: int, rounds: int, most: int, costs: Sequence[float]
) -> Dealt | None:
    """So many rounds; None where a micro-batch would have more than ``most`` tokens."""
    left = sorted(range(len(lengths)), key=lambda i: -costs[i])
    dealt: Dealt = [[] for _ in range(ranks)]
    for after in range(rounds - 1, -1, -1):
        share = sum(costs[i] for i in left) / (ranks * (after + 1))
        goal = max(costs[left[0]], share)
        at_once: list[list[int]] = []
        if after:
            for rank in range(ranks):
                # One at least for each micro-batch that is still to come.
                spare = len(left) - (ranks - rank - 1) - ranks * after
                samples = _fill(left, costs, goal)[: max(spare, 1)]
                while len(samples) > 1 and sum(lengths[i] for i in samples) > most:
                    samples.pop()
                at_once.append(samples)
                taken = set(samples)
                left = [i for i in left if i not in taken]
        else:
            at_once = [[] for _ in range(ranks)]
            loads = [0.0] * ranks
            for i in left:
                rank = min(range(ranks), key=loads.__getitem__)
                at_once[rank].append(i)
                loads[rank] += costs[i]
        if not all(at_once) or any(sum(lengths[i] for i in s) > most for s in at_once):
            return None
        for hand, samples in zip(dealt, at_once, strict=True):
            hand.append(samples)
    return dealt


def _fill(left: Sequence[int], costs: Sequence[float], goal: float) -> list[int]:
    """The costliest sample, and others with which it comes as near to ``goal`` as it can.

    A subset sum over whole grains: bit n of ``reached[k]`` says that some of the first k others
    cost n grains. Of the sets with that sum it is one of the costlier samples: short ones are left
    for later.
    """
    first, *others = left
    grains = [max(1, round(costs[i] / goal * GRAINS)) for i in others]
    room = max(0, GRAINS - round(costs[first] / goal * GRAINS))
    within = (1 << (room + 1)) - 1
    reached = [1]
    for n in grains:
        reached.append((reached[-1] | reached[-1] << n) & within)
    total = reached[-1].bit_length() - 1
    chosen = []
    for k in range(len(others) - 1, -1, -1):
        if not reached[k] >> total & 1:
            chosen.append(others[k])
            total -= grains[k]
    return [first, *reversed(chosen)]
