"""What a rank's update computes of each token, for the samples that the run's log keeps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class TokenRecord:
    """Log-probs and entropies of one rank's samples in the latest update.

    Of a sample that is trained several times (``train.max_epochs``, ``sg.update=lopti``) it has
    those of the first time.
    """

    def __init__(self) -> None:
        self._found: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []

    def clear(self) -> None:
        """Forget the update before."""
        self._found = []

    def keep(self, items: list[Any], **values: torch.Tensor | None) -> None:
        """Keep values of a micro-batch's tokens.

        Args:
            items: its B samples, as the replay buffer has them.
            values: by the name of a field of ``samples.jsonl``: [B, T], padded on the right; None
                for values that this run does not compute.
        """
        on_cpu = {k: v.detach().float().cpu() for k, v in values.items() if v is not None}
        for i, item in enumerate(items):
            mask = item.action_mask.bool()
            row = {name: rows[i][: len(mask)][mask] for name, rows in on_cpu.items()}
            self._found.append((item.sequences.to("cpu", copy=True), row))

    def lookup(self, sequences: Iterable[list[int]]) -> list[dict[str, list[float]] | None]:
        """The values of the response tokens of samples.

        Args:
            sequences: token ids of prompt and response.

        Returns:
            For each sequence, values by name; None where this rank did not train it.
        """
        rows = (self._first(torch.tensor(tokens)) for tokens in sequences)
        return [None if row is None else {k: v.tolist() for k, v in row.items()} for row in rows]

    def _first(self, tokens: torch.Tensor) -> dict[str, torch.Tensor] | None:
        return next((row for known, row in self._found if torch.equal(known, tokens)), None)
