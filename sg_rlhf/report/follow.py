"""Serve the page of runs on this machine, and update it while they train.

A thread watches the runs' files, builds the page again when they change, and never writes to them.
A browser that has the page open is told by server-sent events: the state of the runs with every
rollout, and the version of the page when there is a new one, which it then fetches.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, StreamingResponse
from starlette.routing import Route

from sg_rlhf.report import page
from sg_rlhf.report.runs import CONFIG, RunError, json_object, number
from sg_rlhf.report.text import one_line
from sg_rlhf.run_dir import jsonl_log
from sg_rlhf.run_dir.final_model import final_checkpoint_complete
from sg_rlhf.run_dir.lock import OWNER

HOST = "127.0.0.1"
#: Seconds between two looks at the files, and between two looks at what is new for a browser.
LOOK_SECONDS, TELL_SECONDS = 1.0, 0.3
#: Seconds without a build per second of processor time of the last one: the run needs it.
REST = 3.0
#: Added to the process's niceness, for the same reason.
NICENESS = 10
#: Seconds after which a silent connection gets a comment, so that nothing on the way closes it.
SILENCE = 15.0
WATCHED = (*jsonl_log.STEP_FILES, CONFIG, "plan.json", "environment.json")


class Follower:
    """The newest page of some runs.

    Args:
        run_dirs: of the runs; each has its settings, but maybe no rollout yet.
        samples: in the page, over all runs.

    Attributes:
        html: the page; None before the first is built.
        event: what browsers are told: ``version`` of the page and ``state`` of the runs.
        readers: open connections. Without any, no page is built after the first.
    """

    def __init__(self, run_dirs: Sequence[Path], samples: int | None) -> None:
        self._run_dirs, self._samples = list(run_dirs), samples
        self.html: str | None = None
        self.event = {"version": "", "state": ""}
        self.readers = 0

    def watch(self) -> None:
        """Look at the files for as long as the process lives."""
        next_build = 0.0
        state_of = ""
        while True:
            version = files_version(self._run_dirs)
            if version != state_of:
                self.event = {**self.event, "state": self._state()}
                state_of = version
            wanted = self.html is None or self.readers > 0
            if version != self.event["version"] and wanted and time.monotonic() >= next_build:
                started = time.thread_time()
                self._build(version)
                next_build = time.monotonic() + REST * (time.thread_time() - started)
            time.sleep(LOOK_SECONDS)

    def _state(self) -> str:
        return " · ".join(run_state(path) for path in self._run_dirs)

    def _build(self, version: str) -> None:
        """Build the page; files that cannot be read now leave the last one."""
        try:
            runs, groups = page.read_runs(self._run_dirs, may_be_empty=True)
            self.html = page.build(runs, groups, self._samples, version)
        except (RunError, OSError) as error:
            self.event = {**self.event, "state": one_line(str(error))}
            return
        self.event = {"version": version, "state": self._state()}


def files_version(run_dirs: Sequence[Path]) -> str:
    """A text that differs when a file that the page shows has changed."""
    found: list[object] = []
    for run_dir in run_dirs:
        for name in WATCHED:
            with contextlib.suppress(OSError):
                status = (run_dir / name).stat()
                found.append((name, status.st_ino, status.st_size, status.st_mtime_ns))
        found.append(((run_dir / OWNER).exists(), final_checkpoint_complete(run_dir)))
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def run_state(run_dir: Path) -> str:
    """One line: whether a run trains, and its newest rollout."""
    name = one_line(run_dir.resolve().name)
    try:
        rows = jsonl_log.read(run_dir / jsonl_log.METRICS)
    except OSError as error:
        return f"{name}: {error.strerror}"
    training = (run_dir / OWNER).exists()
    state = "finished" if final_checkpoint_complete(run_dir) else "not running"
    state = "training" if training else state
    if not rows:
        return f"{name}: {state}, no rollout yet"
    planned = json_object(run_dir / "plan.json").get("rollouts")
    of = f" of {planned}" if isinstance(planned, int) else ""
    text = f"{name}: {state}, rollout {number(rows[-1], 'global_step'):g}{of}"
    if math.isfinite(reward := number(rows[-1], "rollout/reward_mean")):
        text += f", reward {reward:+.3f}"
    if math.isfinite(at := number(rows[-1], "time")):
        text += f", {time.strftime('%H:%M:%S', time.localtime(at))}"
    return text


def application(follower: Follower, is_ending: Callable[[], bool]) -> Starlette:
    """The page at ``/`` and its events at ``/events``.

    Args:
        is_ending: whether the server shuts down, so that connections have to end.
    """

    async def show(_request: Request) -> HTMLResponse:
        while follower.html is None and not is_ending():
            await asyncio.sleep(TELL_SECONDS)
        return HTMLResponse(follower.html or "", headers={"Cache-Control": "no-store"})

    async def events() -> AsyncIterator[str]:
        told, silent = None, 0.0
        follower.readers += 1
        try:
            while not is_ending():
                if follower.event != told:
                    told, silent = follower.event, 0.0
                    yield f"data: {json.dumps(told)}\n\n"
                elif silent >= SILENCE:
                    silent = 0.0
                    yield ":\n\n"
                await asyncio.sleep(TELL_SECONDS)
                silent += TELL_SECONDS
        finally:
            follower.readers -= 1

    async def tell(_request: Request) -> StreamingResponse:
        headers = {"Cache-Control": "no-store"}
        return StreamingResponse(events(), media_type="text/event-stream", headers=headers)

    return Starlette(
        routes=[Route("/", show), Route("/events", tell)],
        # A page of another site whose name leads here must not read what a run wrote.
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])],
    )


def serve(run_dirs: Sequence[Path], port: int, samples: int | None) -> None:
    """Serve until Ctrl-C.

    Args:
        port: of the loopback address; 0 takes a free one.

    Raises:
        RunError: a folder is no run.
        OSError: the port is taken.
    """
    page.read_runs(list(run_dirs), may_be_empty=True)
    listening = socket.create_server((HOST, port))
    os.nice(NICENESS)
    follower = Follower(run_dirs, samples)
    threading.Thread(target=follower.watch, name="watch", daemon=True).start()
    config = uvicorn.Config(
        application(follower, lambda: server.should_exit), log_level="warning", lifespan="off"
    )
    server = uvicorn.Server(config)
    address = f"http://{HOST}:{listening.getsockname()[1]}/"
    print(f"{address} follows {', '.join(map(str, run_dirs))}; Ctrl-C ends it", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listening])
