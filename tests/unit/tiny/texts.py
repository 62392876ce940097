"""Texts that a tiny model's tokenizer must survive."""

from __future__ import annotations

from hypothesis import strategies as st

from sg_rlhf.tiny.tokenizer import CONTROL


def texts_with(phrases: list[str]) -> st.SearchStrategy[str]:
    """Any text, with phrases of the tokenizer in it."""
    # Random unicode seldom holds a phrase, so half of the material is phrases, whole and cut.
    pieces = st.one_of(
        st.text(),
        st.sampled_from([*CONTROL, *phrases]),
        st.sampled_from(phrases).flatmap(lambda p: st.integers(1, len(p)).map(lambda n: p[:n])),
    )
    return st.lists(pieces, max_size=8).map("".join)
