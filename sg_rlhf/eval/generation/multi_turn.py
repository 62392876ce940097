"""Runs dialogues (multi-turn rollouts), many at a time, on one engine: tokens in, tokens out.

The engine runs in the caller's thread. Dialogues are coroutines of an event loop in a second
thread, so that a search or a tool call never blocks the engine. A turn is one request. Its prompt
is the dialogue's tokens so far, as they were sampled. The threads exchange events over a queue.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

from tqdm import tqdm

from sg_rlhf.eval.engines.base import Completion, Engine, Request
from sg_rlhf.eval.generation.requests import PendingSample
from sg_rlhf.eval.store import Row, Store
from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.suite import Host, NotHeld, Reply

#: Dialogues in flight per engine: more than vLLM runs at a time, so that it never waits. With all
#: dialogues in flight, every first turn would come before any second turn: a killed run would have
#: stored nothing, and prefixes would have left the prefix cache.
IN_FLIGHT = 1024
#: The run stops if MAX_FAILED of the LATEST dialogues ended without a verdict: the search engine is
#: gone. A few failures among thousands do not stop it.
MAX_FAILED, LATEST = 10, 100

#: sys.setswitchinterval: the event loop needs the interpreter lock about ten times per search. With
#: Python's default of 5 ms, searches queue behind an engine that computes in Python.
SWITCH_SECONDS = 0.0005


@dataclass(frozen=True)
class _Failed:
    """A dialogue that ended without a verdict (`NotHeld`)."""

    sample: PendingSample
    problem: str


@dataclass(frozen=True)
class _Broken:
    """A dialogue that raised an unexpected exception."""

    error: BaseException


_Event: TypeAlias = Request | Row | _Failed | _Broken


def run_dialogues(
    samples: Sequence[PendingSample],
    engine: Engine | None,
    store: Store,
    already: int,
    host: Callable[[], Host],
    in_flight: int = IN_FLIGHT,
) -> None:
    """Run, grade and store every dialogue.

    Args:
        engine: None if every prompt is too long for the model.
        already: number of samples stored before, for the progress bar.
        host: makes the environment of the dialogues, in the event loop.

    Raises:
        EvalError: the engine failed, or dialogues failed. Finished dialogues are stored, failed
            ones are not.
    """
    events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
    failed = 0
    latest: deque[bool] = deque(maxlen=LATEST)  # whether each has no verdict
    tokens = 0
    start = time.monotonic()
    with (
        tqdm(total=already + len(samples), initial=already, unit="sample", smoothing=0.0) as bar,
        _in_a_thread(samples, events, host, in_flight) as table,
    ):
        ended = running = 0
        while ended < len(samples):
            requests: list[Request] = []
            rows: list[Row] = []
            for event in _drain(events, block=not running):
                if isinstance(event, Request):
                    requests.append(event)
                elif isinstance(event, _Failed):
                    failed += 1
                    latest.append(True)
                    store.append_failure(event.sample.key, event.problem)
                    if sum(latest) >= MAX_FAILED:
                        store.append(rows)
                        raise EvalError(
                            f"{sum(latest)} of the latest {len(latest)} dialogues could not be "
                            f"held; the last: {event.problem}"
                        )
                elif isinstance(event, _Broken):
                    raise event.error
                else:
                    latest.append(False)
                    rows.append(event)
            if rows:
                store.append(rows)
                bar.update(len(rows))
                tokens += sum(row["tokens"] for row in rows)
                rate = tokens / (time.monotonic() - start)
                bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
            ended += len(rows)
            if ended + failed == len(samples):
                break
            if requests:
                assert engine is not None
                engine.add(requests)
                running += len(requests)
            if running:
                assert engine is not None
                done = engine.step()
                running -= len(done)
                table.give(done)
    if failed:
        raise EvalError(f"{failed} of {len(samples)} dialogues could not be held, see {store.out}")


def _drain(events: queue.SimpleQueue[_Event], *, block: bool) -> Iterator[_Event]:
    """The events that have arrived; `block` waits for the first one."""
    if block:
        yield events.get()
    while True:
        try:
            yield events.get_nowait()
        except queue.Empty:
            return


class _Table:
    """The event loop, with a future per request in flight."""

    def __init__(self, events: queue.SimpleQueue[_Event]) -> None:
        self.loop = asyncio.new_event_loop()
        self._events = events
        self._waiting: dict[str, asyncio.Future[Completion]] = {}

    async def complete(self, request: Request) -> Completion:
        """Called within the loop."""
        future: asyncio.Future[Completion] = self.loop.create_future()
        self._waiting[request.key] = future
        self._events.put(request)
        return await future

    def give(self, completions: Sequence[Completion]) -> None:
        """Called by the engine's thread."""
        if completions:
            self.loop.call_soon_threadsafe(self._give, completions)

    def _give(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            future = self._waiting.pop(completion.key)
            if not future.done():
                future.set_result(completion)


@contextmanager
def _in_a_thread(
    samples: Sequence[PendingSample],
    events: queue.SimpleQueue[_Event],
    host: Callable[[], Host],
    in_flight: int,
) -> Iterator[_Table]:
    """Runs all dialogues in a thread until they have ended or the block is left."""
    table = _Table(events)
    talk = _hold_all(samples, table, events, host, in_flight)
    main = table.loop.create_task(talk)

    def work() -> None:
        asyncio.set_event_loop(table.loop)
        try:
            table.loop.run_until_complete(main)
        except asyncio.CancelledError:
            pass
        except Exception as error:
            # A task group wraps what its first task raised.
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            events.put(_Broken(error))
        finally:
            table.loop.run_until_complete(table.loop.shutdown_asyncgens())
            table.loop.close()

    thread = threading.Thread(target=work, name="dialogues", daemon=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    thread.start()
    try:
        yield table
    finally:
        sys.setswitchinterval(interval)
        if thread.is_alive():
            # It may have ended since.
            with suppress(RuntimeError):
                table.loop.call_soon_threadsafe(main.cancel)
        thread.join()


async def _hold_all(
    samples: Sequence[PendingSample],
    table: _Table,
    events: queue.SimpleQueue[_Event],
    host: Callable[[], Host],
    in_flight: int,
) -> None:
    holder = host()
    left = iter(samples)

    async def hold_next() -> None:
        for sample in left:
            events.put(await _event_of(sample, table, holder))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(in_flight, len(samples))):
                group.create_task(hold_next())
    finally:
        await holder.aclose()


async def _event_of(sample: PendingSample, table: _Table, host: Host) -> _Event:
    request = sample.request
    turn = 0

    async def generate(context: Sequence[int], max_tokens: int, stop: tuple[str, ...]) -> Reply:
        nonlocal turn
        turn += 1
        asked = replace(
            request,
            key=f"{request.key}/{turn}",
            prompt_ids=tuple(context),
            max_tokens=max_tokens,
            stop=stop,
        )
        completion = await table.complete(asked)
        return Reply(completion.token_ids, completion.finish_reason == "length")

    try:
        held = await host.hold(sample.question, request.prompt_ids, request.max_tokens, generate)
    except NotHeld as error:
        return _Failed(sample, str(error))
    except Exception as error:
        error.add_note(f"in the dialogue of {'/'.join(map(str, sample.key))}")
        raise
    row = sample.row(held.response, held.finish_reason, held.tokens, held.grade)
    return {**row, **held.extra}
