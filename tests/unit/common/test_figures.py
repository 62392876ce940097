"""Every picture is saved by the one function that keeps remarks about fonts off the terminal."""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path

from matplotlib.figure import Figure

from sg_rlhf.common import figures

ROOT = Path(__file__).parents[3]


def test_letters_without_a_picture_are_no_warning() -> None:
    figure = Figure()
    figure.suptitle("实验 🚀")
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figures.save(figure, buffer, format="png")
    assert buffer.getvalue().startswith(b"\x89PNG")


def test_nothing_else_saves_figures() -> None:
    files = [*(ROOT / "sg_rlhf").rglob("*.py"), *(ROOT / "eval").rglob("*.py")]
    found = [file.name for file in files if re.search(r"\.savefig\(", file.read_text())]
    assert found == ["figures.py"]
