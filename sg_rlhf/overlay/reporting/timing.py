"""The controller's wall clock: seconds of each section of a rollout step.

Every second between two rows of ``metrics.jsonl`` belongs to the current section, or to ``other``
(:mod:`sg_rlhf.run_dir.timing_keys`). Upstream times four calls alone.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

from sg_rlhf.run_dir import timing_keys


def _ignore(_section: str) -> None:
    """Report nothing."""


class PhaseTimer:
    """Seconds per section since the last row; ``now`` is monotonic time."""

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        on_change: Callable[[str], None] = _ignore,
    ) -> None:
        self._now, self._on_change = now, on_change
        self._since = now()
        self._open = [timing_keys.OTHER]
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Count the block as ``name``, except for sections inside it."""
        self._settle()
        self._open.append(name)
        self._on_change(name)
        try:
            yield
        except BaseException:
            self._on_change = _ignore  # the last reported section is where the run ended
            raise
        finally:
            # Reporting takes time, which is counted in this section.
            self._on_change(self._open[-2])
            self._settle()
            self._open.pop()

    def reassign(self, seconds: float, source: str, target: str) -> None:
        """Count seconds of ``source`` as ``target``."""
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def pop_row(self) -> dict[str, float]:
        """Metrics ``timing/...`` since the last call."""
        self._settle()
        seconds, self._seconds = self._seconds, defaultdict(float)
        return timing_keys.row(seconds)

    def _settle(self) -> None:
        now = self._now()
        self._seconds[self._open[-1]] += now - self._since
        self._since = now
