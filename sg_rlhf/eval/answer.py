"""Generate, grade and store the samples of a run, many at a time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from sg_rlhf.eval.engines.base import Engine, Sample
from sg_rlhf.eval.store import Store
from sg_rlhf.tasks import chat
from sg_rlhf.tasks.labels import encode_golds
from sg_rlhf.tasks.questions import EvalError, questions_hash, sample_seed
from sg_rlhf.tasks.rollout import (
    Codec,
    Environment,
    EpisodeAborted,
    Generation,
    Trajectory,
    rollout,
)
from sg_rlhf.tasks.suite import Benchmark

#: The run stops if MAX_FAILED of the LATEST dialogues ended without a verdict: the search engine is
#: gone. A few failures among thousands do not stop it.
MAX_FAILED, LATEST = 10, 100


def samples_of(
    benchmarks: Sequence[Benchmark],
    tokenize: Callable[[Sequence[str]], list[list[int]]],
    context: int | None,
    seed: int,
    tokenizer: Any = None,
) -> list[Sample]:
    """Every sample of every question, fitted to the model's context, longest prompts first.

    Long prompts at the end would leave the engine with a few slow responses.

    Args:
        tokenize: prompts -> token ids (`ModelHandle.tokenize`).
        context: most tokens of prompt and response; None: unknown, nothing is cut.
        tokenizer: None: the engine gets text instead of ids.
    """
    found = []
    for benchmark in benchmarks:
        name, settings = benchmark.name, benchmark.settings
        all_ids = tokenize([question.prompt for question in benchmark.questions])
        for question, ids in zip(benchmark.questions, all_ids, strict=True):
            room = settings.max_tokens if context is None else max(0, context - len(ids))
            ends = () if tokenizer is None else chat.stop_token_ids(question.prompt, tokenizer)
            prompt_ids = () if tokenizer is None else tuple(ids)
            for index in range(settings.n):
                sample = Sample(
                    benchmark=benchmark,
                    question=question,
                    index=index,
                    prompt_ids=prompt_ids,
                    max_tokens=min(settings.max_tokens, room),
                    seed=sample_seed(seed, name, question.id, index),
                    stop_ids=ends,
                )
                found.append((len(ids) or len(question.prompt), sample))
    # Python's sort is stable: samples of a question stay together and share cached prefixes.
    return [sample for _, sample in sorted(found, key=lambda pair: -pair[0])]


def describe(benchmark: Benchmark, samples: Sequence[Sample]) -> dict[str, Any]:
    """A benchmark's part of `run.json`, which a resumed run must repeat."""
    wanted = benchmark.settings.max_tokens
    limits = [s.max_tokens for s in samples if s.benchmark is benchmark and s.index == 0]
    cut = [limit for limit in limits if limit < wanted]
    return {
        "title": benchmark.title,
        "settings": benchmark.settings.as_dict(),
        "pass_at": list(benchmark.pass_at),
        "licence": benchmark.licence,
        "n_questions": len(benchmark.questions),
        "full_size": benchmark.size,
        "questions_sha256": questions_hash(benchmark.questions),
        "sources": [vars(source) for source in benchmark.sources],
        "context_cuts": {
            "questions": len(cut),
            "shortest_max_tokens": min(cut) if cut else None,
            "prompts_too_long": sum(limit == 0 for limit in limits),
        },
    }


async def answer(
    samples: Sequence[Sample],
    engine: Engine | None,
    store: Store,
    already: int,
    environment: Callable[[], Environment] | None = None,
    codec: Codec | None = None,
) -> None:
    """Generate, grade and store every sample.

    Args:
        engine: None if no sample needs one (every prompt fills the context).
        already: number of samples stored before, for the progress bar.
        environment: makes what answers the model's turns, with the model's `codec`; None: one
            response to each prompt.
    """
    with tqdm(total=already + len(samples), initial=already, unit="sample", smoothing=0.0) as bar:
        left, progress = iter(samples), _Progress(bar)
        asked: _Single | _Dialogues
        if environment is None:
            asked = _Single(engine, store, progress)
        else:
            assert codec is not None
            asked = _Dialogues(engine, store, progress, environment(), codec)
        count = min(len(samples), engine.in_flight if engine is not None else 1)
        tasks = [asyncio.create_task(asked.worker(left)) for _ in range(count)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asked.finish()
    if asked.failed:
        raise EvalError(f"{asked.failed} of {len(samples)} dialogues failed, see {store.out}")


class _Progress:
    """The progress bar, with tokens per second."""

    def __init__(self, bar: Any) -> None:
        self._bar, self._start, self._tokens = bar, time.monotonic(), 0

    def add(self, tokens: int) -> None:
        self._tokens += tokens
        rate = self._tokens / (time.monotonic() - self._start)
        self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        self._bar.update()


class _Single:
    """One response to each prompt. Grading runs in a thread, and never delays the engine."""

    failed = 0  # an error ends the run

    def __init__(self, engine: Engine | None, store: Store, progress: _Progress) -> None:
        self._engine, self._store, self._progress = engine, store, progress
        self._done: list[Sample] = []
        self._grading: asyncio.Task[None] | None = None

    async def worker(self, left: Iterator[Sample]) -> None:
        for sample in left:
            if sample.max_tokens and self._engine is not None:
                sample = await self._engine.generate(sample)
            self._done.append(sample)
            self._progress.add(sample.tokens)
            if self._grading is None or self._grading.done():
                if self._grading is not None:
                    # An error of the grader or the disk ends the run now, not after hours.
                    self._grading.result()
                self._grading = asyncio.create_task(self._grade())

    async def finish(self) -> None:
        """Wait until everything is graded and stored."""
        if self._grading is not None:
            await self._grading
        await self._grade()

    async def _grade(self) -> None:
        while self._done:
            done, self._done = self._done, []
            await asyncio.to_thread(self._grade_and_store, done)

    def _grade_and_store(self, done: Sequence[Sample]) -> None:
        benchmarks = {sample.benchmark.name: sample.benchmark for sample in done}
        for name, benchmark in benchmarks.items():
            part = [sample for sample in done if sample.benchmark.name == name]
            grades = benchmark.grade([(sample.response, sample.question.gold) for sample in part])
            rows = (sample.row(grade) for sample, grade in zip(part, grades, strict=True))
            self._store.append(rows)


class _Dialogues:
    """Dialogues (rollouts of several turns). A turn is one request to the engine; its prompt is
    the dialogue's tokens so far, as they were sampled.
    """

    def __init__(
        self,
        engine: Engine | None,
        store: Store,
        progress: _Progress,
        environment: Environment,
        codec: Codec,
    ) -> None:
        self._engine, self._store, self._progress = engine, store, progress
        self._environment, self._codec = environment, codec
        self._latest: deque[bool] = deque(maxlen=LATEST)  # whether each has no verdict
        self.failed = 0

    async def worker(self, left: Iterator[Sample]) -> None:
        for sample in left:
            try:
                row = await self._row_of(sample)
            except EpisodeAborted as error:
                self.failed += 1
                self._latest.append(True)
                self._store.append_failure(sample.key, str(error))
                if sum(self._latest) >= MAX_FAILED:
                    raise EvalError(
                        f"{sum(self._latest)} of the latest {len(self._latest)} dialogues failed; "
                        f"the last: {error}"
                    ) from None
                continue
            self._latest.append(False)
            self._store.append([row])
            self._progress.add(row["tokens"])

    async def finish(self) -> None:
        """Close the environment."""
        await self._environment.aclose()

    async def _row_of(self, sample: Sample) -> dict[str, Any]:
        """The stored row of a dialogue; `EpisodeAborted` if the environment failed."""

        async def generate(
            context: list[int], max_tokens: int, stop: tuple[str, ...]
        ) -> Generation:
            assert self._engine is not None
            turn = replace(sample, prompt_ids=tuple(context), max_tokens=max_tokens, stop=stop)
            done = await self._engine.generate(turn)
            return Generation(done.token_ids, done.finish_reason == "length")

        question, prompt = sample.question, sample.prompt_ids
        gold = question.gold if isinstance(question.gold, str) else encode_golds(question.gold)
        found = Trajectory(list(prompt))
        try:
            row = {"input": question.prompt, "answer": gold}
            episode = self._environment.begin(row, self._codec)
            if sample.max_tokens:
                found = await rollout(
                    self._environment, episode, prompt, sample.max_tokens, generate, self._codec
                )
                sample = replace(sample, finish_reason="length" if found.truncated else "stop")
            # A grader may take seconds: other dialogues continue meanwhile.
            grade = await asyncio.to_thread(episode.grade)
        except EpisodeAborted:
            raise
        except Exception as error:
            error.add_note(f"in the dialogue of {'/'.join(map(str, sample.key))}")
            raise
        response = self._codec.decode(found.token_ids[len(prompt) :])
        done = replace(sample, response=response, tokens=found.sampled_tokens)
        logs = found.logs(grade) if found.turns else {}
        return {**done.row(grade), "turns": found.turns, "dialogue": logs}
