"""A run on an OpenEnv environment: one of our domains, served by OpenEnv's own server."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

from sg_rlhf.run_dir import jsonl_log
from tests.integration.conftest import RECIPE, ROOT, SMALL, environment
from tests.integration.test_other_trainers import pytestmark
from tests.integration.test_serve_env import serving
from tests.unit.tasks.search.http_retriever import running

__all__ = ["pytestmark"]

DOMAIN = {"SG_DOMAINS": "sg_rlhf.environments.openenv_domain:OPENENV"}


def run(module: str, *arguments: object, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT, env={**environment(), **DOMAIN}, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def training(data: Path, run_dir: Path, url: str) -> list[str]:
    return [
        "--config", str(RECIPE), "--run-dir", str(run_dir), *SMALL,
        "actor.model_name_or_path=module:sg_rlhf.tiny.search_tiny", "reward.remote_url=null",
        "train.agent_func_path=domain:openenv",
        f"data.prompt_dataset={data / 'train.jsonl'}", f"eval.dataset={data / 'test.jsonl'}",
        "data.max_len=320", "rollout.max_new_tokens=200", "sg.samples_per_step=16",
        f"sg.openenv.url={url}", 'sg.openenv.stop=["</search>", "</answer>"]',
        "sg.openenv.max_turns=4", "sg.openenv.turn_tokens=24", "sg.openenv.observation_tokens=64",
    ]  # fmt: skip


def test_it_trains_on_an_environment_of_several_turns(tmp_path: Path) -> None:
    made = tmp_path / "encyclopedia"
    run(
        "sg_rlhf", "data", "search", "--source", "encyclopedia", "--out", made, "--generate",
        "people=40", "towns=12", "seed=0",
    )  # fmt: skip
    rows = [json.loads(line) for line in (made / "train.jsonl").read_text().splitlines()]
    data, run_dir = tmp_path / "data", tmp_path / "run"
    with (
        running() as retriever,
        serving("search", rows, tmp_path, "--set", f"url={retriever.url}", "max_turns=3") as url,
    ):
        options = ("--out", data, "--generate", f"url={url}", "count=8", "test_count=4")
        assert "8 rows" in run("sg_rlhf", "data", "openenv", *options)
        inputs = {row["input"] for row in rows}
        for line in (data / "train.jsonl").read_text().splitlines():
            assert json.loads(line)["input"] in inputs
        run("sg_rlhf.train", *training(data, run_dir, url))
    metrics = jsonl_log.read(run_dir / jsonl_log.METRICS)
    assert [row["global_step"] for row in metrics] == [1, 2]
    assert all(row["turns"] > 1 and 0 < row["ended"] <= 1 for row in metrics)
    samples = jsonl_log.read(run_dir / jsonl_log.SAMPLES)
    assert {sample["reward"] for sample in samples} <= {-1.0, 0.0, 1.0}
    seen = [text for sample in samples for _, text in sample.get("environment", [])]
    assert any("Doc 1(Title:" in text for text in seen)
    assert not any("Doc 1(Title:" in sample["response"] for sample in samples)
    steps = jsonl_log.read(run_dir / jsonl_log.OPTIMIZER_STEPS)
    assert all(math.isfinite(row["actor_grad_norm"]) for row in steps)

    # The server has ended: one line before anything starts.
    said = run("sg_rlhf.train", *training(data, tmp_path / "other", url), status=2)
    assert "no OpenEnv server" in said and "sg.openenv.url" in said
