"""DeepSpeed trains with torch's fused Adam, and a resumed run takes the same steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sg_rlhf.overlay.model import adam

TRAIN = """
import json, sys
from sg_rlhf.overlay.patches import table
table.install()
import deepspeed, torch
from openrlhf.utils.deepspeed import deepspeed as upstream
from sg_rlhf.overlay.model import adam

folder = sys.argv[1]
deepspeed.init_distributed("gloo", auto_mpi_discovery=False, init_method=f"file://{folder}/store",
                           rank=0, world_size=1)
PARAMS = {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}

def train(stage, offload, steps, save=None, load=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    config = upstream.get_train_ds_config(
        offload=False, adam_offload=offload, stage=stage, zpg=1,
        optim_config=adam.by_torch({"type": "AdamW", "params": PARAMS}),
    )
    config["zero_optimization"] = {
        "stage": stage, "offload_optimizer": config["zero_optimization"]["offload_optimizer"],
    }
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(),
        config=config | {"train_micro_batch_size_per_gpu": 4})
    if load:
        engine.load_checkpoint(load)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        engine.backward(engine(torch.randn(4, 16, generator=generator).bfloat16()).square().sum())
        engine.step()
    if save:
        engine.save_checkpoint(save)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        weights = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    inner = optimizer.optimizer
    return weights, [type(inner).__name__, inner.param_groups[0]["fused"]]

for stage in (2, 3):
    for offload in (False, True):
        saved = f"{folder}/{stage}{offload}"
        whole, optimizer = train(stage, offload, range(4))
        half, _ = train(stage, offload, range(2), save=saved)
        resumed, _ = train(stage, offload, range(2, 4), load=saved)
        print(json.dumps([stage, offload, *optimizer,
                          torch.equal(resumed, whole), torch.equal(half, whole)]))
print(json.dumps(sorted(PARAMS)))
"""


@pytest.mark.full
def test_a_resumed_optimizer_takes_the_same_steps(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRAIN, str(tmp_path)],
        env={**os.environ, "SG_PLATFORM": "cpu", "LOCAL_RANK": "0"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *rows, params = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "["]
    assert rows == [
        [stage, offload, "AdamW", True, True, False]
        for stage in (2, 3)
        for offload in (False, True)
    ]
    assert params == ["betas", "eps", "lr", "weight_decay"]  # upstream's own dict stays as it is


@pytest.mark.parametrize(
    ("platform", "parameters", "before", "threads"),
    [
        ("cuda", 1_000, 1, 3),
        ("cpu", 135_000_000, 1, 3),
        ("cpu", 860_000, 1, 1),  # small products gain nothing
        ("cpu", 135_000_000, 2, 2),  # what the user exported
    ],
)
def test_a_rank_takes_its_share_of_the_cores(
    platform: str, parameters: int, before: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SG_PLATFORM", platform)
    monkeypatch.setattr(adam.resources, "cores", lambda: 13)
    original = torch.get_num_threads()
    torch.set_num_threads(before)
    try:
        adam.use_host_threads(4, parameters)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(original)
