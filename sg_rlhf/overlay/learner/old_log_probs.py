"""Old log-probs without a forward pass over the whole rollout (:func:`rule_of`).

In the first optimizer step of a rollout the policy has not changed yet: the loss uses the current
log-probs, detached. For later steps each rank computes them at the start of the update, in the
micro-batches that it will train. Upstream computes all of them before the update.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.replay_buffer import NaiveReplayBuffer

from sg_rlhf.algo.nonfinite import rows_not_finite
from sg_rlhf.config.derived.log_probs import OldLogProbRule, old_log_prob_rule
from sg_rlhf.overlay.learner import nonfinite
from sg_rlhf.overlay.learner.replay_buffer import UpdateBatching, batch_on_device, policy_forward
from sg_rlhf.overlay.model.log_prob_head import PolicyModel
from sg_rlhf.overlay.settings.lookup import value_of

#: Parts of the names in a model's configuration that make its training pass random.
_NOISE_KEYS = ("dropout", "pdrop", "jitter")


def rule_of(args: Namespace) -> OldLogProbRule:
    """The rule for upstream's nested namespace with ``sg``."""
    return old_log_prob_rule(value_of(args))


class RankOldLogProbs:
    """One rank's old log-probs; without ``skips`` it stops where one is not finite."""

    def __init__(
        self,
        actor: PolicyModel,
        buffer: NaiveReplayBuffer,
        batching: UpdateBatching,
        args: Namespace,
        skips: nonfinite.RankSkips | None,
    ) -> None:
        self._actor, self._buffer, self._batching = actor, buffer, batching
        self._args, self._skips = args, skips

    def compute_missing(self) -> bool:
        """Compute the old log-probs for later optimizer steps; raises NonFiniteError to stop."""
        items = self._buffer.items
        if all(item.action_log_probs is not None for item in items):
            return False
        first_computed = 0 if has_train_time_noise(self._actor) else 1
        later_steps = self._batching.steps(self._buffer)[first_computed:]
        later = list(itertools.chain.from_iterable(later_steps))
        self._actor.eval()
        try:
            for indices in later:
                self._compute([items[i] for i in indices])
        finally:
            self._actor.train()
        return bool(later)

    @torch.no_grad()
    def _compute(self, items: list[Experience]) -> None:
        """The forward pass of one micro-batch, as upstream's before the update."""
        batch = batch_on_device(items, self._args)
        _store_rows(items, policy_forward(self._actor, batch))
        self._check_or_mask(items)

    def _check_or_mask(self, items: list[Experience]) -> None:
        for item in items:
            prompt = item.prompts[0] if item.prompts else ""
            log_probs_1T, mask_1T = item.action_log_probs[None], item.action_mask[None]
            if self._skips is None:
                nonfinite.check_finite("log-probs of the policy", log_probs_1T, mask_1T, [prompt])
            elif bool(rows_not_finite(log_probs_1T, mask_1T)):
                self._skips.mask_sample(item)

    def store(self, items: list[Experience], log_probs_BT: torch.Tensor) -> None:
        """Store the first optimizer step's old log-probs [B, T] for a second epoch."""
        _store_rows(items, log_probs_BT)
        # The step is skipped if they are not finite. A second epoch would use them again.
        if self._skips is not None and self._args.train.max_epochs > 1:
            self._check_or_mask(items)


def _store_rows(items: list[Experience], log_probs_BT: torch.Tensor) -> None:
    """Store the rows of a [B, T] batch, padded on the right, in its B samples."""
    for item, log_probs in zip(items, log_probs_BT.cpu(), strict=True):
        item.action_log_probs = log_probs[: len(item.action_mask)].clone()


def has_train_time_noise(actor: PolicyModel) -> bool:
    """Whether a training pass has dropout or the like, so that its log-probs are random."""
    dropouts = any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in actor.modules())
    model = getattr(actor.model, "module", actor.model)
    settings: dict[str, Any] = getattr(getattr(model, "config", None), "to_dict", dict)()
    return dropouts or _sets_noise(settings)


def _sets_noise(settings: dict[Any, Any]) -> bool:
    for name, value in settings.items():
        if isinstance(value, dict) and _sets_noise(value):
            return True
        # id2label has numbers for keys.
        if (
            any(part in str(name) for part in _NOISE_KEYS)
            and isinstance(value, float)
            and value > 0
        ):
            return True
    return False
