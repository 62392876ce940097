"""What a tiny model needs to know of a domain: what it reads, what it is shown, how it is graded.

The tokenizer, the warm start and the build are the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

Item = TypeVar("Item")


class Recipe(Protocol):
    """What decides the weights, beside the code and the seed; a frozen dataclass per domain."""

    # What makes a class a dataclass to a type checker.
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def steps(self) -> int:
        """Optimizer steps in all."""

    @property
    def clean_share(self) -> float:
        """The share of steps, at the start, that see right work alone: the skill takes most of the
        compute, the bad habits that follow are quickly learnt.
        """

    @property
    def rows(self) -> int:
        """Rows of a batch, filled with packed demonstrations."""

    @property
    def row_tokens(self) -> int:
        """Tokens of a row; a longer demonstration is left out."""

    @property
    def muon_lr(self) -> float:
        """Learning rate of the matrices."""

    @property
    def adamw_lr(self) -> float:
        """Learning rate of embeddings and norms."""

    def texts(self, seed: int, *, clean: bool) -> Iterator[tuple[str, str]]:
        """An endless stream of (prompt, response), never with a held-out item; clean: right work
        alone.
        """


class Grade(NamedTuple):
    """What the domain's training reward says of one response."""

    correct: bool
    well_formed: bool


@dataclass(frozen=True)
class Domain(Generic[Item]):
    """One kind of problem; an item is one problem with its answer."""

    what: str
    items: str
    shipped: Path
    recipe: Recipe
    # The tokenizer's phrases, one entry each, and the text that BPE learns its merges from.
    phrases: Callable[[], list[str]]
    merge_text: str
    held_out: Callable[[Any], list[Item]]
    prompt: Callable[[Item], str]
    grade: Callable[[str, Item], Grade]
    # Accuracy is also given for each of these groups.
    group: Callable[[Item], str]
    # The word that a response without work starts with.
    guess: str
    max_new_tokens: int
    # The measured key that reinforcement learning is to raise.
    goal: str = "accuracy"
