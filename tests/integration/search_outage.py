"""A training run through an outage of its retriever, beside the same run without one.

The tiny search recipe on a CPU, a generated encyclopedia, our server over BM25. While the third of
six rollouts is sampled the server is killed (SIGKILL); after `outage` seconds it is started again
at the same address. The run is seen to its end. Without a GPU a run is decided by its seeds, so its
dialogues, rewards and losses must be those of the run without an outage.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sg_rlhf.run_dir import jsonl_log
from tests.integration.conftest import ROOT, environment

RECIPE = ROOT / "configs" / "search" / "grpo_sg_tiny_cpu.yaml"
ROLLOUTS, KILLED_AFTER = 6, 2
OVERRIDES = (
    "rollout.batch_size=4", "rollout.n_samples_per_prompt=4", "rollout.micro_batch_size=8",
    "train.batch_size=8", "train.micro_batch_size=4", "data.max_samples=8",
    f"train.num_episodes={ROLLOUTS // 2}", "eval.dataset=null",
    "sg.wandb=disabled", "sg.samples_per_step=16",
)  # fmt: skip
#: What differs between two runs of the same seeds.
_TIMES = ("seconds", "timing", "time", "throughput", "per_s", "memory")


def measure(work: Path, outage: float) -> dict[str, Any]:
    """Both runs, and what they have in common.

    Args:
        work: an empty folder.
        outage: seconds.
    """
    command(
        "sg_rlhf", "data", "search", "--source", "encyclopedia", "--out", work / "data",
        "--generate", "people=40", "towns=12", "seed=0",
    )  # fmt: skip
    command(
        "sg_rlhf.retrieval.index", "--corpus", work / "data" / "corpus.jsonl",
        "--encoder", "bm25", "--out", work / "index",
    )  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    quiet = train(work, "without", port, None)
    through = train(work, "with", port, outage)
    return {
        "outage_s": outage,
        "status": through["status"],
        "said": through["said"],
        "rollouts": len(through["rows"]),
        "dialogues": len(through["samples"]),
        "optimizer_steps": len(through["steps"]),
        "retrieval_failures": sum(row["retrieval_failures"] for row in through["rows"]),
        "seconds_without": round(quiet["seconds"], 1),
        "seconds_with": round(through["seconds"], 1),
        "same_dialogues": quiet["samples"] == through["samples"],
        "same_optimizer_steps": quiet["steps"] == through["steps"],
    }


def train(work: Path, name: str, port: int, outage: float | None) -> dict[str, Any]:
    """One run; without `outage` its retriever stays."""
    run_dir = work / name
    log = work / f"{name}.log"
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(_stack_of(serving(work / "index", port)))
        started = time.monotonic()
        with log.open("w") as output:
            run = subprocess.Popen(
                [
                    sys.executable, "-m", "sg_rlhf.train", "--config", RECIPE,
                    "--run-dir", run_dir, *OVERRIDES, f"sg.search.url=http://127.0.0.1:{port}/retrieve",
                    f"data.prompt_dataset={work / 'data' / 'train.jsonl'}",
                ],
                cwd=ROOT, env=environment(), stdout=output, stderr=output,
            )  # fmt: skip
        stack.callback(_end, run)
        if outage is not None:
            while len(jsonl_log.read(run_dir / jsonl_log.METRICS)) < KILLED_AFTER:
                if run.poll() is not None:
                    raise RuntimeError(f"the run ended with {run.returncode}: {log.read_text()}")
                time.sleep(0.05)
            stop.close()
            time.sleep(outage)
            stack.enter_context(serving(work / "index", port))
        status = run.wait(timeout=900)
        seconds = time.monotonic() - started
    samples = jsonl_log.read(run_dir / jsonl_log.SAMPLES)
    rows = jsonl_log.read(run_dir / jsonl_log.METRICS)
    return {
        "status": status,
        "seconds": seconds,
        "rows": rows,
        "samples": [_without_times(row) for row in samples],
        "steps": [
            _without_times(row) for row in jsonl_log.read(run_dir / jsonl_log.OPTIMIZER_STEPS)
        ],
        # Behind the time and the name of whoever says so.
        "said": [
            line.partition("] ")[2]
            for line in log.read_text(errors="replace").splitlines()
            if "] rollout engine: retriever" in line
        ],
    }


@contextlib.contextmanager
def _stack_of(context: contextlib.AbstractContextManager[Any]) -> Iterator[contextlib.ExitStack]:
    """A context that may be left early."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(context)
        yield stack


@contextlib.contextmanager
def serving(index: Path, port: int) -> Iterator[None]:
    """Our server until the block ends, which kills it."""
    arguments = ["--index", str(index), "--port", str(port)]
    process = subprocess.Popen(
        [sys.executable, "-m", "sg_rlhf.retrieval.server", *arguments],
        cwd=ROOT, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with {process.returncode}")
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def _end(run: subprocess.Popen[bytes]) -> None:
    if run.poll() is None:
        run.send_signal(signal.SIGTERM)
        run.wait(timeout=300)


def _without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if not any(word in k for word in _TIMES)}


def command(module: str, *arguments: object) -> None:
    subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
