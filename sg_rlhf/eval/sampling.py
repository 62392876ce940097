"""Sampling settings from the command line in place of a suite's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.suite import Benchmark


@dataclass(frozen=True)
class SamplingOptions:
    """Options of the command line; None: each benchmark's own setting.

    Without `ks` (`--k`) pass@k has the suite's k up to the number of samples, and with `samples`
    that number too.
    """

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    samples: int | None = None
    ks: Sequence[int] | None = None

    def overrides(self) -> dict[str, Any]:
        """Temperature, top_p and max_tokens where they are given, for JSON."""
        names = ("temperature", "top_p", "max_tokens")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def apply(self, benchmarks: Sequence[Benchmark]) -> tuple[Benchmark, ...]:
        """The benchmarks with these settings.

        `top_p`, `samples` and `ks` apply to sampled benchmarks (temperature above 0): all greedy
        responses to a question are equal, so a greedy benchmark has one response and no pass@k.
        """
        if self.top_p is not None and self.top_p > 1.0:
            raise EvalError(f"--top-p {self.top_p:g}: expected a number above 0 and up to 1")
        changed = tuple(map(self._apply_to, benchmarks))
        names = ", ".join(benchmark.name for benchmark in benchmarks)
        is_greedy = not any(benchmark.settings.temperature > 0 for benchmark in changed)
        if self.top_p is not None and is_greedy:
            raise EvalError(
                f"--top-p {self.top_p:g}: {names}: greedy, which has no nucleus; give "
                "--temperature above 0 as well"
            )
        if self.samples is not None and is_greedy:
            raise EvalError(
                f"--samples {self.samples}: {names}: greedy, which gives the same response each "
                "time; select sampled benchmarks with --only (--list shows them), or give "
                "--temperature"
            )
        if self.ks is not None and all(benchmark.settings.n == 1 for benchmark in changed):
            raise EvalError(
                f"--k {_listed(self.ks)}: {names}: one response to each question; pass@k needs "
                "more (--samples N, for sampled benchmarks)"
            )
        return changed

    def _apply_to(self, benchmark: Benchmark) -> Benchmark:
        settings = replace(benchmark.settings, **self.overrides())
        if settings.temperature == 0:
            settings = replace(settings, n=1, top_p=1.0)
        elif self.samples is not None:
            settings = replace(settings, n=self.samples)
        pass_at = self._pass_at(benchmark, settings.n)
        return replace(benchmark, settings=settings, pass_at=pass_at)

    def _pass_at(self, benchmark: Benchmark, n: int) -> tuple[int, ...]:
        if n == 1:
            return ()
        if self.ks is None:
            # With more samples, a suite that reports pass@k reports it for all of them too.
            of_all = {n} if benchmark.pass_at and self.samples is not None else set()
            return tuple(sorted(k for k in {*benchmark.pass_at, *of_all} if k <= n))
        if max(self.ks) > n:
            raise EvalError(
                f"--k {_listed(self.ks)}: {benchmark.name} has {n} samples of each question, "
                f"expected k of at most {n}, or --samples {max(self.ks)}"
            )
        return tuple(self.ks)


def _listed(ks: Sequence[int]) -> str:
    return ",".join(map(str, ks))
