"""`--samples` and `--k`: how many responses a question gets, and which pass@k are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.suite import Benchmark


def sampled(
    benchmarks: Sequence[Benchmark], samples: int | None, ks: Sequence[int] | None
) -> tuple[Benchmark, ...]:
    """The benchmarks with another number of samples and other pass@k.

    Only what is sampled (T > 0) changes: a greedy response is the same each time.

    Args:
        samples: responses to each question; None: as the suite has it.
        ks: the k of pass@k; None: as the suite has it, as far as there are so many samples, and
            with `samples` that number too.

    Raises:
        EvalError: nothing selected is sampled, or there are fewer than k samples.
    """
    if samples is None and ks is None:
        return tuple(benchmarks)
    names = ", ".join(benchmark.name for benchmark in benchmarks)
    if samples is not None and not any(b.settings.temperature > 0 for b in benchmarks):
        raise EvalError(
            f"--samples {samples}: {names}: greedy, which gives the same response each time; "
            "select what is sampled with --only (--list shows it)"
        )
    changed = tuple(_changed(benchmark, samples, ks) for benchmark in benchmarks)
    if ks is not None and all(benchmark.settings.n == 1 for benchmark in changed):
        raise EvalError(
            f"--k {_listed(ks)}: {names}: one response to each question; pass@k needs more "
            "(--samples N for what is sampled)"
        )
    return changed


def _changed(benchmark: Benchmark, samples: int | None, ks: Sequence[int] | None) -> Benchmark:
    settings = benchmark.settings
    if samples is not None and settings.temperature > 0:
        settings = replace(settings, n=samples)
    n = settings.n
    if ks is None:
        # Asked for more samples, a suite that has pass@k has it for all of them.
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
