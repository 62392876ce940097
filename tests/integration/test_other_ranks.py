"""A checkpoint is loaded by another number of ranks: every number as it was, and the same step."""

from __future__ import annotations

import itertools
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sg_rlhf.run_dir import jsonl_log
from tests.integration.conftest import ROOT, Data, command, environment, run_ranks, train

pytestmark = pytest.mark.integration

#: Of a step at a rate of 0.001: ranks add a gradient in another order. bf16's products are rounded
#: by what is in a micro-batch, and Adam's step of a gradient near 0 has either sign.
ROUNDING = {"bf16": 2e-3}
IN_FLOAT32 = 2e-6
WHOLE = ("master", "weights", "exp_avg", "exp_avg_sq")


@pytest.mark.full
@pytest.mark.parametrize(
    "cases",
    [["zero3"], ["several_buffers", "bf16", "lora", "zero2", "zero1"]],
    ids=lambda cases: "_".join(cases),
)
def test_two_ranks_then_one_then_two(tmp_path: Path, cases: list[str]) -> None:
    found: list[dict[str, Any]] = []
    before = "nothing"
    for start, ranks in enumerate((2, 1, 2)):
        folder = tmp_path / str(start)
        (said, *_) = run_ranks("other_ranks.py", ranks, before, str(folder), *cases)
        found.append(torch.load(folder / "found.pt", weights_only=True))
        remarks = [line for line in said.splitlines() if line.startswith("checkpoint ")]
        if start:
            was, now = ("2 ranks", "1 rank") if ranks == 1 else ("1 rank", "2 ranks")
            remark = f"checkpoint global_step1: written by {was}, loaded by {now}"
            assert remarks == [remark] * len(cases)
        before = str(folder)
    for earlier, later in itertools.pairwise(found):
        for case in cases:
            compare(earlier[case], later[case], ROUNDING.get(case, IN_FLOAT32))


def compare(earlier: dict[str, Any], later: dict[str, Any], rounding: float) -> None:
    saved, loaded = earlier["saved"], later["loaded"]
    for what in WHOLE:
        assert saved[what].keys() == loaded[what].keys()
        differ = [n for n, value in saved[what].items() if not torch.equal(value, loaded[what][n])]
        assert not differ, what
    # Where the cuts between a rank's buffers are follows from the number of ranks.
    rest = {key: value for key, value in saved.items() if key not in (*WHOLE, "buffers")}
    assert rest == {key: loaded[key] for key in rest}
    assert later["client"] == {
        "global_step": 1, "data_loader_state_dict": {"drawn": [3, 1, 2]}
    }  # fmt: skip
    moved = 0.0
    for name, value in earlier["next"].items():
        assert (value - later["after"][name]).abs().max() <= rounding
        moved = max(moved, float((value - saved["master"][name]).abs().max()))
    assert moved > 5e-4


@pytest.mark.full
def test_a_run_changes_its_ranks_twice_and_asks_the_same_prompts(
    data: Data, tmp_path: Path
) -> None:
    """The whole pipeline: one rank, two ranks with two engines, one rank."""
    changed, never = tmp_path / "changed", tmp_path / "never"
    # Many more rollouts than are made before a signal is heeded.
    rollouts = 8
    common = [f"data.max_samples={4 * rollouts}", "eval.steps=-1", "sg.eval_at_start=false",
              "sg.samples_per_step=100"]  # fmt: skip
    two = ["actor.num_gpus_per_node=2", "ref.num_gpus_per_node=2", "vllm.num_engines=2"]
    terminated_after_a_rollout(command(changed, data, *common))
    assert parts_of_the_latest(changed) == 1
    terminated_after_a_rollout(command(changed, data, *common, *two))
    assert parts_of_the_latest(changed) == 2
    result = train(changed, data, *common)
    assert result.returncode == 0, result.stdout + result.stderr
    assert parts_of_the_latest(changed) == 1
    result = train(never, data, *common)
    assert result.returncode == 0, result.stdout + result.stderr
    made = [row["global_step"] for row in jsonl_log.read(changed / jsonl_log.METRICS)]
    assert made == [*range(1, rollouts + 1)]
    assert prompts(changed) == prompts(never)


def parts_of_the_latest(run_dir: Path) -> int:
    """How many ranks wrote the run's latest checkpoint."""
    actor = run_dir / "checkpoints" / "deepspeed" / "_actor"
    return len([*(actor / (actor / "latest").read_text()).glob("*_optim_states.pt")])


def terminated_after_a_rollout(command: list[str]) -> None:
    """Start a run that gets SIGTERM when it has made one."""
    metrics = Path(command[command.index("--run-dir") + 1]) / jsonl_log.METRICS
    before, deadline = len(jsonl_log.read(metrics)), time.monotonic() + 300
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    while len(jsonl_log.read(metrics)) == before and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=1800)[0]
    assert process.returncode == 143, output


def prompts(run_dir: Path) -> list[tuple[int, str]]:
    """The prompts of every rollout, as often as they were asked."""
    rows = jsonl_log.read(run_dir / jsonl_log.SAMPLES)
    return sorted((row["global_step"], row["prompt"]) for row in rows)
