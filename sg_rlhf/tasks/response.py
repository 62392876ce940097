"""The response inside what OpenRLHF hands to a reward function, shared by the tasks."""

from __future__ import annotations


def response_of(query: str, prompt: str, marker: str) -> str:
    """The response inside a query (prompt and response, decoded together).

    A tokenizer round trip can change white space or add a token at the front, and a prompt that is
    too long loses its beginning. Then the prompt's end is looked for as its last 100 characters,
    and as its last `marker` counted from the left. The first place found counts: a response that
    writes a new assistant turn must not choose which part of it is graded.

    Args:
        marker: text near the prompt's end that a round trip keeps; what follows its last occurrence
            in the prompt is taken for the response's.

    Returns:
        The text behind the prompt; the whole query if the prompt's end is not in it.
    """
    if query.startswith(prompt):
        return query[len(prompt) :]
    ends = []
    tail = prompt[-100:]
    at = query.find(tail)
    if at >= 0:
        ends.append(at + len(tail))
    n_markers = prompt.count(marker)
    pieces = query.split(marker, n_markers)
    if len(pieces) == n_markers + 1:
        ends.append(len(query) - len(pieces[-1]))
    return query[min(ends, default=0) :]
