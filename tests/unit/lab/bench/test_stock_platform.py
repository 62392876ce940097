"""The stock side of lab/bench/stock_openrlhf.py has our platform, and nothing else of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.bench.stock_platform import PLATFORM
from sg_rlhf.overlay.patches import table

ROOT = Path(__file__).parents[4]
CPU = "sg_rlhf.overlay.cpu."

#: In a process of its own, as what is replaced stays so: whose code each name is.
PROGRAM = """
import json
from lab.bench import stock_platform
stock_platform.install()
import openrlhf.cli.train_ppo_ray as cli, openrlhf.trainer.ppo_trainer as trainer
import openrlhf.models.actor as actor, openrlhf.trainer.ray.ppo_actor as ppo_actor
import openrlhf.trainer.ray.vllm_engine as engine
import torch
print(json.dumps({
    "trainer": trainer.PPOTrainer.__ray_metadata__.modified_class.__module__,
    "policy": cli.PolicyModelActor.__ray_metadata__.modified_class.__module__,
    "update": ppo_actor.ActorPPOTrainer.__module__,
    "kl": ppo_actor.compute_approx_kl.__module__,
    "experience": trainer.RemoteExperienceMaker.__module__,
    "samples": trainer.SamplesGenerator.__module__,
    "forward": actor.Actor.forward.__module__,
    "log_probs": actor.log_probs_from_logits.__module__,
    "sync": ppo_actor.PolicyModelActor.__ray_metadata__.modified_class.broadcast_to_vllm.__module__,
    "engine": engine.RolloutRayActor.__ray_metadata__.modified_class.__module__,
    "group": ppo_actor.stateless_init_process_group.__module__,
    "device": torch.cuda.current_device(),
}))
"""


def test_its_rows_are_the_platforms() -> None:
    modules = {patch.replacement.partition(":")[0] for patch in PLATFORM}
    assert {name for name in modules if not name.startswith(CPU)} == {
        "lab.bench.stock_engine",
        "sg_rlhf.overlay.model.packed_attention",
    }
    of_the_cpu = [patch for patch in table.PATCHES if patch.replacement.startswith(CPU)]
    assert len(of_the_cpu) > 5 and set(of_the_cpu) <= set(PLATFORM)


@pytest.mark.full
def test_its_classes_are_upstreams() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True,
        env={**os.environ, "SG_PLATFORM": "cpu"},
    )  # fmt: skip
    whose = json.loads(done.stdout.splitlines()[-1])
    assert whose.pop("engine") == "lab.bench.stock_engine"
    assert whose.pop("group").startswith(CPU) and whose.pop("device") == "cpu"
    assert {name for name, module in whose.items() if not module.startswith("openrlhf.")} == set()
