"""Upstream's own executor, for the tests of the rewards that it calls."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sg_rlhf.tasks.reward import reward_named


@pytest.fixture
def upstream_agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """OpenRLHF's `utils/agent.py`, without the package's heavy `__init__`."""
    package = importlib.util.find_spec("openrlhf")
    shim = ModuleType("openrlhf.utils")
    shim.__path__ = [str(Path(package.origin).parent / "utils")]
    monkeypatch.setitem(sys.modules, "openrlhf.utils", shim)
    for name in ("agent", "logging_utils"):
        monkeypatch.delitem(sys.modules, f"openrlhf.utils.{name}", raising=False)
    import openrlhf.utils.agent as agent

    yield agent
    for name in ("agent", "logging_utils"):
        sys.modules.pop(f"openrlhf.utils.{name}", None)


class Bytes:
    """A tokenizer of bytes, with the two calls that upstream's executor makes."""

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        ids = list(text.encode())
        return {"input_ids": [SimpleNamespace(tolist=lambda: ids)]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return bytes(ids).decode()


@pytest.fixture
def rollout(upstream_agent: ModuleType) -> Callable[..., dict[str, Any]]:
    """(domain:NAME, prompt, label, response) -> what upstream's executor makes of them."""

    def run(reward: str, prompt: str, label: str, response: str) -> dict[str, Any]:
        executor = upstream_agent.SingleTurnAgentExecutor([reward])
        executor.reward_func = reward_named(reward)
        sampling = SimpleNamespace(max_tokens=900, logprobs=None)

        class Engine:
            async def generate(self, prompt_ids: Any, params: Any, multi_modal_data: Any) -> Any:
                out = SimpleNamespace(token_ids=list(response.encode()), finish_reason="stop")
                return SimpleNamespace(outputs=[out])

        return asyncio.run(executor.execute(prompt, label, sampling, 9000, Bytes(), Engine()))

    return run
