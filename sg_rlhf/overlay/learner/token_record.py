"""Log-probs and entropies of each token in the latest update, for ``samples.jsonl``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from sg_rlhf.overlay.learner.micro_batches import SAMPLE_INDEX


class TokenRecord:
    """Log-probs and entropies of one rank's samples in the latest update.

    A sample that is trained several times (``train.max_epochs``, ``sg.update=lopti``) has those of
    the first time.
    """

    def __init__(self) -> None:
        self._values: dict[int, dict[str, torch.Tensor]] = {}

    def clear(self) -> None:
        """Forget the previous update."""
        self._values = {}

    def keep(self, items: list[Any], **values: torch.Tensor | None) -> None:
        """Keep values of a micro-batch's response tokens.

        Args:
            items: its B samples, as the replay buffer has them.
            values: by the name of a field of ``samples.jsonl``: [B, T], padded on the right; None
                for values that this run does not compute.
        """
        on_cpu = {k: v.detach().float().cpu() for k, v in values.items() if v is not None}
        for i, item in enumerate(items):
            mask = item.action_mask.bool()
            row = {name: rows[i][: len(mask)][mask] for name, rows in on_cpu.items()}
            self._values.setdefault(int(item.info[SAMPLE_INDEX]), row)

    def lookup(self, indices: Iterable[int]) -> list[dict[str, list[float]] | None]:
        """The values of samples.

        Args:
            indices: of the samples in the rollout.

        Returns:
            For each sample, field -> value of each response token; None where this rank did not
            train it.
        """
        rows = (self._values.get(index) for index in indices)
        return [None if row is None else {k: v.tolist() for k, v in row.items()} for row in rows]
