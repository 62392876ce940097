"""A rollout's samples as the micro-batches of each rank: the controller's part.

Samples go to ranks by length (:mod:`sg_rlhf.batching.balance`). A rank trains them in the order in
which it gets them: its samples of the first optimizer step, then of the second.

Packed micro-batches have any number of samples: they are filled to the tokens for which the memory
plan reserves memory (:func:`max_tokens`). Ranks record them in
:class:`.replay_buffer.BalancedBuffer`. A single rank that shares prompts keeps the order,
``train.micro_batch_size`` samples at a time.
"""

from __future__ import annotations

import functools
import itertools
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils.seqlen_balancing import (
    get_minimum_num_micro_batch_size,
    get_seqlen_balanced_partitions,
)

from sg_rlhf.batching import balance as batching
from sg_rlhf.overlay.checkpoints.strategy import Strategy
from sg_rlhf.overlay.settings import rollout_plan, worker_settings
from sg_rlhf.plan.shapes import ModelShape, shape_of
from sg_rlhf.plan.time import sequence_flops

#: Attribute of an experience of :func:`training_micro_batches`: whether its rank's optimizer step
#: ends with it.
IS_LAST_OF_STEP = "sg_ends_step"
#: In an experience's ``info``: [B], index of each sample in the rollout. Upstream's replay buffers
#: keep it, but not ``index``.
SAMPLE_INDEX = "sg_place"


def balances_micro_batches(args: Namespace) -> bool:
    """Whether samples go to micro-batches by length; upstream cuts dynamic ones by tokens."""
    return not args.train.dynamic_batch_enable


def has_variable_size(args: Namespace) -> bool:
    """Whether a micro-batch of the update may have any number of samples."""
    ranks = rollout_plan.data_parallel_ranks(args)["actor"]
    return balances_micro_batches(args) and (ranks > 1 or _fills_on_one_rank(args))


def _fills_on_one_rank(args: Namespace) -> bool:
    """Whether a single rank fills its micro-batches by tokens: not padding, not shared prompts."""
    return bool(args.ds.packing_samples) and not worker_settings.shares_prompts(args)


def max_tokens(size: int, args: Namespace) -> int:
    """Tokens of a micro-batch: the plan reserves memory for ``size`` of the longest samples."""
    return size * int(args.data.max_len)


def prepare_strategy(strategy: Strategy) -> None:
    """Let DeepSpeed accumulate any number of micro-batches, where the update has them."""
    strategy.use_dynamic_batch = strategy.use_dynamic_batch or has_variable_size(strategy.args)


def scoring_micro_batches(samples: list[Experience], args: Namespace) -> list[list[int]]:
    """Indices of samples for the passes before the update, by micro-batch, rank after rank."""
    lengths = [int(sample.total_length) for sample in samples]
    if args.train.dynamic_batch_enable:
        ranks = rollout_plan.data_parallel_ranks(args)["actor"]
        fewest = get_minimum_num_micro_batch_size(lengths, args.rollout.max_tokens_per_gpu, 1, 1)
        count = max(fewest // ranks * ranks, ranks)
        by_tokens: list[list[int]] = get_seqlen_balanced_partitions(lengths, count, False)
        return by_tokens
    rank_counts = set(rollout_plan.data_parallel_ranks(args).values())
    # A model on fewer ranks takes the micro-batches of several ranks on each.
    ranks = max(rank_counts)
    size = args.rollout.micro_batch_size
    packed = args.ds.packing_samples
    if len(rank_counts) == 1 and (ranks > 1 or _fills_on_one_rank(args)):
        rollout = [range(len(samples))]
        costs = _costs(lengths, args)
        (per_rank,) = batching.variable_size_steps(
            lengths, rollout, ranks, size, costs, max_tokens=max_tokens(size, args), packed=packed
        )
    else:
        per_rank = batching.balance(
            lengths,
            ranks,
            size,
            packed=packed,
            neighbours=worker_settings.shares_prompts(args),
        )
    return list(itertools.chain.from_iterable(per_rank))


def training_micro_batches(
    experiences: list[Experience], args: Namespace, rollout: int, pad_token_id: int
) -> list[Experience]:
    """The samples as the policy's ranks train them, rank after rank, with :data:`IS_LAST_OF_STEP`.

    Where upstream cuts micro-batches by tokens, an experience per rank and optimizer step.
    """
    by_index = {row.index[0]: row for experience in experiences for row in unbatch(experience)}
    samples = [by_index[i] for i in range(len(by_index))]
    lengths = [int(sample.total_length) for sample in samples]
    steps = batching.optimizer_steps(len(samples), args.train.batch_size, args.train.seed, rollout)
    ranks = rollout_plan.data_parallel_ranks(args)["actor"]
    size = args.train.micro_batch_size if balances_micro_batches(args) else len(steps[0]) // ranks
    packed = args.ds.packing_samples
    if has_variable_size(args):
        costs = _costs(lengths, args)
        per_step = batching.variable_size_steps(
            lengths, steps, ranks, size, costs, max_tokens=max_tokens(size, args), packed=packed
        )
    else:
        neighbours = worker_settings.shares_prompts(args)
        per_step = [
            batching.balance_steps(
                lengths, [step], ranks, size, packed=packed, neighbours=neighbours
            )
            for step in steps
        ]
    indices: list[list[int]] = []
    is_last: list[bool] = []
    for rank in range(ranks):
        for assignment in per_step:
            indices += assignment[rank]
            is_last += [False] * (len(assignment[rank]) - 1) + [True]
    micro_batches = concat(samples, indices, pad_token_id)
    for micro_batch, ends_step in zip(micro_batches, is_last, strict=True):
        setattr(micro_batch, IS_LAST_OF_STEP, ends_step)
    return micro_batches


def _costs(lengths: Sequence[int], args: Namespace) -> list[float]:
    """FLOPs of the samples, or their tokens where the policy's shape is not known."""
    shape = _shape(args.actor.model_name_or_path)
    return [sequence_flops(shape, n) if shape else float(n) for n in lengths]


@functools.cache
def _shape(model: str) -> ModelShape | None:
    try:
        return shape_of(model)
    except ValueError:  # no dense decoder
        return None


def dp_idle_fraction(experiences: list[Experience], args: Namespace) -> float:
    """Share of the ranks' time in the update in which they wait for each other, by tokens."""
    tokens = [
        float(e.attention_mask.sum() if args.ds.packing_samples else e.attention_mask.numel())
        for e in experiences
    ]
    count = len(tokens) // rollout_plan.data_parallel_ranks(args)["actor"]
    return batching.idle_fraction([tokens[i : i + count] for i in range(0, len(tokens), count)])


def forward_inputs(micro_batches: Sequence[Experience]) -> dict[str, list[Any]]:
    """Arguments of ``forward`` on the ranks of a model."""
    names = ("sequences", "action_mask", "attention_mask")
    return {name: [getattr(e, name) for e in micro_batches] for name in names}


def concat(
    samples: list[Experience], micro_batches: Iterable[list[int]], pad_token_id: int
) -> list[Experience]:
    """An experience per micro-batch."""
    return [
        Experience.concat_experiences([samples[i] for i in indices], pad_token_id)
        for indices in micro_batches
    ]


def unbatch(experience: Experience) -> list[Experience]:
    """An experience's samples as experiences of one each, without their padding."""
    count = len(experience.sequences)
    width = experience.attention_mask.shape[1]
    lengths = [int(mask.nonzero()[-1]) + 1 for mask in experience.attention_mask]
    samples = []
    for i, length in enumerate(lengths):
        values = {}
        for field in fields(Experience):
            value = getattr(experience, field.name)
            if isinstance(value, dict):
                value = {key: _item(v, i, count, f"info {key}") for key, v in value.items()}
            elif value is not None and len(value):
                value = _item(value, i, count, field.name)
                if Experience.is_step_tensor_field(field.name):
                    value = value[:, : value.shape[1] - (width - length)]
            values[field.name] = value
        samples.append(Experience(**values))
    return samples


def _item(values: Any, i: int, count: int, name: str) -> Any:
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} values for {count} samples")
    return values[i : i + 1]
