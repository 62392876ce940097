"""Sampling settings from the command line in place of a suite's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.suite import Benchmark


@dataclass(frozen=True)
class Overrides:
    """`--temperature`, `--top-p` and `--max-tokens`; None: each benchmark's own setting.

    Attributes:
        temperature: 0 is greedy.
        top_p: probability mass of the nucleus, above 0 and up to 1.
        max_tokens: most tokens per response.
    """

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """The settings that were given, for JSON."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def apply(self, benchmarks: Sequence[Benchmark]) -> tuple[Benchmark, ...]:
        """The benchmarks with these settings.

        `top_p` applies to sampled benchmarks (temperature above 0). A benchmark that becomes greedy
        has one response per question and no pass@k: all its responses would be the same.

        Raises:
            EvalError: `top_p` is above 1, or no benchmark is sampled.
        """
        if self.top_p is not None and self.top_p > 1.0:
            raise EvalError(f"--top-p {self.top_p:g}: expected a number above 0 and up to 1")
        changed = tuple(map(self._apply_to, benchmarks))
        if self.top_p is not None and not any(b.settings.temperature > 0 for b in changed):
            names = ", ".join(benchmark.name for benchmark in benchmarks)
            raise EvalError(
                f"--top-p {self.top_p:g}: {names}: greedy, which has no nucleus; give "
                "--temperature above 0 as well"
            )
        return changed

    def _apply_to(self, benchmark: Benchmark) -> Benchmark:
        settings, pass_at = benchmark.settings, benchmark.pass_at
        if self.max_tokens is not None:
            settings = replace(settings, max_tokens=self.max_tokens)
        if self.temperature is not None:
            settings = replace(settings, temperature=self.temperature)
        if self.top_p is not None and settings.temperature > 0:
            settings = replace(settings, top_p=self.top_p)
        if settings.temperature == 0:
            settings, pass_at = replace(settings, n=1, top_p=1.0), ()
        return replace(benchmark, settings=settings, pass_at=pass_at)


def sampled(
    benchmarks: Sequence[Benchmark], samples: int | None, ks: Sequence[int] | None
) -> tuple[Benchmark, ...]:
    """The benchmarks with another number of responses per question and other pass@k.

    Only sampled benchmarks (temperature above 0) change: a greedy response is always the same.

    Args:
        samples: responses per question (`--samples`); None: the suite's number.
        ks: the k of pass@k (`--k`); None: the suite's k up to the number of samples, and with
            `samples` that number too.

    Raises:
        EvalError: no selected benchmark is sampled, or there are fewer than k samples.
    """
    if samples is None and ks is None:
        return tuple(benchmarks)
    names = ", ".join(benchmark.name for benchmark in benchmarks)
    if samples is not None and not any(b.settings.temperature > 0 for b in benchmarks):
        raise EvalError(
            f"--samples {samples}: {names}: greedy, which gives the same response each time; "
            "select sampled benchmarks with --only (--list shows them), or give --temperature"
        )
    changed = tuple(_changed(benchmark, samples, ks) for benchmark in benchmarks)
    if ks is not None and all(benchmark.settings.n == 1 for benchmark in changed):
        raise EvalError(
            f"--k {_listed(ks)}: {names}: one response to each question; pass@k needs more "
            "(--samples N, for sampled benchmarks)"
        )
    return changed


def _changed(benchmark: Benchmark, samples: int | None, ks: Sequence[int] | None) -> Benchmark:
    settings = benchmark.settings
    if samples is not None and settings.temperature > 0:
        settings = replace(settings, n=samples)
    n = settings.n
    if ks is None:
        # With more samples, a suite that reports pass@k reports it for k = all of them too.
        wanted = {*benchmark.pass_at, *({n} if benchmark.pass_at else ())}
        pass_at = tuple(sorted(k for k in wanted if 1 < k <= n))
    elif n == 1:
        pass_at = ()
    elif max(ks) > n:
        raise EvalError(
            f"--k {_listed(ks)}: {benchmark.name} has {n} samples of each question, expected k of "
            f"at most {n}, or --samples {max(ks)}"
        )
    else:
        pass_at = tuple(ks)
    return replace(benchmark, settings=settings, pass_at=pass_at)


def _listed(ks: Sequence[int]) -> str:
    return ",".join(map(str, ks))
