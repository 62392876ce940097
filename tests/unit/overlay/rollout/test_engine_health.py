"""The watch of the engines outlives what it did not expect."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from sg_rlhf.overlay.rollout import engine_health


def test_an_error_of_the_watch_itself_is_said_and_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ended, looks = threading.Event(), []

    def watch(engines: Any, seconds: float, run_dir: Path, ended: threading.Event) -> None:
        looks.append(engines)
        if len(looks) == 1:
            raise RuntimeError("what nobody expected")
        ended.set()

    monkeypatch.setattr(engine_health, "_watch", watch)
    engine_health._monitor_forever("engines", 0.01, tmp_path, ended)  # type: ignore[arg-type]
    assert looks == ["engines", "engines"]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("begins anew: RuntimeError: what nobody expected")
