"""One check and its outcome. Standard library and Python 3.8 only: `preflight` imports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"


@dataclass(frozen=True)
class Check:
    """The outcome of one check."""

    name: str
    status: str  # ok; warning: works with a drawback; failed: cannot work; skipped: not known
    found: str
    needed: str = ""
    remedy: str = ""
    remark: str = ""

    def line(self) -> str:
        """The check as one line, for a terminal or a log."""
        needed = f", needed: {self.needed}" if self.needed else ""
        remedy = f": {self.remedy}" if self.remedy else ""
        remark = f" ({self.remark})" if self.remark else ""
        return f"{self.name}: found {self.found}{needed}{remedy}{remark}"


def exit_status(checks: Iterable[Check]) -> int:
    """0 if all is fine, 1 with warnings, 2 with a failed check."""
    statuses = {check.status for check in checks}
    return 2 if FAILED in statuses else 1 if WARNING in statuses else 0
