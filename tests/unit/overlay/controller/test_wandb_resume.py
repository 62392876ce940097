"""A run directory is one run of wandb, however often it is started."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb

from sg_rlhf.overlay.controller import wandb_resume
from sg_rlhf.overlay.controller.sample_log import TABLE_COLUMNS
from sg_rlhf.overlay.reporting import activity


@pytest.fixture(autouse=True)
def no_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_MODE", "WANDB_DIR", "WANDB_SILENT")
    for name in (*names, "WANDB_API_KEY", *wandb_resume.LIMITS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    wandb.teardown()  # it keeps the settings of the process's first start
    yield
    wandb.teardown()


def test_the_second_start_goes_on_with_the_run_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb_resume.resume_run(tmp_path)
    first = os.environ["WANDB_RUN_ID"]
    assert first and os.environ["WANDB_RESUME"] == "allow"
    monkeypatch.delenv("WANDB_RUN_ID")
    wandb_resume.resume_run(tmp_path)
    assert os.environ["WANDB_RUN_ID"] == first
    monkeypatch.delenv("WANDB_RUN_ID")
    wandb_resume.resume_run(tmp_path / "another")
    assert os.environ["WANDB_RUN_ID"] != first


def test_a_long_runs_samples_are_logged_once(tmp_path: Path) -> None:
    wandb_resume.resume_run(tmp_path)
    wandb_resume.default_to_offline(tmp_path)
    named = SimpleNamespace(key=None, org=None, project="tests", group=None, run_name="run")
    logger = wandb_resume.WandbLogger(SimpleNamespace(logger=SimpleNamespace(wandb=named)))
    for step in range(1, 6):
        logs = {"reward": step / 8, "generated_samples": ["a text", step / 8]}
        logger.log_train(step, logs)
        assert "generated_samples" in logs  # the caller's, whom another logger follows
        row = {"prompt": "p", "response": f"response {step}", "reward": step / 8, "advantage": 0.5}
        logger.log_samples(step, [row, {**row, "dialogue": "d"}])
    assert logger.handle.run.summary["train/reward"] == 5 / 8
    logger.close()
    tables = [json.loads(file.read_text()) for file in tmp_path.rglob("*.table.json")]
    assert {tuple(table["columns"]) for table in tables} == {TABLE_COLUMNS}
    rows = sorted(row for table in tables for row in table["data"])
    assert rows == [
        [step, "p", text, step / 8, 0.5]
        for step in range(1, 6)
        for text in ("d", f"response {step}")
    ]


@pytest.mark.parametrize("key", ["0f" * 20, "short"])
def test_a_server_that_does_not_answer_leaves_an_offline_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and no listen: refuses connections
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", key)
        monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
        activity.write_to(tmp_path / "activity")
        wandb_resume.resume_run(tmp_path)
        wandb_resume.default_to_offline(tmp_path)
        named = SimpleNamespace(key=key, org=None, project="tests", group=None, run_name="run")
        logger = wandb_resume.WandbLogger(
            SimpleNamespace(
                logger=SimpleNamespace(wandb=named), sg=SimpleNamespace(run_dir=str(tmp_path))
            )
        )
    logger.log_train(1, {"reward": 0.5})
    assert logger.handle.run.settings._offline
    logger.close()
    activity.write_to(None)
    line = json.loads((tmp_path / "activity").read_text())["said"]
    folder = Path(re.search(r"Upload it later: wandb sync (\S+);", line)[1])  # type: ignore[index]
    assert folder.parent.parent == tmp_path and list(folder.glob("*.wandb"))
    assert "W&B did not start online" in line and key not in line


def test_wandb_is_offline_without_a_key_and_off_where_it_is_disabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb_resume.default_to_offline(tmp_path)
    assert os.environ["WANDB_MODE"] == "offline" and os.environ["WANDB_DIR"] == str(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    wandb_resume.default_to_offline(tmp_path)
    assert os.environ["WANDB_MODE"] == "disabled"
    monkeypatch.setenv("WANDB_API_KEY", "a key")
    monkeypatch.setenv("WANDB_MODE", "online")
    wandb_resume.default_to_offline(tmp_path)
    assert os.environ["WANDB_MODE"] == "online"
    wandb_resume.default_to_offline(tmp_path, always=True)  # sg.wandb=offline
    assert os.environ["WANDB_MODE"] == "offline"


def test_an_exported_id_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    wandb_resume.resume_run(tmp_path)
    assert os.environ["WANDB_RUN_ID"] == "mine" and not list(tmp_path.iterdir())
