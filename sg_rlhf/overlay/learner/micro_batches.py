"""A rollout's samples as the micro-batches of each rank, by :mod:`sg_rlhf.batching.balance`.

Upstream cuts a rollout where it happens to be, hands each rank a contiguous piece, and each rank
shuffles its own. What is dealt here is trained as it is dealt: a rank's ``replay_buffer.items`` are
its samples of the first optimizer step, then those of the second, and so on, each in order of
micro-batches.

Where there are several ranks, micro-batches have any number of samples
(:mod:`sg_rlhf.batching.rounds`), and ranks not as many as others: the policy's ranks then take
upstream's way for dynamic batches, with micro-batches that were dealt (:class:`.dealt_buffer`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from openrlhf.trainer.ppo_utils.experience import Experience

from sg_rlhf.batching import balance as batching
from sg_rlhf.overlay.settings import layout_checks, worker_settings
from sg_rlhf.plan.shapes import ModelShape, shape_of
from sg_rlhf.plan.time import sequence_flops

#: Of an experience of :func:`for_update`: whether its rank's optimizer step ends with it.
IS_LAST_OF_STEP = "sg_ends_step"


def is_balanced(args: Any) -> bool:
    """Whether samples are dealt to the ranks of an update by length.

    Ranks that share samples (ring attention, tensor parallelism) must have them in one order, which
    upstream sees to.
    """
    shared = args.ds.ring_attn_size * args.ds.tensor_parallel_size > 1
    return args.sg.batches == "balanced" and not shared


def into_micro_batches(args: Any) -> bool:
    """Whether they are dealt to micro-batches as well; upstream cuts dynamic ones by tokens."""
    return is_balanced(args) and not args.train.dynamic_batch_enable


def variable_size(args: Any) -> bool:
    """Whether a micro-batch of the update may have any number of samples.

    A critic, whose buffer is upstream's, has to be told how many there are.
    """
    ranks = layout_checks.data_parallel_ranks(args)
    several = ranks["actor"] > 1 and "critic" not in ranks
    return into_micro_batches(args) and several


def prepare_strategy(strategy: Any) -> None:
    """Let DeepSpeed accumulate any number of micro-batches, where the update has them.

    Args:
        strategy: upstream's, on a rank of the policy, before it prepares a model.
    """
    strategy.use_dynamic_batch = strategy.use_dynamic_batch or variable_size(strategy.args)


def scoring_micro_batches(samples: list[Any], args: Any) -> list[list[int]]:
    """The micro-batches of the passes before the update, in the order in which upstream takes them:
    all of the first rank, all of the second, and so on.

    Args:
        samples: of one response each.
        args: upstream's nested namespace.
    """
    lengths = [int(sample.total_length) for sample in samples]
    ranks_of = set(layout_checks.data_parallel_ranks(args).values())
    # Of models on another number of ranks, a rank has several hands or a part of one.
    ranks = max(ranks_of)
    size = args.rollout.micro_batch_size
    packed = args.ds.packing_samples
    if len(ranks_of) == 1 and ranks > 1:
        whole = [range(len(samples))]
        costs = _costs(lengths, args)
        (hands,) = batching.variable_size_steps(lengths, whole, ranks, size, costs, packed=packed)
        return list(itertools.chain.from_iterable(hands))
    hands = batching.balance(
        lengths,
        ranks,
        size,
        packed=packed,
        neighbours=worker_settings.shared_prompts_fit(args),
    )
    return list(itertools.chain.from_iterable(hands))


def training_micro_batches(
    experiences: list[Any], args: Any, rollout: int, pad_token_id: int
) -> list[Any]:
    """The same samples as the actor's ranks train them: all micro-batches of the first rank, then
    of the second, and so on, with :data:`ENDS_STEP`. Where upstream cuts micro-batches, a rank's
    samples of an optimizer step are one.

    Args:
        experiences: of any cut; their ``index`` has the samples' places in the rollout.
        args: upstream's nested namespace.
        rollout: its number in the run.
        pad_token_id: of the sequences.
    """
    by_place = {row.index[0]: row for experience in experiences for row in unbatch(experience)}
    samples = [by_place[i] for i in range(len(by_place))]
    lengths = [int(sample.total_length) for sample in samples]
    steps = batching.optimizer_steps(len(samples), args.train.batch_size, args.train.seed, rollout)
    ranks = layout_checks.data_parallel_ranks(args)["actor"]
    size = args.train.micro_batch_size if into_micro_batches(args) else len(steps[0]) // ranks
    packed = args.ds.packing_samples
    if variable_size(args):
        costs = _costs(lengths, args)
        of_steps = batching.variable_size_steps(lengths, steps, ranks, size, costs, packed=packed)
    else:
        neighbours = worker_settings.shared_prompts_fit(args)
        of_steps = [
            batching.balance_steps(
                lengths, [step], ranks, size, packed=packed, neighbours=neighbours
            )
            for step in steps
        ]
    micro_batches, ends = [], []
    for rank in range(ranks):
        for hands in of_steps:
            micro_batches += hands[rank]
            ends += [False] * (len(hands[rank]) - 1) + [True]
    found = concat(samples, micro_batches, pad_token_id)
    for experience, is_last in zip(found, ends, strict=True):
        setattr(experience, IS_LAST_OF_STEP, is_last)
    return found


def _costs(lengths: Sequence[int], args: Any) -> list[float]:
    """FLOPs of the samples, or their tokens where the policy's shape is not known."""
    shape = _shape(args.actor.model_name_or_path)
    return [sequence_flops(shape, n) if shape else float(n) for n in lengths]


@functools.cache
def _shape(model: str) -> ModelShape | None:
    try:
        return shape_of(model)
    except ValueError:  # no dense decoder
        return None


def dp_idle_fraction(experiences: list[Any], args: Any) -> float:
    """Share of the ranks' time in the update in which they wait for each other, by tokens.

    Args:
        experiences: of :func:`for_update`.
        args: upstream's nested namespace.
    """
    tokens = [
        float(e.attention_mask.sum() if args.ds.packing_samples else e.attention_mask.numel())
        for e in experiences
    ]
    own = len(tokens) // layout_checks.data_parallel_ranks(args)["actor"]
    return batching.idle_fraction([tokens[i : i + own] for i in range(0, len(tokens), own)])


def concat(samples: list[Any], micro_batches: Iterable[list[int]], pad_token_id: int) -> list[Any]:
    """Samples of one response each as one experience per micro-batch."""
    return [
        Experience.concat_experiences([samples[i] for i in places], pad_token_id)
        for places in micro_batches
    ]


def unbatch(experience: Any) -> list[Any]:
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
