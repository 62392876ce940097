"""The order in which a run starts its processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from sg_rlhf.config import load_config
from sg_rlhf.overlay.driver import train as driver
from sg_rlhf.overlay.driver.arguments import upstream_arguments


@pytest.mark.parametrize("sleeps", [True, False])
def test_ranks_and_controller_start_while_colocated_engines_do(
    monkeypatch: pytest.MonkeyPatch, sleeps: bool
) -> None:
    monkeypatch.setenv("SG_PLATFORM", "cpu")
    args = upstream_arguments(load_config("configs/kk/grpo_sg_tiny_cpu.yaml"))
    args.vllm.enable_sleep, args.sg.run_dir = sleeps, None
    order: list[str] = []
    engine, policy, controller = MagicMock(), MagicMock(), MagicMock()
    engine.sleep.remote.side_effect = lambda: order.append("engine sleeps")
    policy.async_init_model_from_pretrained.side_effect = lambda *_: order.append("load") or []
    controller.prepare.remote.side_effect = lambda: order.append("controller")

    def ranks(*_args: Any) -> Any:
        order.append("ranks")
        return policy

    remote = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: controller))
    monkeypatch.setattr(driver, "Strategy", MagicMock())
    monkeypatch.setattr(driver, "start_engines", lambda *_: [engine])
    monkeypatch.setattr(driver, "start_ranks", ranks)
    monkeypatch.setattr(driver.topology, "has_reference", lambda _: False)
    monkeypatch.setattr(driver.ray, "remote", lambda _: remote)
    monkeypatch.setattr(driver.ray, "get", lambda found: found)
    monkeypatch.setattr(
        driver.engine_monitor, "wait_for_start", lambda *_: order.append("engine has started")
    )
    driver.train(args, MagicMock())
    waits = ["engine has started", "engine sleeps"] if sleeps else []
    assert order == ["ranks", "controller", *waits, "load", "engine has started"]
