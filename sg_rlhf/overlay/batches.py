"""A rollout's samples as the micro-batches of each rank, by :mod:`sg_rlhf.common.dealing`.

Upstream cuts a rollout where it happens to be, hands each rank a contiguous piece, and each rank
shuffles its own. What is dealt here is trained as it is dealt: a rank's ``replay_buffer.items`` are
its samples of the first optimizer step, then those of the second, and so on, each in order of
micro-batches.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from openrlhf.trainer.ppo_utils.experience import Experience

from sg_rlhf.common import dealing
from sg_rlhf.overlay import layout, switches


def dealt(args: Any) -> bool:
    """Whether samples are dealt to the ranks of an update by length.

    Ranks that share samples (ring attention, tensor parallelism) must have them in one order, which
    upstream sees to.
    """
    shared = args.ds.ring_attn_size * args.ds.tensor_parallel_size > 1
    return args.sg.batches == "balanced" and not shared


def into_micro_batches(args: Any) -> bool:
    """Whether they are dealt to micro-batches as well; upstream cuts dynamic ones by tokens."""
    return dealt(args) and not args.train.dynamic_batch_enable


def forward_passes(samples: list[Any], args: Any) -> list[list[int]]:
    """The micro-batches of the passes before the update, in the order in which upstream takes them:
    all of the first rank, all of the second, and so on.

    Args:
        samples: of one response each.
        args: upstream's nested namespace.
    """
    lengths = [int(sample.total_length) for sample in samples]
    # Of models on another number of ranks, a rank has several hands or a part of one.
    ranks = max(layout.data_parallel_ranks(args).values())
    size = args.rollout.micro_batch_size
    hands = dealing.deal(
        lengths,
        ranks,
        size,
        packed=args.ds.packing_samples,
        neighbours=switches.shared_prompts_fit(args),
    )
    return list(itertools.chain.from_iterable(hands))


def for_update(experiences: list[Any], args: Any, rollout: int, pad_token_id: int) -> list[Any]:
    """The same samples as the actor's ranks train them: all micro-batches of the first rank, then
    of the second, and so on. Where upstream cuts micro-batches, a rank's samples of an optimizer
    step are one.

    Args:
        experiences: of any cut; their ``index`` has the samples' places in the rollout.
        args: upstream's nested namespace.
        rollout: its number in the run.
        pad_token_id: of the sequences.
    """
    by_place = {row.index[0]: row for experience in experiences for row in rows(experience)}
    samples = [by_place[i] for i in range(len(by_place))]
    lengths = [int(sample.total_length) for sample in samples]
    steps = dealing.optimizer_steps(len(samples), args.train.batch_size, args.train.seed, rollout)
    ranks = layout.data_parallel_ranks(args)["actor"]
    size = args.train.micro_batch_size if into_micro_batches(args) else len(steps[0]) // ranks
    hands = dealing.deal_steps(
        lengths,
        steps,
        ranks,
        size,
        packed=args.ds.packing_samples,
        neighbours=switches.shared_prompts_fit(args),
    )
    return together(samples, itertools.chain.from_iterable(hands), pad_token_id)


def waiting_share(experiences: list[Any], args: Any) -> float:
    """Share of the ranks' time in the update in which they wait for each other, by tokens.

    Args:
        experiences: of :func:`for_update`.
        args: upstream's nested namespace.
    """
    tokens = [
        float(e.attention_mask.sum() if args.ds.packing_samples else e.attention_mask.numel())
        for e in experiences
    ]
    own = len(tokens) // layout.data_parallel_ranks(args)["actor"]
    return dealing.waiting([tokens[i : i + own] for i in range(0, len(tokens), own)])


def together(
    samples: list[Any], micro_batches: Iterable[list[int]], pad_token_id: int
) -> list[Any]:
    """Samples of one response each as one experience per micro-batch."""
    return [
        Experience.concat_experiences([samples[i] for i in places], pad_token_id)
        for places in micro_batches
    ]


def rows(experience: Any) -> list[Any]:
    """An experience's samples as experiences of one each, without their padding.

    Raises:
        ValueError: a field has not one value per sample.
    """
    count = len(experience.sequences)
    width = experience.attention_mask.shape[1]
    lengths = [int(mask.nonzero()[-1]) + 1 for mask in experience.attention_mask]
    found = []
    for i, length in enumerate(lengths):
        values = {}
        for field in fields(Experience):
            value = getattr(experience, field.name)
            if isinstance(value, dict):
                value = {key: _one(each, i, count, f"info {key}") for key, each in value.items()}
            elif value is not None and len(value):
                value = _one(value, i, count, field.name)
                if Experience.is_step_tensor_field(field.name):
                    value = value[:, : value.shape[1] - (width - length)]
            values[field.name] = value
        found.append(Experience(**values))
    return found


def _one(value: Any, i: int, count: int, name: str) -> Any:
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} values for {count} samples")
    return value[i : i + 1]


def as_dealt(original: Callable[..., Any]) -> Callable[..., Any]:
    """Upstream's ``balance_experiences`` for dynamic batches, where they are not dealt.

    It gives each rank its longest and shortest samples first, so that the first optimizer step of a
    rollout would learn from those, and the last from the middle.
    """

    @functools.wraps(original)
    def balance(experiences: list[Any], args: Any) -> Any:
        return experiences if dealt(args) else original(experiences, args)

    return balance


def in_order(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch's ``DataLoader`` for upstream's update: a buffer that is ``in_order`` stays in it."""

    @functools.wraps(original, updated=())
    def loader(dataset: Any, *args: Any, shuffle: bool = False, **kwargs: Any) -> Any:
        shuffle = shuffle and not getattr(dataset, "in_order", False)
        return original(dataset, *args, shuffle=shuffle, **kwargs)

    return loader
