"""The replay buffer of a rank whose micro-batches were dealt with any number of samples."""

from __future__ import annotations

from typing import Any

import torch
from openrlhf.trainer.ppo_utils.replay_buffer import NaiveReplayBuffer

from sg_rlhf.overlay.learner import micro_batches


class BalancedBuffer(NaiveReplayBuffer):
    """Upstream's, which keeps what it is given together; upstream itself cuts it by tokens.

    What upstream asks of its own cut is answered of this one: micro-batches, where an optimizer
    step ends, and the tokens and samples of the step on all ranks, by which losses are divided.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, dynamic_batch=True)
        self._micro_batches: list[list[int]] = []
        self._ends: list[int] = []

    def append(self, experience: Any) -> None:
        """A micro-batch of :func:`sg_rlhf.overlay.learner.micro_batches.training_micro_batches`."""
        first, ends = len(self.items), getattr(experience, micro_batches.IS_LAST_OF_STEP)
        super().append(experience)
        self._micro_batches.append(list(range(first, len(self.items))))
        self._ends.append(int(ends))

    def clear(self) -> None:
        """As upstream's."""
        super().clear()
        self._micro_batches, self._ends = [], []

    def setup_dynamic_batch(self, strategy: Any) -> None:
        """What upstream's update reads of its micro-batches."""
        step_of, step = [], 0
        for end in self._ends:
            step_of.append(step)
            step += end
        counts = torch.zeros(step, 3, dtype=torch.float64)  # tokens, samples with one, samples
        for of_step, places in zip(step_of, self._micro_batches, strict=True):
            for i in places:
                tokens = int(self.items[i].action_mask.sum())
                counts[of_step] += torch.tensor([tokens, tokens > 0, 1], dtype=torch.float64)
        counts = counts.to(torch.cuda.current_device())
        group = strategy.ds_device_mesh["dp"].get_group()
        torch.distributed.all_reduce(counts, group=group)
        ranks = torch.distributed.get_world_size(group=group)
        tokens, filled, samples = counts.cpu().T.tolist()
        self.sample_batch_size = 1
        self.dynamic_indices = self._micro_batches
        self.dynamic_optimizer_step = self._ends
        self.dynamic_batch_num_tokens = [tokens[i] for i in step_of]
        self.dynamic_global_batch_size = [filled[i] for i in step_of]
        # A rank's share of the step, as gradients are averaged over the ranks.
        self.dynamic_sample_loss_scale = [
            len(places) * ranks / samples[i]
            for i, places in zip(step_of, self._micro_batches, strict=True)
        ]
