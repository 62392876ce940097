"""`sg-rlhf report --follow` in a real browser: before, during and after a run."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from sg_rlhf.run_dir import jsonl_log
from tests.integration.browser import NO_BROWSER, executable, opened
from tests.unit.report.synthetic import write_config, write_run

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(executable() is None, reason=NO_BROWSER),
]

#: Milliseconds in which a page is built and fetched; a few seconds, unless the machine is busy.
SOON = 600_000


@contextmanager
def following(run_dir: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command's server on a free port: its address and its process; ended by Ctrl-C."""
    process = subprocess.Popen(
        [sys.executable, "-m", "sg_rlhf", "report", "--follow", str(run_dir), "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.match(r"(http://127\.0\.0\.1:\d+/) follows .*; Ctrl-C ends it$", line)
        assert found, line
        yield found[1], process
        process.send_signal(signal.SIGINT)
        assert (process.wait(600), process.stdout.read()) == (0, "")
    finally:
        process.kill()
        process.wait()


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def give(run_dir: Path, whole: Path, first: int, last: int) -> None:
    """The trainer's rows of these rollouts, appended in its order of files."""
    for name in jsonl_log.STEP_FILES:
        rows = jsonl_log.read(whole / name)
        chosen = [row for row in rows if first <= row["global_step"] <= last]
        if chosen:
            jsonl_log.append(run_dir / name, chosen)


@pytest.mark.full
def test_a_page_that_is_open_follows_the_run(chromium: Browser, tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole", rollouts=12)
    other = write_run(tmp_path / "other", rollouts=12, seed=5)
    run_dir = tmp_path / "run"
    write_config(run_dir)
    (run_dir / "eval").mkdir()
    (run_dir / "plan.json").write_text(json.dumps({"rollouts": 12}))
    with (
        following(run_dir) as (url, _),
        opened(chromium, url, loading=SOON) as found,
    ):
        page = found.page
        page.set_default_timeout(SOON)
        live = page.locator("#live")
        expect(live).to_have_text("run: not running, no rollout yet", timeout=SOON)
        expect(page.locator("figure")).to_have_count(1)  # the weights follow from the recipe
        assert "sg.weighting" in (page.locator("#settings").text_content() or "")

        give(run_dir, whole, 1, 4)
        (run_dir / "owner.json").write_text("{}")
        expect(page.locator("#count")).to_have_text("8 of 8 samples", timeout=SOON)
        expect(live).to_contain_text("run: training, rollout 4 of 12, reward", timeout=SOON)

        # The reader's choices outlive what is exchanged around them.
        page.fill("#f-step-min", "3")
        page.focus("#list")
        page.keyboard.press("ArrowDown")
        page.locator("#settings details").first.locator("summary").click()
        text = page.inner_text("#tokens")
        give(run_dir, whole, 5, 8)
        written = contents(run_dir)
        expect(page.locator("#count")).to_have_text("12 of 16 samples", timeout=SOON)
        assert page.inner_text("#sample h3") == "Sample 2 of 12"
        assert page.inner_text("#tokens") == text
        assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
        assert page.locator("#settings details").first.get_attribute("open") is not None
        assert contents(run_dir) == written

        # A run that is resumed from rollout 4 trains the next ones again.
        jsonl_log.drop_after(run_dir, 4)
        give(run_dir, other, 5, 6)
        expect(live).to_contain_text("rollout 6 of 12", timeout=SOON)
        expect(page.locator("#count")).to_have_text("8 of 12 samples", timeout=SOON)
        rows = [r for r in jsonl_log.read(other / jsonl_log.SAMPLES) if r["global_step"] == 5]
        page.fill("#f-step-min", "5")
        assert page.locator("#tokens").text_content() == rows[0]["response"].replace("\n", "↵\n")

        give(run_dir, other, 7, 12)
        (run_dir / "owner.json").unlink()
        expect(live).to_contain_text("run: not running, rollout 12 of 12", timeout=SOON)
        expect(page.locator("#count")).to_have_text("16 of 24 samples", timeout=SOON)
        assert not found.complaints


def test_a_page_says_that_its_server_has_ended(chromium: Browser, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", rollouts=4)
    before = contents(run_dir)
    with (
        following(run_dir) as (url, process),
        opened(chromium, url, loading=SOON) as found,
    ):
        page = found.page
        expect(page.locator("#live")).to_contain_text("rollout 4", timeout=SOON)
        with urllib.request.urlopen(url) as answer:
            assert b"connect-src 'self'" in answer.read()
        foreign = urllib.request.Request(url, headers={"Host": "elsewhere.example"})
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(foreign)
        assert not found.complaints
        process.send_signal(signal.SIGINT)
        assert process.wait(600) == 0
        expect(page.locator("#live")).to_contain_text("Not connected", timeout=SOON)
    assert contents(run_dir) == before


def test_wrong_use_is_one_line_and_status_2(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", rollouts=2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, words in (
            ([str(run_dir), "--port", port], f"--port {port}: "),
            ([str(tmp_path)], "not a run"),
            ([str(tmp_path / "absent")], "no such folder"),
        ):
            done = subprocess.run(
                [sys.executable, "-m", "sg_rlhf", "report", "--follow", *arguments],
                capture_output=True, text=True, timeout=300,
            )  # fmt: skip
            assert (done.returncode, done.stdout) == (2, ""), arguments
            assert words in done.stderr and done.stderr.count("\n") == 1
