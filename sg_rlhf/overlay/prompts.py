"""The prompts of a run, checked against the model that is to read them."""

from __future__ import annotations

from typing import Any

from openrlhf.datasets import PromptDataset as Upstream

from sg_rlhf.overlay.errors import UnfitPrompts
from sg_rlhf.tasks import chat


class PromptDataset(Upstream):
    """Upstream's data set, whose prompts are in the model's form and begin with one BOS.

    Upstream encodes prompts without special tokens, so a plain prompt would reach a model that
    expects a BOS without one. A prompt with control tokens of another family would be read as
    plain text, and nothing would say so.
    """

    prompts: list[str]

    def __init__(self, dataset: Any, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        """Upstream's reading, with the BOS."""
        super().__init__(dataset, tokenizer, *args, **kwargs)
        # A processor of images has a tokenizer inside.
        self._text_tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        self.prompts = chat.with_bos(self.prompts, self._text_tokenizer)

    def check(self) -> None:
        """Refuse another family's prompts. Apart, as Ray loses the cause of a failed start.

        Raises:
            UnfitPrompts: one line with the remedy.
        """
        try:
            for prompt in self.prompts[:1]:  # they are all written by one template
                chat.check_form(prompt, self._text_tokenizer)
        except ValueError as error:
            raise UnfitPrompts(str(error)) from None
