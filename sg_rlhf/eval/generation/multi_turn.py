"""Runs dialogues (rollouts of several turns), many at a time, on one engine.

Dialogues are coroutines of one event loop. A thread steps the engine, which blocks, so that a
search or a tool call never waits for it. A turn is one request; its prompt is the dialogue's tokens
so far, as they were sampled.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tqdm import tqdm

from sg_rlhf.eval.engines.base import Completion, Engine, Request
from sg_rlhf.eval.generation.requests import PendingSample
from sg_rlhf.eval.store import Row, Store
from sg_rlhf.tasks.labels import encode_golds
from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.rollout import (
    Codec,
    Environment,
    EpisodeAborted,
    Generation,
    Trajectory,
    rollout,
)
from sg_rlhf.tasks.suite import FinishReason

#: Dialogues in flight per engine: more than vLLM runs at a time, so that it never waits. With all
#: dialogues in flight, every first turn would come before any second turn: a killed run would have
#: stored nothing, and prefixes would have left the prefix cache.
IN_FLIGHT = 1024
#: The run stops if MAX_FAILED of the LATEST dialogues ended without a verdict: the search engine is
#: gone. A few failures among thousands do not stop it.
MAX_FAILED, LATEST = 10, 100


async def run_dialogues(
    samples: Sequence[PendingSample],
    engine: Engine | None,
    store: Store,
    already: int,
    environment: Callable[[], Environment],
    codec: Codec,
    in_flight: int = IN_FLIGHT,
) -> None:
    """Run, grade and store every dialogue.

    Args:
        engine: None if every prompt is too long for the model.
        already: number of samples stored before, for the progress bar.
        environment: makes the environment of the dialogues, in the event loop.
        codec: of the model.

    Raises:
        EvalError: the engine failed, or dialogues failed. Finished dialogues are stored, failed
            ones are not.
    """
    made, requests = environment(), _Requests(engine)
    left = iter(samples)
    latest: deque[bool] = deque(maxlen=LATEST)  # whether each has no verdict
    failed = tokens = 0
    start = time.monotonic()

    async def next_dialogues() -> None:
        nonlocal failed, tokens
        for sample in left:
            try:
                row = await _row_of(sample, requests, made, codec)
            except EpisodeAborted as error:
                failed += 1
                latest.append(True)
                store.append_failure(sample.key, str(error))
                if sum(latest) >= MAX_FAILED:
                    raise EvalError(
                        f"{sum(latest)} of the latest {len(latest)} dialogues failed; "
                        f"the last: {error}"
                    ) from None
                continue
            latest.append(False)
            store.append([row])
            tokens += row["tokens"]
            rate = tokens / (time.monotonic() - start)
            bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
            bar.update()

    with tqdm(total=already + len(samples), initial=already, unit="sample", smoothing=0.0) as bar:
        talk = [asyncio.create_task(next_dialogues()) for _ in range(min(in_flight, len(samples)))]
        serve = asyncio.create_task(requests.serve())
        try:
            # The engine's task ends by an error alone.
            ended = asyncio.gather(*talk)
            await asyncio.wait((ended, serve), return_when=asyncio.FIRST_COMPLETED)
            if serve.done():
                serve.result()
            await ended
        finally:
            for task in (*talk, serve):
                task.cancel()
            await asyncio.gather(*talk, serve, return_exceptions=True)
            requests.close()
            await made.aclose()
    if failed:
        raise EvalError(f"{failed} of {len(samples)} dialogues failed, see {store.out}")


class _Requests:
    """The requests of all dialogues to one engine, which a thread of its own steps."""

    def __init__(self, engine: Engine | None) -> None:
        self._engine = engine
        self._new: list[Request] = []
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self._wanted = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")

    async def complete(self, request: Request) -> Completion:
        """The completion of a request."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[request.key] = future
        self._new.append(request)
        self._wanted.set()
        return await future

    async def serve(self) -> None:
        """Step the engine while a dialogue waits; until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wanted.wait()
            new, self._new = self._new, []
            for completion in await loop.run_in_executor(self._thread, self._step, new):
                self._waiting.pop(completion.key).set_result(completion)
            if not self._waiting:
                self._wanted.clear()

    def close(self) -> None:
        """Wait for the step that runs."""
        self._thread.shutdown()

    def _step(self, new: Sequence[Request]) -> list[Completion]:
        assert self._engine is not None
        if new:
            self._engine.add(new)
        return self._engine.step()


async def _row_of(
    sample: PendingSample, requests: _Requests, environment: Environment, codec: Codec
) -> Row:
    """The stored row of a dialogue.

    Raises:
        EpisodeAborted: the environment failed.
    """
    request = sample.request
    turn = 0

    async def generate(context: list[int], max_tokens: int, stop: tuple[str, ...]) -> Generation:
        nonlocal turn
        turn += 1
        asked = replace(
            request,
            key=f"{request.key}/{turn}",
            prompt_ids=tuple(context),
            max_tokens=max_tokens,
            stop=stop,
        )
        completion = await requests.complete(asked)
        return Generation(completion.token_ids, completion.finish_reason == "length")

    question, prompt = sample.question, request.prompt_ids
    answer = question.gold if isinstance(question.gold, str) else encode_golds(question.gold)
    found = Trajectory(list(prompt))
    reason: FinishReason = "prompt_too_long"
    try:
        episode = environment.begin({"input": question.prompt, "answer": answer}, codec)
        if request.max_tokens:
            found = await rollout(environment, episode, prompt, request.max_tokens, generate, codec)
            reason = "length" if found.truncated else "stop"
        # A grader may take seconds: other dialogues go on meanwhile.
        grade = await asyncio.to_thread(episode.grade)
    except EpisodeAborted:
        raise
    except Exception as error:
        error.add_note(f"in the dialogue of {'/'.join(map(str, sample.key))}")
        raise
    response = codec.decode(found.token_ids[len(prompt) :])
    row = sample.row(response, reason, found.sampled_tokens, grade)
    return {**row, "turns": found.turns, "dialogue": found.logs(grade) if found.turns else {}}
