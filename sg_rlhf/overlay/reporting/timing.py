"""The controller's wall clock: what each part of a rollout takes, counted once, nothing left out.

Upstream times four calls and writes their sum as the step, so that whatever is between them is not
seen. Here every second from one rollout's row to the next belongs to the part that is under way, or
to ``other`` (:mod:`sg_rlhf.run_dir.timing_keys`).
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

from sg_rlhf.run_dir import timing_keys


def _nobody(_part: str) -> None:
    """Nobody asked."""


class PhaseTimer:
    """Seconds by part since the latest row.

    Args:
        now: seconds that only grow.
        tell: hears the name of the part that is under way whenever it changes.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        tell: Callable[[str], None] = _nobody,
    ) -> None:
        self._now, self._tell = now, tell
        self._since = now()
        self._under_way = [timing_keys.OTHER]
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs in this block is ``name``, but for the parts inside it."""
        self._settle()
        self._under_way.append(name)
        self._tell(name)
        try:
            yield
        except BaseException:
            self._tell = _nobody  # what the run ends in is what was told last
            raise
        finally:
            # Telling takes time as well: it is the part's, and not of what has no name.
            self._tell(self._under_way[-2])
            self._settle()
            self._under_way.pop()

    def between(self, name: str = timing_keys.OTHER) -> None:
        """From now on what is in no block is ``name``: for upstream's code between two of ours."""
        self._settle()
        self._under_way[0] = name

    def move(self, seconds: float, source: str, target: str) -> None:
        """Part of what ``source`` took was ``target``, as is known only afterwards."""
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def take(self) -> dict[str, float]:
        """The row's keys and seconds; the next row begins."""
        self._settle()
        taken, self._seconds = self._seconds, defaultdict(float)
        return timing_keys.row(taken)

    def _settle(self) -> None:
        now = self._now()
        self._seconds[self._under_way[-1]] += now - self._since
        self._since = now
