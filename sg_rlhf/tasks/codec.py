"""Text to token ids and back (`rollout.Codec`), with nothing added and nothing left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TokenizerCodec:
    """A Hugging Face tokenizer: the codec of training and of evaluation."""

    ids_per_token = 1

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        self.control_tokens: list[str] = sorted(
            {*added, *tokenizer.all_special_tokens}, key=lambda token: (-len(token), token)
        )
        self.control_ids = frozenset(tokenizer.convert_tokens_to_ids(self.control_tokens))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(self._tokenizer(text=text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens written out, spaces as they are."""
        return str(
            self._tokenizer.decode(
                token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )


class CharacterCodec:
    """Characters in the place of tokens: for clients of an environment that send text."""

    ids_per_token = 4
    control_tokens: Sequence[str] = ()
    control_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        """Code points of a text."""
        return list(map(ord, text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of code points."""
        return "".join(map(chr, token_ids))
