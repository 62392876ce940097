"""The prompts of a run, checked for the model that will read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from openrlhf.datasets import PromptDataset as Upstream

from sg_rlhf.data_io.prompt_validation import (
    SUFFIXES,
    PromptIndex,
    PromptSchema,
    checked,
    max_prompt_tokens,
    too_long,
)
from sg_rlhf.data_io.records import DataError
from sg_rlhf.overlay.reporting.errors import UnusablePrompts
from sg_rlhf.tasks import chat


class PromptDataset(Upstream):
    """Upstream's data set with checks of its rows, and with the BOS that the model expects.

    Upstream encodes prompts without special tokens, so a model that expects a BOS would get a plain
    prompt without one. A prompt made by another model's template would be read as plain text.
    """

    prompts: list[str]

    def __init__(self, dataset: Any, tokenizer: Any, strategy: Any, *args: Any, **kwargs: Any):
        """Read as upstream does. The error of a row is kept for :meth:`check`."""
        self._args = strategy.args
        data = self._args.data
        fields = PromptSchema(
            data.input_key, data.label_key, data.image_key, data.apply_chat_template
        )
        keep = self._args.sg.contradicting_labels == "keep"
        self._row_error = _row_error(dataset, fields, PromptIndex(keep=keep))
        if self._row_error is not None:
            # Upstream reads a placeholder, so that the run gets as far as `check`.
            dataset = [{fields.prompt: "-", fields.label or "": "-"}]
        # Upstream reads fields of the row itself.
        rows = map(fields.flat, dataset)
        super().__init__(rows, tokenizer, strategy, *args, **kwargs)
        # A processor of images has a tokenizer inside.
        self._text_tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        self.prompts = chat.with_bos(self.prompts, self._text_tokenizer)

    def check(self) -> None:
        """Refuse incomplete rows, prompts of another template, and prompts that are too long.

        Not part of ``__init__``: Ray loses the cause of an actor's failed start.

        Raises:
            UnusablePrompts: one line with the remedy.
        """
        if self._row_error is not None:
            raise UnusablePrompts(self._row_error)
        try:
            for prompt in self.prompts[:1]:  # one template made them all
                chat.check_format(prompt, self._text_tokenizer)
        except ValueError as error:
            raise UnusablePrompts(str(error)) from None
        if not self._counted_before():
            self._check_lengths()

    def _counted_before(self) -> bool:
        """Whether the driver counted the tokens, as it does for local files."""
        data = self._args.data
        names = [name.strip().partition("@")[0] for name in data.prompt_dataset.split(",")]
        return not data.apply_chat_template and all(Path(n).suffix in SUFFIXES for n in names)

    def _check_lengths(self) -> None:
        limits = self._args.data.max_len, self._args.rollout.max_new_tokens
        max_tokens = max_prompt_tokens(*limits)
        # A text has no more tokens than bytes, so only long texts are encoded. Upstream adds the
        # tokens of images later.
        rows = [
            row
            for row, (text, images) in enumerate(zip(self.prompts, self.images, strict=True), 1)
            if not images and len(text.encode()) > max_tokens
        ]
        refused = []  # (tokens, row)
        for start in range(0, len(rows), 4096):
            chunk = rows[start : start + 4096]
            texts = [self.prompts[row - 1] for row in chunk]
            encoded = self._text_tokenizer(texts, add_special_tokens=False)["input_ids"]
            lengths = zip(map(len, encoded), chunk, strict=True)
            refused += [(tokens, row) for tokens, row in lengths if tokens > max_tokens]
        if refused:
            tokens, row = max(refused)
            why = too_long(tokens, len(refused), *limits)
            raise UnusablePrompts(f"row {row} of the prompts: {why}")


def _row_error(dataset: Any, fields: PromptSchema, seen: PromptIndex) -> str | None:
    try:
        rows = ((f"row {number} of the prompts", row) for number, row in enumerate(dataset, 1))
        for _ in checked(rows, fields, seen):
            pass
    except DataError as error:
        return str(error)
    return None
