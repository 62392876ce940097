"""Errors of one line, whatever stands in the names and values that they quote."""

from __future__ import annotations


class OneLineError(ValueError):
    """An error whose message has no line breaks, also where a key or a value has some."""

    def __init__(self, message: object = "") -> None:
        super().__init__(" ".join(str(message).splitlines()))
