"""A rank's replay buffer, and its samples as the micro-batches of optimizer steps.

:class:`UpdateBatching` is the one place that knows how an update on a rank is cut:

- balanced: micro-batches of any number of samples, cut by the controller
  (:mod:`sg_rlhf.overlay.learner.micro_batches`) and recorded by :class:`BalancedBuffer`;
- ``train.dynamic_batch_enable``: micro-batches by tokens, cut by upstream's replay buffer;
- else ``train.micro_batch_size`` samples each, and as many micro-batches per optimizer step as
  DeepSpeed accumulates.
"""

from __future__ import annotations

import dataclasses
import itertools
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch
from openrlhf.trainer.ppo_utils.replay_buffer import NaiveReplayBuffer
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader

from sg_rlhf.algo.aggregation import aggregate
from sg_rlhf.config.upstream_flags import PROMPT_MEAN
from sg_rlhf.overlay.checkpoints.strategy import Strategy
from sg_rlhf.overlay.learner import micro_batches
from sg_rlhf.overlay.model.log_prob_head import PolicyModel

#: [optimizer step][micro-batch][sample] -> index in the replay buffer.
Steps = list[list[list[int]]]


@dataclass(frozen=True)
class Denominators:
    """What the losses of a micro-batch divide by: totals of its whole optimizer step, on all ranks.

    Attributes:
        ranks: data-parallel ranks. They average their gradients, so each loss is multiplied by it.
        responses: responses that have a token, divided in the same way.
        prompts: prompts that have a token, divided in the same way; with ``prompt-mean`` only.
        prompt_tokens_B: [B], response tokens of each sample's prompt; with ``prompt-mean`` only.
    """

    ranks: int = 1
    tokens: torch.Tensor | float | None = None
    responses: torch.Tensor | float | None = None
    prompts: torch.Tensor | float | None = None
    prompt_tokens_B: torch.Tensor | None = None

    def total(self, aggregation: str) -> torch.Tensor | float | None:
        """What a mean divides by."""
        if aggregation == "token-mean":
            return self.tokens
        return self.responses if aggregation == "seq-mean" else self.prompts

    def mean(self, values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        """This rank's share of the mean of [B, T] over the step's tokens, or over its prompts."""
        aggregation = "token-mean" if self.prompt_tokens_B is None else PROMPT_MEAN
        share = aggregate(
            values_BT,
            mask_BT,
            aggregation,
            total=self.total(aggregation),
            prompt_tokens=self.prompt_tokens_B,
        )
        return share * self.ranks


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass of the update on this rank.

    Attributes:
        samples: B experiences of one sample each, as the replay buffer holds them.
        step: index of the optimizer step in the epoch.
        index: index of the micro-batch in its optimizer step.
        count: micro-batches of that optimizer step on this rank.
        aux_loss_scale: its share of the optimizer step's samples, times ranks and accumulation.
    """

    samples: list[Experience]
    step: int
    index: int
    count: int
    denominators: Denominators
    num_tokens: int
    aux_loss_scale: float

    @property
    def is_last(self) -> bool:
        """Whether the optimizer step is taken after this micro-batch."""
        return self.index == self.count - 1


def batch_on_device(samples: list[Experience], args: Namespace) -> Experience:
    """Samples of a replay buffer as one experience on the rank's device."""
    batch: Experience = make_experience_batch(samples, args.ds.packing_samples)
    return batch.to_device(torch.cuda.current_device())


def policy_forward(actor: PolicyModel, batch: Experience, **options: Any) -> Any:
    """Log-probs [B, T] of the response tokens; (log-probs, output) with ``return_output``."""
    return actor(
        batch.sequences,
        batch.action_mask,
        attention_mask=batch.attention_mask,
        **options,
    )


class BalancedBuffer(NaiveReplayBuffer):  # type: ignore[misc]  # upstream has no types
    """Upstream's replay buffer; trains each appended experience as one micro-batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: Steps = []
        self._next_step: list[list[int]] = []

    def append(self, experience: Experience) -> None:
        """Store a micro-batch of ``training_micro_batches``."""
        first = len(self.items)
        is_last = getattr(experience, micro_batches.IS_LAST_OF_STEP)
        super().append(experience)
        self._next_step.append(list(range(first, len(self.items))))
        if is_last:
            self.steps.append(self._next_step)
            self._next_step = []

    def clear(self) -> None:
        """Drop all samples."""
        super().clear()
        self.steps, self._next_step = [], []


class UpdateBatching:
    """Cuts the samples of a rank's replay buffer into optimizer steps and micro-batches."""

    def __init__(self, strategy: Strategy) -> None:
        args = strategy.args
        self._strategy = strategy
        self.cut_by_controller = micro_batches.has_variable_size(args)
        self.is_variable = self.cut_by_controller or bool(args.train.dynamic_batch_enable)
        self.accumulation = 1 if self.is_variable else strategy.accumulated_gradient

    def steps(self, buffer: NaiveReplayBuffer) -> Steps:
        """The optimizer steps of an epoch in the order of the buffer; collective if dynamic."""
        if self.cut_by_controller:
            recorded: Steps = buffer.steps
            return recorded
        if self.is_variable:
            buffer.setup_dynamic_batch(self._strategy)
            ends = itertools.accumulate(buffer.dynamic_optimizer_step, initial=0)
            numbered = zip(ends, buffer.dynamic_indices, strict=False)
            groups = itertools.groupby(numbered, key=lambda pair: pair[0])
            return [[list(indices) for _, indices in group] for _, group in groups]
        size = buffer.sample_batch_size
        full = [list(range(i, i + size)) for i in range(0, len(buffer.items) - size + 1, size)]
        return [full[i : i + self.accumulation] for i in range(0, len(full), self.accumulation)]

    def epoch(self, buffer: NaiveReplayBuffer) -> list[MicroBatch]:
        """The micro-batches of one epoch in order; every data-parallel rank must call it."""
        steps = self._in_epoch_order(buffer)
        group = self._strategy.ds_device_mesh["dp"].get_group()
        ranks = torch.distributed.get_world_size(group=group)
        tokens_of = [int(item.action_mask.sum()) for item in buffer.items]
        counts = self._count(tokens_of, steps, group)
        per_prompt = None
        if self._strategy.args.actor.loss_agg_mode == PROMPT_MEAN:
            per_prompt = self._count_per_prompt(buffer, steps, group)
        samples = counts[:, 2].tolist()  # waits once
        micro_batches = []
        for number, step in enumerate(steps):
            tokens, non_empty, _ = counts[number]
            denominators = Denominators(
                ranks, tokens / self.accumulation, non_empty / self.accumulation
            )
            for index, indices in enumerate(step):
                share = len(indices) * ranks * self.accumulation / samples[number]
                items = [buffer.items[i] for i in indices]
                of_batch = denominators
                if per_prompt is not None:
                    tokens_P = per_prompt[number]
                    of_batch = dataclasses.replace(
                        denominators,
                        prompts=(tokens_P > 0).sum() / self.accumulation,
                        prompt_tokens_B=tokens_P[[self._prompt(item) for item in items]],
                    )
                micro_batches.append(
                    MicroBatch(
                        items,
                        number,
                        index,
                        len(step),
                        of_batch,
                        sum(tokens_of[i] for i in indices),
                        aux_loss_scale=share,
                    )
                )
        return micro_batches

    def _in_epoch_order(self, buffer: NaiveReplayBuffer) -> Steps:
        steps = self.steps(buffer)
        flat = list(itertools.chain.from_iterable(steps))
        # Upstream's update iterates over a DataLoader. It draws from torch's generator, for a seed
        # of its workers, which dropout's random numbers follow.
        loader: Any = DataLoader(flat, batch_size=None)  # type: ignore[arg-type]
        drawn = iter(loader)
        return [list(itertools.islice(drawn, len(step))) for step in steps]

    @staticmethod
    def _count(tokens_of: list[int], steps: Steps, group: ProcessGroup) -> torch.Tensor:
        """Float32 [steps, 3]: response tokens, samples with one, and samples, on all ranks."""
        counts = torch.zeros(len(steps), 3, dtype=torch.float64)
        for number, step in enumerate(steps):
            for i in itertools.chain.from_iterable(step):
                tokens = tokens_of[i]
                counts[number] += torch.tensor([tokens, tokens > 0, 1], dtype=torch.float64)
        counts = counts.to(torch.cuda.current_device())
        torch.distributed.all_reduce(counts, group=group)
        return counts.float()

    def _prompt(self, item: Experience) -> int:
        """Index of a sample's prompt in the rollout."""
        group = self._strategy.args.rollout.n_samples_per_prompt
        return int(item.info[micro_batches.SAMPLE_INDEX]) // int(group)

    def _count_per_prompt(
        self, buffer: NaiveReplayBuffer, steps: Steps, group: ProcessGroup
    ) -> torch.Tensor:
        """Float32 [steps, prompts]: response tokens on all ranks."""
        prompts = self._strategy.args.rollout.batch_size
        counts = torch.zeros(len(steps), prompts, dtype=torch.float64)
        for number, step in enumerate(steps):
            for i in itertools.chain.from_iterable(step):
                item = buffer.items[i]
                counts[number, self._prompt(item)] += int(item.action_mask.sum())
        counts = counts.to(torch.cuda.current_device())
        torch.distributed.all_reduce(counts, group=group)
        return counts.float()
