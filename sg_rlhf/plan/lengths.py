"""Lengths of responses, and what it costs that they differ: who waits for whom."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from sg_rlhf.batching import balance as batching

#: Rollouts that a waiting share is the mean of.
DRAWS = 20
#: The same of micro-batches of any number of samples, which take longer to deal and differ less.
DRAWS_IN_ROUNDS = 4
SEED = 0
#: Dealt by length (``sg.batches=balanced``), or upstream's: in pieces, and shuffled on each rank
#: before an update.
Way = Literal["dealt", "pieces", "shuffled"]


def quantiles(count: int, mean: float, spread: float, longest: int) -> list[float]:
    """Lengths in the middle of ``count`` equal shares of a log-normal distribution, cut above.

    Args:
        count: how many.
        mean: of the distribution before the cut.
        spread: standard deviation of the logarithm.
        longest: no length is above it.
    """
    centre = np.log(mean) - spread**2 / 2
    normal = NormalDist()
    of = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
    return [float(min(longest, max(1.0, np.exp(centre + spread * z)))) for z in of]


@functools.lru_cache(maxsize=256)
def balance(
    prompts: int, group: int, ranks: int, micro: int, mean: float, spread: float, longest: int,
    prompt: float, packed: bool, step: int, way: Way,
) -> float:  # fmt: skip
    """Share of the ranks' time in a pass over a rollout that is work, not waiting; 1 for one rank.

    Dealt by length, or as upstream does it: groups come in the order in which their last response
    ends (samples_generator.py), and are cut contiguously over ranks (launcher.py), so the last rank
    has the longest. Under ZeRO-3 the ranks go through their micro-batches in step, so each step
    takes what its largest micro-batch does.

    Args:
        prompts: of a rollout.
        group: responses of each.
        ranks: data-parallel.
        micro: samples of a micro-batch.
        mean: of the responses, tokens.
        spread: standard deviation of the logarithm.
        longest: response.
        prompt: tokens of a prompt.
        packed: whether a micro-batch has no padding.
        step: samples that are dealt at a time: an optimizer step's, or the whole rollout.
        way: see :data:`Way`.
    """
    if ranks == 1 and packed:
        return 1.0
    draw = np.random.default_rng(SEED)
    centre = np.log(mean) - spread**2 / 2
    shares = []
    in_rounds = way == "dealt" and ranks > 1 and packed
    for _ in range(DRAWS_IN_ROUNDS if in_rounds else DRAWS):
        lengths = np.exp(draw.normal(centre, spread, (prompts, group))).clip(1, longest)
        tokens = (lengths[np.argsort(lengths.max(axis=1))] + prompt).reshape(-1)
        steps = -(-len(tokens) // (ranks * micro))
        of_rank = np.resize(tokens, (ranks, steps * micro))
        if in_rounds:
            mixed = draw.permutation(of_rank.ravel())
            shares.append(_share_in_rounds(mixed, ranks, micro, step))
            continue
        if way == "dealt":
            of_rank = _dealt(of_rank.ravel(), ranks, micro, step, draw)
        elif way == "shuffled":
            of_rank = draw.permuted(of_rank, axis=1)
        batches = of_rank.reshape(ranks, steps, micro)
        work = batches.sum(axis=2) if packed else micro * batches.max(axis=2)
        shares.append(of_rank.sum() / (ranks * work.max(axis=0).sum()))
    return float(np.mean(shares))


def _dealt(tokens_N: Any, ranks: int, micro: int, step: int, draw: np.random.Generator) -> Any:
    """Of each rank and padded micro-batch its samples' tokens; optimizer steps are drawn."""
    mixed = draw.permutation(tokens_N)
    parts = []
    for part in _steps(mixed, ranks, micro, step):
        parts.append(part[np.array(batching.balance(part.tolist(), ranks, micro, packed=False))])
    return np.concatenate(parts, axis=1)


def _share_in_rounds(mixed_N: Any, ranks: int, micro: int, step: int) -> float:
    """Share of work where packed micro-batches have any number of samples."""
    whole = len(mixed_N) // (ranks * micro) * ranks * micro
    tokens = [round(n) for n in mixed_N[:whole].tolist()]
    steps = [part.tolist() for part in _steps(np.arange(whole), ranks, micro, step)]
    slowest = 0.0
    for assignment in batching.variable_size_steps(tokens, steps, ranks, micro, tokens):
        for together in zip(*assignment, strict=True):
            slowest += max(sum(tokens[i] for i in samples) for samples in together)
    return sum(tokens) / (ranks * slowest)


def _steps(mixed_N: Any, ranks: int, micro: int, step: int) -> Iterator[Any]:
    whole = max(1, step // (ranks * micro)) * ranks * micro
    return (mixed_N[i : i + whole] for i in range(0, len(mixed_N), whole))


def in_batches(lengths: Sequence[float], at_once: int, step: int) -> list[tuple[int, float]]:
    """How many sequences an engine continues, ``step`` tokens at a time, and their mean length.

    Continuous batching: the next waiting one starts when one ends. The shortest ones wait, as one
    cannot know; what is left at the end is one long response.

    Returns:
        (sequences, their mean generated tokens) of each step until all have ended.
    """
    waiting = sorted(lengths)
    running: list[list[float]] = []
    found = []
    # Spread over the order, as they come in no order of length.
    order = waiting[::2] + waiting[1::2][::-1]
    while order or running:
        while order and len(running) < at_once:
            running.append([0.0, order.pop(0)])
        found.append((len(running), sum(done for done, _ in running) / len(running)))
        for sequence in running:
            sequence[0] += step
        running = [sequence for sequence in running if sequence[0] < sequence[1]]
    return found
