"""What a tiny model (`sg_rlhf.tiny`) needs of a domain: what it reads, is shown, and its grader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sg_rlhf.tasks.grade import Grade

Item = TypeVar("Item")

#: Ends a turn of the tiny models, which speak ChatML.
EOS = "<|im_end|>"

# What BPE sees of ordinary language: enough for digits, spaces and short words of other prompts
# not to cost one token per letter. Written for this purpose; nothing is learnt from it but
# merges.
MERGE_TEXT = (
    "Let's think step by step and output the final answer within \\boxed{}. Find the value"
    " of the number x such that the sum of the terms is equal to the product. How many of"
    " the integers from 1 to 100 are there? Answer the given question. You must think "
    "about what you know, then search for the information that you need, and give the "
    "answer when you have it. Who was the first person that wrote the book? Where is the "
    "river in the country? There are 12 apples and 24 pears; the other one has more. In "
    "the end the total is 36. Suppose that the function is continuous on the interval and"
    " that for every point there is another point. The reasoning must be right, the "
    "result must be stated clearly, and the question must be answered in full."
)


@dataclass(frozen=True)
class Recipe(ABC):
    """The warm start of a domain: all that decides the weights, apart from the code and the seed.

    Attributes:
        clean_share: share of the `steps`, at the start, that see right work alone.
        row_tokens: tokens of a row; a longer demonstration is left out.
        muon_lr: learning rate of the matrices; adamw_lr: of embeddings and norms.
    """

    steps: int
    clean_share: float = 0.75
    rows: int = 10
    row_tokens: int = 300
    muon_lr: float = 0.02
    adamw_lr: float = 4e-3

    @abstractmethod
    def texts(self, seed: int, *, clean: bool) -> Iterator[tuple[str, str]]:
        """Endless (prompt, response), never with a held-out item; `clean`: right work alone."""


@dataclass(frozen=True)
class TinyModel(Generic[Item]):
    """How a tiny model learns one domain; an item is one problem with its answer.

    Attributes:
        what: in the sentence "warm-started on synthetic ... traces".
        items: what an item is called, in the plural.
        phrases: the tokenizer's phrases, one entry each.
        held_out: recipe -> the items that are measured.
        grade: (response with its end token, item) -> the training reward's verdict.
        group: accuracy is also given for each of these groups of items.
        guess: the word that a response without work starts with.
        max_new_tokens: of a response, when it is measured.
    """

    what: str
    items: str
    recipe: Recipe
    phrases: Callable[[], list[str]]
    held_out: Callable[[Any], list[Item]]
    prompt: Callable[[Item], str]
    grade: Callable[[str, Item], Grade]
    group: Callable[[Item], str]
    guess: str
    max_new_tokens: int
    merge_text: str = MERGE_TEXT
