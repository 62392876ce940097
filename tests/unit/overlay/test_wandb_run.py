"""A run directory is one run of wandb, however often it is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sg_rlhf.overlay import wandb_run


@pytest.fixture(autouse=True)
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_the_second_start_goes_on_with_the_run_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb_run.go_on(tmp_path)
    first = os.environ["WANDB_RUN_ID"]
    assert first and os.environ["WANDB_RESUME"] == "allow"
    monkeypatch.delenv("WANDB_RUN_ID")
    wandb_run.go_on(tmp_path)
    assert os.environ["WANDB_RUN_ID"] == first
    monkeypatch.delenv("WANDB_RUN_ID")
    wandb_run.go_on(tmp_path / "another")
    assert os.environ["WANDB_RUN_ID"] != first


def test_an_exported_id_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    wandb_run.go_on(tmp_path)
    assert os.environ["WANDB_RUN_ID"] == "mine" and not list(tmp_path.iterdir())
