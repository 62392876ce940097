"""Running dialogues: many at a time, one engine, token in and token out.

The engine stays in the caller's thread. Dialogues are coroutines of an event loop in a thread of
its own, where a search or a tool waits without holding the engine up. A turn is one request whose
prompt is the dialogue's tokens so far, as they were sampled; the two threads exchange events over a
queue.
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
from sg_rlhf.eval.plan import Sample
from sg_rlhf.eval.store import Row, Store
from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.suite import Host, NotHeld, Reply

#: Dialogues under way for each engine. More than vLLM runs at a time, so that it never waits, and
#: no more: with all of them it would finish every first turn before any second one, so that a
#: killed run had nothing to show and no dialogue found its beginning in the prefix cache.
IN_FLIGHT = 1024
#: So many without a verdict among the latest dialogues that ended, and the run stops: the search
#: engine is gone. A few of many thousand do not stop it.
MAX_FAILED, LATEST = 10, 100

#: How long an engine that computes in Python may keep the interpreter to itself. The loop asks for
#: it again after every wait, some ten times a search: with Python's own 5 ms searches queue up.
SWITCH_SECONDS = 0.0005


@dataclass(frozen=True)
class _Failed:
    """A dialogue that ended without a verdict (`NotHeld`)."""

    sample: Sample
    problem: str


@dataclass(frozen=True)
class _Broken:
    """A dialogue that raised what nobody expected."""

    error: BaseException


_Event: TypeAlias = Request | Row | _Failed | _Broken


def run(
    samples: Sequence[Sample],
    engine: Engine | None,
    store: Store,
    already: int,
    host: Callable[[], Host],
    in_flight: int = IN_FLIGHT,
) -> None:
    """Hold, grade and store every dialogue.

    Args:
        engine: None if every prompt is too long for the model.
        already: number of samples stored before, for the progress bar.
        host: makes what holds them, in the event loop.

    Raises:
        EvalError: the engine failed, or dialogues could not be held: what ended before is stored,
            and these are not.
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
    """What has come in; waits for the first where there is nothing else to do."""
    if block:
        yield events.get()
    while True:
        try:
            yield events.get_nowait()
        except queue.Empty:
            return


class _Table:
    """The event loop, where every request under way has a future."""

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
    samples: Sequence[Sample],
    events: queue.SimpleQueue[_Event],
    host: Callable[[], Host],
    in_flight: int,
) -> Iterator[_Table]:
    """All dialogues in a thread, until they have ended or the block is left."""
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
    samples: Sequence[Sample],
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


async def _event_of(sample: Sample, table: _Table, host: Host) -> _Event:
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
