"""Format the checks as a table, and the verdict."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sg_rlhf.common.environment import as_typed
from sg_rlhf.doctor.check import FAILED, OK, SKIPPED, WARNING
from sg_rlhf.doctor.needs import suggested_hardware
from sg_rlhf.machine import names

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

    from sg_rlhf.doctor.check import Check
    from sg_rlhf.doctor.facts import Facts
    from sg_rlhf.doctor.needs import Needs

_COLOURS = {OK: "32", WARNING: "33", FAILED: "31", SKIPPED: "2"}
_MODELS = {
    names.TINY: "the small models",
    names.UP_TO_1B: "reduced recipes of 0.5B",
    names.UP_TO_3B: "models of 3B",
    names.UP_TO_8B: "models of 3B to 8B",
}
#: Widest column; longer cells overflow and do not widen it.
_WIDEST = 34


def coloured(stream: TextIO) -> bool:
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
    if needs.recipe or needs.install or facts.gpus is None:
        return works
    name = suggested_hardware(facts.gpus)
    if not name:
        return works
    models = _MODELS[names.largest_models(names.parse(name), facts.memory_gib)]
    return f"{works}; the training scripts choose SG_HARDWARE={name} here: {models}"
