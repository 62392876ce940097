r"""The final answer of a response: its last complete `\boxed{...}` or `\fbox{...}`."""

from __future__ import annotations

import re

from sg_rlhf.tasks.math.answers.normalize import balanced

# A blank line ends a box, as in LaTeX: one forgotten brace must not swallow the rest of a response.
# Every alternative starts at a different character or is possessive, so the scan is linear.
_TOKEN = re.compile(
    r"""\\(?:boxed|fbox)(?![A-Za-z])\s*+(?:(?P<open>\{)|(?P<bare>[+-]?[0-9][0-9.,/]*+|[A-Za-z]\b))?
    |   \\\\(?!boxed|fbox)
    |   \\[{}]
    |   (?P<left>\{)
    |   (?P<right>\})
    |   (?P<blank>\n[ \t\r]*+\n)
    """,
    re.VERBOSE,
)
_WHOLE_BOX = re.compile(r"\s*\\(?:boxed|fbox)\s*\{(.*)\}\s*", re.DOTALL)


def last_box(response: str) -> str | None:
    r"""The content of the box that ends last, or None. Linear in the length of the response.

    - Braces nest, unless escaped. A box inside a box is part of the outer one (see `strip_boxes`).
    - A box that is never closed, or holds a blank line, is none.
    - Without braces, `\boxed 5`, the box is the number or the single letter that follows.
    - An empty box counts as a box, and its content is "".
    """
    found: tuple[int, int] | str | None = None  # where it stands; cut out once, at the end
    stack: list[int | None] = []  # start of a box's content; None for any other open brace
    for token in _TOKEN.finditer(response):
        kind = token.lastgroup
        if kind == "open":
            stack.append(token.end())
        elif kind == "left":
            stack.append(None)
        elif kind == "right" and stack:
            start = stack.pop()
            if start is not None:
                found = (start, token.start())
        elif kind == "bare":
            found = token["bare"].rstrip(".,/")
        elif kind == "blank":
            stack.clear()
    if found is None:
        return None
    return strip_boxes(found if isinstance(found, str) else response[slice(*found)]).strip()


def strip_boxes(text: str) -> str:
    r"""Remove boxes that are the whole text: `\boxed{5}` -> `5`. Others stay."""
    for _ in range(3):
        match = _WHOLE_BOX.fullmatch(text)
        # `\boxed{5}, \boxed{6}` also begins with a box and ends with a brace.
        if match is None or not balanced(match[1]):
            return text
        text = match[1]
    return text
