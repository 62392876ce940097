"""The client's side of OpenEnv's protocol (version 0.10): one episode, over a WebSocket.

``reset``, ``step`` and ``state`` are messages ``{"type": ..., "data": ...}``. The server answers
with ``{"type": "observation" | "state" | "error", "data": ...}``. OpenEnv's own package is not
needed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from sg_rlhf.common.text import single_line

#: Bytes of one answer.
MAX_MESSAGE = 64 * 2**20
#: Seconds between two attempts at a server that has no free session.
PAUSE = 0.2


class OpenEnvError(RuntimeError):
    """The environment gave no usable answer; one line that names its address and the cause."""


class ServerIsFull(OpenEnvError):
    """All of the server's sessions are in use."""


@dataclass(frozen=True)
class Step:
    """What an environment says to a reset or an action; reward None where it gives none."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class Session:
    """One session of an environment's server, for one episode. `close` it, also after an error.

    Args:
        url: of the server, ``http://HOST:PORT``.
        timeout_s: seconds for a connection, for each answer and for a free session.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(timeout_s))
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def close(self) -> None:
        """End the connection."""
        if self._socket is not None:
            await self._socket.close()
        await self._http.close()

    async def reset(self, options: Mapping[str, Any]) -> Step:
        """Connect, and begin an episode. While the server has no free session, try again."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            await self._connect()
            try:
                return _step(await self._ask("reset", options))
            except ServerIsFull:
                if time.monotonic() > deadline:
                    raise
            assert self._socket is not None
            await self._socket.close()
            await asyncio.sleep(PAUSE)

    async def _connect(self) -> None:
        try:
            self._socket = await self._http.ws_connect(
                f"{self._url}/ws",
                max_msg_size=MAX_MESSAGE,
                timeout=aiohttp.ClientWSTimeout(ws_close=1.0),  # a server that ends says nothing
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise OpenEnvError(f"{self._url}: no OpenEnv server: {_line(error)}") from None

    async def step(self, action: Mapping[str, Any]) -> Step:
        """Take an action, after `reset`; raises as that does."""
        return _step(await self._ask("step", action))

    async def state(self) -> Mapping[str, Any]:
        """The episode's state, such as ``step_count``; raises as ``reset`` does."""
        return await self._ask("state", {})

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._socket is not None
        message = {"type": kind, "data": dict(data)} if data or kind != "state" else {"type": kind}
        try:
            await self._socket.send_json(message)
            answer = await self._socket.receive_json(timeout=self._timeout_s)
        except (aiohttp.ClientError, TimeoutError, OSError, TypeError, ValueError) as error:
            raise OpenEnvError(f"{self._url}: no answer to {kind}: {_line(error)}") from None
        found = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(found, dict) or answer.get("type") == "error":
            full = isinstance(found, dict) and found.get("code") == "CAPACITY_REACHED"
            error_type = ServerIsFull if full else OpenEnvError
            raise error_type(f"{self._url}: {kind} failed: {' '.join(str(found)[:300].split())}")
        return found


def _step(data: Mapping[str, Any]) -> Step:
    reward = data.get("reward")
    usable = isinstance(reward, (int, float))
    return Step(
        observation=data.get("observation") or {},
        reward=float(reward) if usable else None,  # type: ignore[arg-type]
        done=bool(data.get("done")),
    )


def _line(error: BaseException) -> str:
    return single_line(error) or type(error).__name__
