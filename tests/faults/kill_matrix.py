"""A run that is killed again and again ends as one that never was: byte for byte, times aside.

    python -m tests.faults.kill_matrix [--kills 48] [--seed 0] [--out FILE.json]

One run is never killed. The others are: each time a process is chosen and a part of a rollout, the
run is watched until that part is under way, and after a random while, shorter than the part, the
process gets SIGKILL. The same command goes on, until the kills are used up. Then the files are
compared. Prints a table of processes and parts; status 1 where an end differs. A kill that came too
late for its part counts for the part that it met, and is made again. About 15 seconds a kill on two
cores.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from lab.bench.common import as_json
from sg_rlhf.common.resources import machine
from sg_rlhf.overlay.reporting import activity
from sg_rlhf.run_dir import jsonl_log
from tests.integration.conftest import Data, command, environment

#: Everything at once is what a lost machine is.
PROCESSES = (
    "driver", "controller", "policy rank", "reference rank", "engine", "engine's core",
    "everything",
)  # fmt: skip
#: Parts of a rollout, by their names in ``timing/*``.
TIMED = (
    "generation", "ppo_train", "broadcast", "sync_check", "checkpoint", "evaluation",
)  # fmt: skip
PARTS = tuple(activity.LABELS[name] for name in TIMED)
#: Share of a part's time in which a kill may come, and how often it is tried again.
WITHIN, TRIES = 0.7, 3
#: An epoch is two rollouts.
OVERRIDES = (
    "eval.steps=2", "ckpt.save_steps=1", "ckpt.max_num=2",
    "sg.samples_per_step=16", "ds.param_dtype=fp32",
)  # fmt: skip
#: Files of a run whose rows must be equal.
ROWS = (jsonl_log.METRICS, jsonl_log.OPTIMIZER_STEPS, jsonl_log.SAMPLES, jsonl_log.EVALUATIONS)
_TIMES = ("timing/", "perf/", "memory/")
_TIME_KEYS = ("time", "seconds", "engines/replaced")
#: A start, and the wait for a part that only every other rollout has.
PATIENCE = 1800.0


@dataclass(frozen=True)
class Kill:
    """One kill.

    Attributes:
        process: of :data:`PROCESSES`.
        part: the part that was waited for.
        doing: the part that was under way right before it, and the rollout.
        ended: whether the run ended by it; a lost engine is replaced while it samples.
        status: the run's, if it ended.
        line: the last line that it printed, if it ended.
    """

    process: str
    part: str
    doing: str
    ended: bool
    status: int | None
    line: str

    @property
    def met(self) -> str:
        """The part that was under way, without the rollout."""
        return self.doing.split(" (")[0]


class KilledRun:
    """A run in a directory, started as often as needed."""

    def __init__(self, folder: Path, data: Data, epochs: int = 4, more: Sequence[str] = ()) -> None:
        self.folder = folder
        self._command = command(folder, data, f"train.num_episodes={epochs}", *OVERRIDES, *more)
        self._process: subprocess.Popen[bytes] | None = None
        self._output = folder.with_suffix(".log")

    def start(self) -> None:
        """Start it, or go on with it."""
        activity.clear(self.folder)
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                self._command, stdout=output, stderr=subprocess.STDOUT, env=environment(),
                start_new_session=True,
            )  # fmt: skip

    def is_over(self) -> bool:
        """Whether its process has ended."""
        return self._process is None or self._process.poll() is not None

    def finish(self, seconds: float = 3600.0) -> int:
        """Wait for its end; the exit status. What does not end in time is killed, all of it."""
        if self._process is None:
            self.start()
        assert self._process is not None
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            driver = psutil.Process(self._process.pid)
            for process in (driver, *driver.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            raise

    def line(self) -> str:
        """The last line of its output."""
        lines = self._output.read_text(errors="replace").replace("\r", "\n").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def kill(self, process: str, part: str, after: float) -> Kill | None:
        """Kill a process of it, seconds after a part has begun; None where it ends before."""
        if self.is_over():
            self.start()
        assert self._process is not None
        if not self._wait_for(part):
            return None
        began = time.monotonic()
        victims = self._victims(process)  # which takes a while itself
        time.sleep(max(began + after - time.monotonic(), 0.0))
        doing = activity.last_status(self.folder).removeprefix(" while ")
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        status = self._status_soon(process)
        if status is None:
            return Kill(process, part, doing, False, None, "")
        self._await_the_rest(victims)
        return Kill(process, part, doing, True, status, "" if status < 0 else self.line())

    def _wait_for(self, part: str) -> bool:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if activity.last_status(self.folder).startswith(f" while {part} ("):
                return True
            if self.is_over():
                return False
            time.sleep(0.001)
        raise TimeoutError(f"{self.folder}: no {part} within {PATIENCE:g} s; {self.line()}")

    def _victims(self, process: str) -> list[psutil.Process]:
        assert self._process is not None
        driver = psutil.Process(self._process.pid)
        if process == "driver":
            return [driver]
        children = driver.children(recursive=True)
        if process == "everything":
            return [driver, *children]
        by_title = {"reference rank": "ReferenceModelActor", "engine's core": "EngineCore"}
        if process in by_title:
            title = by_title[process]
            found = [c for c in children if title in " ".join(c.cmdline())]
        else:
            named = {"engine": activity.ENGINE, "policy rank": activity.TRAINER}
            who = named.get(process, activity.CONTROLLER)
            rows = jsonl_log.read(self.folder / "logs" / activity.FILE)
            pids = [row["pid"] for row in rows if row["who"] == who]
            found = [c for c in children if pids and c.pid == pids[-1]]
        if not found:
            raise LookupError(f"{process}: not among {[c.cmdline()[:1] for c in children]}")
        return found

    def _status_soon(self, process: str) -> int | None:
        """Its exit status; None where it goes on, as it may without an engine."""
        assert self._process is not None
        rows = len(jsonl_log.read(self.folder / jsonl_log.METRICS))
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                return self._process.returncode
            if len(jsonl_log.read(self.folder / jsonl_log.METRICS)) > rows and "engine" in process:
                return None
            time.sleep(0.05)
        raise TimeoutError(f"{self.folder}: neither goes on nor ends without its {process}")

    @staticmethod
    def _await_the_rest(victims: Iterable[psutil.Process]) -> None:
        """A driver that is killed cannot end its processes; they end when they notice."""
        psutil.wait_procs(list(victims), timeout=1800)


def lasts(folder: Path) -> dict[str, float]:
    """Seconds that each of :data:`PARTS` took in a run, where it did anything."""
    rows = jsonl_log.read(folder / jsonl_log.METRICS)
    found = {}
    for name, part in zip(TIMED, PARTS, strict=True):
        found[part] = statistics.median(s for r in rows if (s := r[f"timing/{name}"]) > 1e-3)
    return found


def differences(one: Path, other: Path, but: tuple[str, ...] = ()) -> list[str]:
    """What is not the same at the end of two runs, but for keys that begin so."""
    found = []
    for name in ROWS:
        rows = [
            [_timeless(row, but) for row in jsonl_log.read(folder / name)]
            for folder in (one, other)
        ]
        if rows[0] != rows[1]:
            pairs = enumerate(itertools.zip_longest(*rows))
            first = next(i for i, (a, b) in pairs if a != b)
            found.append(f"{name}: row {first + 1} of {len(rows[0])} and {len(rows[1])}")
    ends = [_weights(folder) for folder in (one, other)]
    if ends[0] != ends[1] or not ends[0]:
        found.append(f"weights: {sorted(ends[0])} and {sorted(ends[1])}")
    return found


def _timeless(row: dict[str, Any], but: tuple[str, ...] = ()) -> str:
    kept = {
        key: value
        for key, value in row.items()
        if key not in _TIME_KEYS and not key.startswith((*_TIMES, *but))
    }
    return json.dumps(kept, sort_keys=True)


def _weights(folder: Path) -> dict[str, str]:
    """SHA-256 of the final model's weights."""
    files = sorted((folder / "checkpoints").rglob("*.safetensors"))
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def schedule(kills: int, chance: random.Random) -> list[tuple[str, str]]:
    """Pairs of a process and a part: all of them in a random order, again and again."""
    every = list(itertools.product(PROCESSES, PARTS))
    found: list[tuple[str, str]] = []
    while len(found) < kills:
        found += chance.sample(every, len(every))
    return found[:kills]


def run_matrix(
    folder: Path,
    data: Data,
    pairs: Sequence[tuple[str, str]],
    seed: int,
    each: int = 8,
    epochs: int = 4,
) -> tuple[list[Kill], list[str]]:
    """Kill runs as planned.

    Args:
        folder: for the runs.
        data: to train on.
        pairs: of a process and a part.
        seed: of the instants.
        each: kills of a run, at most.
        epochs: of each run, two rollouts each.

    Returns:
        The kills, and what differs at the end, if anything.
    """
    chance = random.Random(seed)
    whole = KilledRun(folder / "never_killed", data, epochs)
    if whole.finish() != 0:
        raise RuntimeError(f"the run that is not killed failed: {whole.line()}")
    seconds, tries = lasts(whole.folder), Counter[tuple[str, str]]()
    left, kills, found = list(pairs), list[Kill](), list[str]()
    for number in itertools.count(1):
        run = KilledRun(folder / f"killed_{number}", data, epochs)
        for _ in range(each):
            if not left:
                break
            kill = run.kill(*left[0], chance.uniform(0.0, WITHIN * seconds[left[0][1]]))
            if kill is None:
                break
            tries[left[0]] += 1
            if kill.met == kill.part or tries[left[0]] == TRIES:
                tries.pop(left[0])
                left.pop(0)
            kills.append(kill)
            print(f"{len(kills):3} {_told(kill)}", flush=True)
        status = run.finish() if not run.is_over() else None
        if status != 0:
            run.start()
            status = run.finish()
        differs = [f"exit status {status}: {run.line()}"] if status else []
        differs += differences(whole.folder, run.folder)
        found += [f"{run.folder.name}: {what}" for what in differs]
        print(f"    {run.folder.name}: {'; '.join(differs) or 'the same end'}", flush=True)
        if not left:
            return kills, found
    raise AssertionError  # not reached


def _told(kill: Kill) -> str:
    after = f"status {kill.status}: {kill.line}" if kill.ended else "the run goes on"
    return f"{kill.process} while {kill.doing}: {after}"


def table(kills: Sequence[Kill]) -> str:
    """Kills by process and the part that they met, as a Markdown table."""
    columns = [*PARTS, *sorted({kill.met for kill in kills} - set(PARTS))]
    lines = ["| killed | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for process in PROCESSES:
        counts = [sum(k.process == process and k.met == part for k in kills) for part in columns]
        lines.append(f"| {process} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.kill_matrix", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--kills", type=int, default=48, help="how many in all")
    parser.add_argument("--seed", type=int, default=0, help="of the order and the instants")
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    parser.add_argument("--out", type=Path, help="write the kills and the verdict as JSON")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        data = Data(folder / "data")
        subprocess.run(
            [
                sys.executable, "-m", "sg_rlhf", "data", "kk", "--out", str(data.folder),
                "--generate", "people=2-3", "per_size=16", "test_per_size=4", "seed=0",
            ],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        started = time.time()
        pairs = schedule(args.kills, random.Random(args.seed))
        kills, found = run_matrix(folder, data, pairs, args.seed)
    print(table(kills))
    print(f"{len(kills)} kills, {len(found)} differences, {time.time() - started:.0f} s")
    if args.out:
        packages = ("torch", "ray", "deepspeed")
        given = f"--kills {args.kills} --seed {args.seed}"
        result = {
            "command": f"python -m tests.faults.kill_matrix {given}",
            "date": time.strftime("%Y-%m-%d"), "machine": machine(),
            "versions": {name: metadata.version(name) for name in packages},
            "seconds": round(time.time() - started),
            "differences": found, "kills": [asdict(kill) for kill in kills],
        }  # fmt: skip
        text = as_json(result).replace(str(folder), "RUNS")
        text = re.sub(r"(?<= on )[0-9a-fA-F.:]+(?=\) died)", "HOST", text)
        args.out.write_text(text)
    return 1 if found else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    raise SystemExit(main())
