"""The prompt of Search-R1, word for word, and a short one for a tiny model."""

from __future__ import annotations

from typing import Literal, get_args

Style = Literal["search_r1", "short"]
STYLES: tuple[Style, ...] = get_args(Style)

# Changes whenever the text of a prompt does; written to every data set's manifest.
PROMPT_VERSION = "search-r1-1"

# "as your want" is the reference's own. The example answer makes the prompt hold an answer block.
_INSTRUCTIONS = (
    "Answer the given question. "
    "You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. "
    "After reasoning, if you find you lack some knowledge, you can call a search engine by "
    "<search> query </search> and it will return the top searched results between "
    "<information> and </information>. "
    "You can search as many times as your want. "
    "If you find no further external knowledge needed, you can directly provide the answer "
    "inside <answer> and </answer>, without detailed illustrations. "
    "For example, <answer> Beijing </answer>. "
)


def build_prompt(question: str, style: Style = "search_r1") -> str:
    """The user's turn, which ends in a question mark and a newline; `short`: the bare question."""
    text = question.strip()
    if not text.endswith("?"):
        text += "?"
    return f"{_INSTRUCTIONS if style == 'search_r1' else ''}Question: {text}\n"
