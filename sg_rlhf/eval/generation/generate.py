"""Generates, grades and stores single responses, at the same time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from tqdm import tqdm

from sg_rlhf.eval.engines.base import Completion, Engine, drain
from sg_rlhf.eval.generation.requests import PendingSample
from sg_rlhf.eval.store import Store


def generate_all(
    samples: Sequence[PendingSample], engine: Engine | None, store: Store, already: int
) -> None:
    """Generate, grade and store every sample.

    Grading runs in a thread of its own, so that a slow answer does not delay the engine. Rows are
    stored in the order of completion, each with its grade.

    Args:
        engine: None if no sample needs one (every prompt fills the context).
        already: number of samples stored before, for the progress bar.

    Raises:
        EvalError: the engine failed; what was graded is stored.
    """
    by_key = {sample.request.key: sample for sample in samples}
    too_long = [sample for sample in samples if sample.request.max_tokens == 0]
    requests = [sample.request for sample in samples if sample.request.max_tokens > 0]
    with (
        ThreadPoolExecutor(1, thread_name_prefix="grader") as grader,
        tqdm(total=already + len(samples), initial=already, unit="sample", smoothing=0.0) as bar,
    ):
        writes: list[Future[None]] = []

        def keep(completions: list[Completion]) -> None:
            graded = [(by_key[completion.key], completion) for completion in completions]
            writes.append(grader.submit(_grade_and_store, graded, store))
            # An error of the grader or the disk ends the run now, not after hours of sampling.
            while writes and writes[0].done():
                writes.pop(0).result()
            bar.update(len(completions))

        keep([Completion(sample.request.key, "", "prompt_too_long", 0) for sample in too_long])
        start, tokens = time.monotonic(), 0
        try:
            if engine is not None:
                for completions in drain(engine, requests):
                    keep(completions)
                    tokens += sum(completion.tokens for completion in completions)
                    rate = tokens / (time.monotonic() - start)
                    bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        finally:
            for write in writes:
                write.result()


def _grade_and_store(graded: Sequence[tuple[PendingSample, Completion]], store: Store) -> None:
    benchmarks = {sample.task.benchmark.name: sample.task.benchmark for sample, _ in graded}
    for name, benchmark in benchmarks.items():
        part = [(sample, done) for sample, done in graded if sample.task.benchmark.name == name]
        grades = benchmark.grade([(done.text, sample.question.gold) for sample, done in part])
        store.append(
            sample.row(done.text, done.finish_reason, done.tokens, grade)
            for (sample, done), grade in zip(part, grades, strict=True)
        )
