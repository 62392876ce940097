"""What a user sees when a process of a run is killed or hangs: one line, and nothing left behind.

Each test starts the tiny recipe, harms one of its processes in the middle of a rollout, and reads
what the terminal got. The run stops with status 1 and can be continued from its last checkpoint; an
engine that is lost while it samples is replaced, as often as ``sg.engine_restarts`` says.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer, Qwen2ForCausalLM

from sg_rlhf.overlay.reporting import activity, error_report
from sg_rlhf.run_dir import jsonl_log
from sg_rlhf.tiny.build import new_model
from tests.integration.conftest import ROOT, Data, command, data, environment, is_alive, train

__all__ = ["data"]  # the fixture

pytestmark = [pytest.mark.integration, pytest.mark.full]


@dataclass
class Run:
    """A run that has made its first rollout and a checkpoint of it."""

    folder: Path
    process: subprocess.Popen[str]
    children: set[int] = field(default_factory=set)

    def worker(self, role: str) -> int:
        """The process of a worker, by what it calls itself or by its title."""
        for row in jsonl_log.read(self.folder / "logs" / activity.FILE):
            if row["who"] == role:
                return int(row["pid"])
        for process in psutil.Process(self.process.pid).children(recursive=True):
            if role in " ".join(process.cmdline()):
                return process.pid
        raise LookupError(role)

    def metrics(self) -> list[dict[str, Any]]:
        """What it has written of its rollouts."""
        return jsonl_log.read(self.folder / jsonl_log.METRICS)

    def while_it_samples(self) -> None:
        """Wait until it does."""
        deadline = time.monotonic() + 1800
        while not activity.last_status(self.folder).startswith(" while sampling "):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def nothing_is_left(self) -> None:
        """None of the processes that it had."""
        time.sleep(1)
        assert not [pid for pid in self.children if is_alive(pid)]

    def end(self) -> tuple[int, list[str]]:
        """Its status, and the lines of its output."""
        output = self.process.communicate(timeout=1800)[0]
        lines = [line for line in re.split(r"[\r\n]+", output) if line.strip()]
        return self.process.returncode, lines


@pytest.fixture
def run(tmp_path: Path, data: Data, request: pytest.FixtureRequest) -> Iterator[Run]:
    """With further overrides where it has a parameter."""
    folder = tmp_path / "run"
    more = getattr(request, "param", ())
    before = more[:2] if more[:1] == ["timeout"] else []
    process = subprocess.Popen(
        [*before, *command(
            folder, data, "ckpt.save_steps=1", "sg.eval_at_start=false", "sg.engine_timeout=15",
            "eval.steps=-1", "train.num_episodes=30", *more[len(before):],
        )],
        cwd=ROOT, env=environment(), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    found = Run(folder, process)
    latest = folder / "checkpoints" / "deepspeed" / "_actor" / "latest"
    deadline = time.monotonic() + 1800
    while not latest.is_file() or len(jsonl_log.read(folder / jsonl_log.METRICS)) < 2:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    found.children = {c.pid for c in psutil.Process(process.pid).children(recursive=True)}
    yield found
    if process.poll() is None:
        process.kill()
        process.communicate()
    for pid in found.children:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        (activity.TRAINER, "policy rank"),
        (activity.CONTROLLER, "controller"),
        ("ray::SGReferenceModelActor", "reference rank"),
    ],
)
def test_a_killed_worker(run: Run, name: str, role: str) -> None:
    pid = run.worker(name)
    os.kill(pid, signal.SIGKILL)
    status, lines = run.end()
    assert status == 1
    assert lines[-1].startswith(f"failed: {role} (process {pid} on "), lines[-3:]
    assert re.search(
        r" died \(killed, or crashed\) while .+ \(rollout \d+\); the same command resumes from the "
        r"last checkpoint, ",
        lines[-1],
    ), lines[-1]
    assert not any("Traceback" in line for line in lines)
    assert "Traceback" in (run.folder / error_report.FILE).read_text()
    run.nothing_is_left()


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("name", [activity.ENGINE, "VLLM::EngineCore"])
def test_an_engine_is_replaced(run: Run, name: str, harm: signal.Signals) -> None:
    """One that is stopped is first missed for ``sg.engine_timeout``; what is under it ends too."""
    engine = psutil.Process(run.worker(activity.ENGINE))
    processes = [engine, *engine.children(recursive=True)]
    run.while_it_samples()
    os.kill(run.worker(name), harm)
    rows = len(run.metrics())
    deadline = time.monotonic() + 1800
    while len(run.metrics()) < rows + 2:
        assert run.process.poll() is None, run.end()[1][-3:]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert sum(row["engines/replaced"] for row in run.metrics()) == 1
    assert not [process.pid for process in processes if is_alive(process.pid)]
    run.process.send_signal(signal.SIGINT)
    status, lines = run.end()
    assert status == 130, lines[-3:]
    assert not any("Traceback" in line for line in lines)
    run.nothing_is_left()


@pytest.mark.parametrize("run", [["sg.engine_restarts=0"]], indirect=True)
@pytest.mark.parametrize(
    ("harm", "line"),
    [
        (signal.SIGKILL, "stopped: rollout engine 0 is lost (killed, crashed or hung), "),
        (signal.SIGSTOP, "failed: rollout engine 0 did not answer for 15 s "),
    ],
)
def test_an_engine_that_may_not_be_replaced(run: Run, harm: signal.Signals, line: str) -> None:
    run.while_it_samples()
    os.kill(run.worker(activity.ENGINE), harm)
    status, lines = run.end()
    assert status == 1
    assert lines[-1].startswith(line), lines[-3:]
    assert "the same command " in lines[-1]
    assert not any("Traceback" in line for line in lines)
    run.nothing_is_left()


#: Every rollout but the first two is without a checkpoint, unless a signal asks for one.
RARELY = "ckpt.save_steps=2"


@pytest.mark.parametrize(
    ("run", "sent", "status", "line"),
    [
        # It signals its child, and then the child's process group.
        (["timeout", "3600", RARELY], signal.SIGTERM, 143, "terminated by SIGTERM, after rollout "),
        ([RARELY], signal.SIGTERM, 143, "terminated by SIGTERM, after rollout "),
        ([RARELY], signal.SIGHUP, 129, "terminated by SIGHUP, after rollout "),
        ([RARELY], signal.SIGINT, 130, "interrupted; the same command resumes from "),
    ],
    indirect=["run"],
)
def test_a_signal_to_the_process_group(
    run: Run, sent: signal.Signals, status: int, line: str
) -> None:
    run.while_it_samples()
    if "timeout" in run.process.args:
        run.process.send_signal(sent)
    else:
        os.killpg(run.process.pid, sent)
    ended, lines = run.end()
    assert (ended, lines[-1][: len(line)]) == (status, line), lines[-3:]
    assert not any("Traceback" in said for said in lines)
    if " after rollout " in line:  # saved, although none was due
        done = run.metrics()[-1]["global_step"]
        assert lines[-1].endswith(f"resumes from the last checkpoint, global_step{done}")
    run.nothing_is_left()


def test_a_service_manager_signals_every_process(run: Run) -> None:
    """It ends Ray's processes too, so the run resumes from its last checkpoint."""
    run.while_it_samples()
    everything = psutil.Process(run.process.pid).children(recursive=True)
    for process in [psutil.Process(run.process.pid), *everything]:
        process.send_signal(signal.SIGTERM)
    status, lines = run.end()
    assert status == 143, lines[-3:]
    assert lines[-1].startswith("terminated by SIGTERM, ") and "Traceback" not in lines[-1]
    assert "; the same command resumes from the last checkpoint, global_step" in lines[-1]
    run.nothing_is_left()


# -- Engines that fail before their first rollout ------------------------------------------------

#: A reward file, which the engine's process reads before it starts its core, can break the engine.
REWARD = """
import os, psutil, signal
from vllm.v1.engine.async_llm import AsyncLLM

honest = AsyncLLM.collective_rpc

syncs = 0

async def collective_rpc(self, method, *args, **kwargs):
    global syncs
    if method == "receive_bucket" and {fault!r} == "garbled":
        metadata, first, last, *rest = kwargs["args"]
        syncs += first
        if syncs > 1:  # the embedding begins 8 numbers later
            moved = [(n, d, s, at + 16 * ("embed" in n)) for n, d, s, at in metadata]
            kwargs["args"] = (moved, first, last, *rest)
    if method == "receive_bucket" and {fault!r} == "first sync":
        raise RuntimeError("a bucket did not fit")
    if method == "draw_by_seed" and {fault!r} == "start":
        for process in psutil.Process().children(recursive=True):
            process.send_signal(signal.SIGKILL)
    return await honest(self, method, *args, **kwargs)

AsyncLLM.collective_rpc = collective_rpc

def reward_func(queries, prompts, labels):
    return {{"rewards": [float(len(query) % 3) for query in queries]}}
"""


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        # Both engines fail, and either may be heard of first.
        (
            "first sync",
            r"stopped: weight sync: engine [01] did not take bucket 1 of 1 \(model\.embed_",
        ),
        ("start", "stopped: rollout engine "),
    ],
)
def test_an_engine_that_fails_early_leaves_no_rank_waiting(
    tmp_path: Path, data: Data, fault: str, line: str
) -> None:
    """In the rendezvous of the weight sync, or in the barrier at the end of one."""
    (tmp_path / "reward.py").write_text(REWARD.format(fault=fault))
    status, lines = ends(
        tmp_path, data, "actor.num_gpus_per_node=2", "ref.num_gpus_per_node=2",
        "vllm.num_engines=2", f"reward.remote_url={tmp_path / 'reward.py'}",
    )  # fmt: skip
    assert status == 1 and re.match(line, lines[-1]), lines[-3:]
    expected = "RuntimeError: a bucket did not fit" if fault == "first sync" else "core was killed"
    assert expected in lines[-1]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([], "before optimizer step "),
        (["sg.correction=tis"], "before optimizer step "),
        (["train.async_enable=true", "sg.correction=tis"], "after weight sync 2 "),
    ],
    ids=["plain", "corrected", "older samples"],
)
def test_an_engine_with_other_weights_ends_the_run_before_its_samples_are_trained(
    tmp_path: Path, data: Data, overrides: list[str], line: str
) -> None:
    (tmp_path / "reward.py").write_text(REWARD.format(fault="garbled"))
    status, lines = ends(
        tmp_path, data, f"reward.remote_url={tmp_path / 'reward.py'}", "train.num_episodes=9",
        "sg.eval_at_start=false", *overrides,
    )  # fmt: skip
    assert status == 1 and lines[-1].startswith(f"stopped: {line}"), lines[-3:]
    assert "the engine has other weights than the trainer" in lines[-1]
    assert len(jsonl_log.read(tmp_path / "run" / jsonl_log.METRICS)) <= 2


def test_an_engine_that_dies_of_its_first_request_is_not_replaced(
    tmp_path: Path, data: Data
) -> None:
    """vLLM starts with heads of 24 on a CPU, and has no kernel for them."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "sg_rlhf" / "tiny" / "kk_tiny")
    config = new_model(tokenizer, seed=0).config
    config.hidden_size = 96
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    status, lines = ends(
        tmp_path, data, f"actor.model_name_or_path={tmp_path / 'model'}", "sg.eval_at_start=false"
    )
    assert status == 1
    assert lines[-1].startswith("stopped: rollout engine 0 is lost ("), lines[-3:]
    assert "24" in lines[-1] and "Error: " in lines[-1]
    assert "had not answered any request, so it is not replaced" in lines[-1]


def ends(tmp_path: Path, data: Data, *overrides: str) -> tuple[int, list[str]]:
    """The status of a run, and the lines of its output."""
    found = train(tmp_path / "run", data, "eval.steps=-1", *overrides)
    assert "Traceback" not in found.stdout + found.stderr
    return found.returncode, [s for s in re.split(r"[\r\n]+", found.stderr) if s.strip()]
