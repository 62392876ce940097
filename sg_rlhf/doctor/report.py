"""Format the checks as a table, and the verdict."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TextIO

from sg_rlhf.common.environment import as_typed
from sg_rlhf.doctor.check import FAILED, OK, SKIPPED, WARNING, Check
from sg_rlhf.doctor.checks import Needs
from sg_rlhf.doctor.facts import Facts
from sg_rlhf.machine import names
from sg_rlhf.machine.gpus import hardware_name

_COLOURS = {OK: "32", WARNING: "33", FAILED: "31", SKIPPED: "2"}
#: Widest column; longer cells overflow and do not widen it.
_WIDEST = 34


def use_colour(stream: TextIO) -> bool:
    """Whether to use colours: only on a terminal, never with NO_COLOR (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def table(checks: Sequence[Check], colour: bool) -> list[str]:
    """One line per check: status, name, found, needed, what to do; remarks in brackets."""
    rows = [(c.status, c.name, c.found, c.needed, _last(c)) for c in checks]
    heading = ("", "", "found", "needed", "what to do")
    widths = [
        min(_WIDEST, max(len(row[column]) for row in [*rows, heading])) for column in range(4)
    ]
    return [_line(row, widths, colour) for row in [heading, *rows]]


def _last(check: Check) -> str:
    remark = f"({check.remark})" if check.remark else ""
    return as_typed(f"{check.remedy} {remark}".strip())


def _line(row: tuple[str, ...], widths: list[int], colour: bool) -> str:
    cells = [row[column].ljust(width) for column, width in enumerate(widths)]
    if colour and row[0] in _COLOURS:
        cells[0] = f"\x1b[{_COLOURS[row[0]]}m{cells[0]}\x1b[0m"
    return "  ".join([*cells, row[4]]).rstrip()


def verdict(checks: Sequence[Check], facts: Facts, needs: Needs) -> str:
    """The last line: whether it works and, without a recipe, which models fit."""
    failed = [check.name for check in checks if check.status == FAILED]
    warned = [check.name for check in checks if check.status == WARNING]
    if failed:
        return f"cannot work: {', '.join(failed)}"
    works = f"works, with warnings: {', '.join(warned)}" if warned else "fine"
    if needs.recipe or facts.gpus is None:
        return works
    name = hardware_name(facts.gpus)
    if not name:
        return works
    models = names.MODELS[names.largest_models(names.parse(name), facts.memory_gib)]
    return f"{works}; `sg-rlhf run` chooses --hardware {name} here: {models}"
