"""Log-probs and entropies of each token in the latest update, for ``samples.jsonl``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from sg_rlhf.overlay.learner.micro_batches import SAMPLE_INDEX


@dataclass(frozen=True)
class _Row:
    """One sample: its mask [T] on the CPU, and values [T or longer] that may be on the device."""

    mask_T: torch.Tensor
    values: dict[str, torch.Tensor]

    def lists(self) -> dict[str, list[float]]:
        """The values of the response tokens; waits for the device."""
        length = len(self.mask_T)
        return {
            name: row[:length].float().cpu()[self.mask_T].tolist()
            for name, row in self.values.items()
        }


class TokenRecord:
    """Log-probs and entropies of one rank's samples in the latest update, at their first pass."""

    def __init__(self) -> None:
        self._values: dict[int, _Row] = {}

    def clear(self) -> None:
        """Forget the previous update."""
        self._values = {}

    def keep(self, items: list[Experience], **values: torch.Tensor | None) -> None:
        """Keep [B, T] values, padded on the right, by their names in ``samples.jsonl``; does not
        wait.
        """
        kept = {name: rows.detach() for name, rows in values.items() if rows is not None}
        for i, item in enumerate(items):
            row = _Row(item.action_mask.bool(), {name: rows[i] for name, rows in kept.items()})
            self._values.setdefault(int(item.info[SAMPLE_INDEX]), row)

    def lookup(self, indices: Iterable[int]) -> list[dict[str, list[float]] | None]:
        """For each sample, field -> value per response token; None if another rank trained it."""
        rows = (self._values.get(index) for index in indices)
        return [None if row is None else row.lists() for row in rows]
