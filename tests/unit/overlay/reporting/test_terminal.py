"""What a run says on the terminal, and how it ends when it is asked to."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sg_rlhf.common.atomic_io import BestEffortStream
from sg_rlhf.overlay.reporting import activity, graceful_stop, terminal
from sg_rlhf.run_dir import jsonl_log

# -- The terminal during a start: every phase with its seconds, live or as plain lines -----------


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., terminal.Progress]:
    """Makes a display of a fresh run directory; this process writes to its activity log."""
    monkeypatch.setattr(terminal, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(activity, "_log", activity.log_file(tmp_path))
    return lambda stream: terminal.Progress(tmp_path, stream)


def wait_for(stream: io.StringIO, text: str) -> None:
    """Wait for a text on the terminal. Seconds like "(0 s)" may be more."""
    pattern = re.escape(text).replace(re.escape("(0 s)"), r"\(\d+ s\)")
    end = time.monotonic() + 300
    while not re.search(pattern, stream.getvalue()):
        assert time.monotonic() < end, stream.getvalue()
        time.sleep(0.01)


def test_each_phase_is_a_line_once_and_without_a_terminal_repeated(
    busy: Callable[..., terminal.Progress], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "REPEAT_SECONDS", 0.2)
    stream = io.StringIO()
    with busy(stream):
        with activity.phase(activity.DRIVER, "starting Ray"):
            wait_for(stream, "starting Ray ...")
            wait_for(stream, "still starting Ray (0 s)")
        for _ in range(2):
            with activity.phase(activity.CONTROLLER, "syncing weights"):
                wait_for(stream, "controller: syncing weights ...")
    said = stream.getvalue()
    assert said.count("starting Ray ...") == said.count("syncing weights ...") == 1
    assert all(re.match(r"\[ {,4}\d+s\] ", line) for line in said.splitlines())


def test_a_terminal_has_one_live_line_with_all_that_is_waited_for(
    busy: Callable[..., terminal.Progress], tmp_path: Path
) -> None:
    stream = Screen()
    with busy(stream), activity.phase(activity.DRIVER, activity.STARTING_WORKERS):
        wait_for(stream, f"] {activity.STARTING_WORKERS} (0 s)")
        with activity.phase(activity.TRAINER, "loading the model"):
            # A worker is busy, which says more than that the workers start.
            wait_for(stream, "] trainer: loading the model (0 s)")
            with activity.phase(activity.TRAINER, "reading checkpoint global_step2"):
                wait_for(stream, "] trainer: reading checkpoint global_step2 (0 s)")
        (tmp_path / terminal.PLAN).write_text(json.dumps({"rollouts": 3, "remarks": []}))
        wait_for(stream, "rollouts:   0%")
        with activity.phase(activity.CONTROLLER, "evaluating"):
            activity.show_progress(4, 4)
            wait_for(stream, "controller: evaluating 4/4 (0 s):   0%")
    assert "still" not in stream.getvalue()


def test_in_a_file_each_rollout_is_a_line_without_carriage_returns(tmp_path: Path) -> None:
    def rollouts(*steps: int) -> None:
        rows = [
            {"global_step": n, "rollout/reward_mean": n / 4, "rollout/response_length_mean": 9.0}
            for n in steps
        ]
        jsonl_log.append(tmp_path / jsonl_log.METRICS, rows)

    stream = io.StringIO()
    rollouts(1, 2)  # of the run before it was resumed
    shown = terminal.Progress(tmp_path, stream)
    (tmp_path / terminal.PLAN).write_text(json.dumps({"rollouts": 4, "remarks": []}))
    shown._read()
    for step in (3, 4):
        rollouts(step)
        shown._read()
    said = [line.partition("] ")[2] for line in stream.getvalue().splitlines()]
    assert said == [
        f"rollout {n} of 4: reward {n / 4:+.2f} tokens 9" for n in (2, 3, 4)
    ]  # fmt: skip
    assert "\r" not in stream.getvalue()


def test_it_ends_where_nobody_reads_it_any_more(
    busy: Callable[..., terminal.Progress], tmp_path: Path
) -> None:
    """tqdm holds its lock while it writes, and an error there left it locked for good."""
    reads, writes = os.pipe()
    os.close(reads)
    try:
        with (
            busy(BestEffortStream.over(writes)) as shown,
            activity.phase(activity.DRIVER, "starting Ray"),
        ):
            (tmp_path / terminal.PLAN).write_text(json.dumps({"rollouts": 3, "remarks": []}))
            wait = time.monotonic() + 300
            while shown.current_activity() == "" and time.monotonic() < wait:
                time.sleep(0.01)
            shown.say("a line")
        assert not shown._thread.is_alive()
    finally:
        os.close(writes)


def test_what_was_skipped_is_a_line(tmp_path: Path) -> None:
    stream = io.StringIO()
    shown = terminal.Progress(tmp_path, stream)
    (tmp_path / terminal.PLAN).write_text(json.dumps({"rollouts": 3, "remarks": []}))
    prompts = list(range(6))
    steps = {"optimizer_step": 9, "cause": "the gradient", "in_a_row": 2, "prompts": prompts}
    left_out = {"optimizer_step": None, "cause": "reward", "left_out": 8, "prompts": [0]}
    rows = [{"global_step": 4, **row} for row in (left_out, steps)]
    jsonl_log.append(tmp_path / jsonl_log.NONFINITE, rows)
    shown._read()
    said = [line for line in stream.getvalue().splitlines() if "not finite" in line]
    assert said[0].endswith(
        "rollout 4: 8 responses dropped from the update: reward not finite: prompt 0 "
        "(nonfinite.jsonl)"
    )
    assert said[1].endswith(
        "rollout 4: optimizer step 9 skipped, 2 in a row: the gradient not finite: prompt 0, "
        "prompt 1, prompt 2, prompt 3 and 2 more (nonfinite.jsonl)"
    )


def test_other_processes_write_into_the_same_file_and_ranks_are_one(
    busy: Callable[..., terminal.Progress], tmp_path: Path
) -> None:
    script = (
        "from pathlib import Path\n"
        "from sg_rlhf.overlay.reporting import activity as a\n"
        f"a.write_to(a.log_file(Path({str(tmp_path)!r})))\n"
        "with a.phase(a.ENGINE, 'loading'): input()\n"
    )
    stream = Screen()
    with busy(stream) as shown:
        ranks = [
            subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        wait_for(stream, "rollout engine: loading (0 s)")
        for rank in ranks:
            rank.communicate("\n", timeout=300)
        end = time.monotonic() + 300
        while shown.current_activity():
            assert time.monotonic() < end
            time.sleep(0.01)
    assert stream.getvalue().count("rollout engine: loading ...") == 1


def test_what_a_worker_says_is_a_line_and_the_same_of_another_is_not(
    busy: Callable[..., terminal.Progress], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    with busy(stream):
        for text in ("the retriever is away", "the retriever is away", "it is back"):
            activity.show_message(activity.ENGINE, text)
        wait_for(stream, "] rollout engine: it is back\n")
        assert stream.getvalue().count("rollout engine: the retriever is away\n") == 1
        # Later it is another outage.
        monkeypatch.setattr(terminal, "DUPLICATE_SECONDS", 0.0)
        activity.show_message(activity.ENGINE, "the retriever is away")
        activity.show_message(activity.ENGINE, "that was all")
        wait_for(stream, "that was all")
    assert stream.getvalue().count("rollout engine: the retriever is away\n") == 2


def test_without_a_run_directory_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with activity.phase(activity.DRIVER, "starting Ray"):
        activity.show_progress(1, 1)
        activity.set_status(1, "generation")
    assert not list(tmp_path.iterdir())
    assert activity.last_status(tmp_path) == ""


def test_the_last_part_of_a_rollout_is_known_to_whoever_reads_the_directory(
    busy: Callable[..., terminal.Progress], tmp_path: Path
) -> None:
    stream = io.StringIO()
    with busy(stream) as shown:
        activity.set_status(3, "generation")
        activity.set_status(4, "ppo_train")
        with activity.phase(activity.CONTROLLER, "syncing weights"):
            wait_for(stream, "controller: syncing weights ...")
        with activity.log_file(tmp_path).open("a") as log:
            log.write('{"who": "controller", "rollout": 5, "doi')
    assert activity.last_status(tmp_path) == " while updating (rollout 4)"
    assert shown.current_activity() == "" and "updating" not in stream.getvalue()
    activity.clear(tmp_path)
    assert activity.last_status(tmp_path) == ""


# -- SIGTERM: asked for once, waited for, and at last the end ------------------------------------


WAITS = """
import sys, time
from pathlib import Path
from sg_rlhf.overlay.reporting import graceful_stop
try:
    with graceful_stop.GracefulStop(sys.argv[1] or None, float(sys.argv[2])):
        print("waits", flush=True)
        for _ in range(100_000):
            time.sleep(0.05)
            if graceful_stop.stop_requested(Path(sys.argv[1]) if sys.argv[1] else None):
                print("asked by", graceful_stop.signal_name(), flush=True)
                if sys.argv[3] == "heeds":
                    break
except graceful_stop.TerminatedNow as error:
    print(f"ended: {error}", flush=True)
"""


def waiting(folder: Path | str, seconds: float, heeds: str, *before: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*before, sys.executable, "-c", WAITS, str(folder), str(seconds), heeds],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "waits\n"
    return process


def test_the_controller_is_asked_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / graceful_stop.STOP_FILE).touch()  # of a run that was killed
    process = waiting(tmp_path, 3600, "heeds")
    assert not graceful_stop.stop_requested(tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=300)[0] == "asked by SIGTERM\n"
    assert not graceful_stop.stop_requested(tmp_path)


def test_it_ends_when_the_time_is_over(tmp_path: Path) -> None:
    process = waiting(tmp_path, 0.5, "not")
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=300)[0].splitlines()
    assert said[-1] == "ended: no rollout ended within 0.5 s"
    assert time.monotonic() - started > 0.4


def test_a_second_one_ends_it_at_once(tmp_path: Path) -> None:
    process = waiting(tmp_path, 3600, "not")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None and process.stdout.readline() == "asked by SIGTERM\n"
    process.send_signal(signal.SIGTERM)  # `timeout` sends one to its child and one to the group
    time.sleep(graceful_stop.REPEAT_SECONDS + 0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=300)[0].splitlines()[-1] == "ended: at once"


def test_a_closed_terminal_asks_too_and_nohup_keeps_it(tmp_path: Path) -> None:
    process = waiting(tmp_path, 3600, "heeds")
    process.send_signal(signal.SIGHUP)
    assert process.communicate(timeout=300)[0] == "asked by SIGHUP\n"
    process = waiting(tmp_path, 3600, "heeds", "nohup")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=300)[0] == "asked by SIGTERM\n"


def test_without_a_run_directory_at_once() -> None:
    process = waiting("", 60, "not")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=300)[0] == "ended: at once\n"


def test_before_there_is_anything_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graceful_stop._Received, "number", None)
    with pytest.raises(KeyboardInterrupt, match="before the first rollout"):
        graceful_stop.interrupt(signal.SIGTERM, None)
