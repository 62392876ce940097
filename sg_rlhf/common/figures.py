"""Saving matplotlib's figures."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import IO, Any


def save(figure: Any, to: str | Path | IO[Any], **options: Any) -> None:
    """``figure.savefig`` without a warning for each character that the font lacks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font", UserWarning)
        figure.savefig(to, **options)
