"""torch's fused Adam under DeepSpeed's optimizers: the formula, and DeepSpeed's own results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sg_rlhf.overlay.model import adam

LR, BETAS, EPS, DECAY = 0.05, (0.9, 0.95), 1e-8, 0.1


def formula(
    parameter: torch.Tensor, gradients: list[torch.Tensor], decoupled: bool
) -> torch.Tensor:
    """Adam in float64, step by step (arXiv 1412.6980, 1711.05101)."""
    p = parameter.double()
    first, second = torch.zeros_like(p), torch.zeros_like(p)
    for step, gradient in enumerate(gradients, 1):
        g = gradient.double() if decoupled else gradient.double() + DECAY * p
        first = BETAS[0] * first + (1 - BETAS[0]) * g
        second = BETAS[1] * second + (1 - BETAS[1]) * g**2
        direction = first / (1 - BETAS[0] ** step)
        direction = direction / ((second / (1 - BETAS[1] ** step)).sqrt() + EPS)
        p = p - LR * (direction + (DECAY * p if decoupled else 0.0))
    return p


@pytest.mark.parametrize("decoupled", [True, False])
def test_both_kernels_compute_the_formula(decoupled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(size, generator=generator) for size in (7, 1000)]
    gradients = [[torch.randn(len(x), generator=generator) for _ in range(6)] for x in start]
    expected = [formula(x, of, decoupled).float() for x, of in zip(start, gradients, strict=True)]

    fused, of_cpu = adam.FusedAdamBuilder().load(), adam.CPUAdamBuilder().load()
    of_cpu.create_adam(3, LR, *BETAS, EPS, DECAY, decoupled, True)
    for one_by_one in (False, True):
        values = [x.clone() for x in start]
        first, second = ([torch.zeros_like(x) for x in start] for _ in range(2))
        for step in range(1, 7):
            now = [of[step - 1] for of in gradients]
            settings = (LR, *BETAS, EPS)
            if one_by_one:
                for each in zip(values, now, first, second, strict=True):
                    of_cpu.adam_update(3, step, *settings, DECAY, True, *each)
            else:
                lists = [now, values, first, second]
                fused.multi_tensor_adam(
                    2048, None, lists, *settings, step, int(decoupled), 1, DECAY
                )
        for value, wanted in zip(values, expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)
    of_cpu.destroy_adam(3)
    assert of_cpu.decoupled == {}


def test_what_the_kernel_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match="bias_correction=false"):
        adam.FusedAdamBuilder().multi_tensor_adam(
            1, None, [[], [], [], []], LR, *BETAS, EPS, 1, 1, 0, DECAY
        )


TRAINED = """
import json, sys
from sg_rlhf.overlay.patches import table as register
register.install()
import deepspeed, torch
from deepspeed.ops.adam import fused_adam, cpu_adam
deepspeed.init_distributed("gloo", auto_mpi_discovery=False, init_method="file://" + sys.argv[1],
                           rank=0, world_size=1)

def train(offload):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW",
                      "params": {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": offload}},
    })
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        engine.backward(engine(torch.randn(4, 16, generator=generator).bfloat16()).square().sum())
        engine.step()
    inner = optimizer.optimizer
    states = [sorted(state) for state in inner.state.values()]
    weights = torch.cat([x.flatten() for x in optimizer.fp32_partitioned_groups_flat])
    groups = [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups]
    return type(inner).__name__, states, groups, weights

own = train("none")
assert not own[3].isnan().any() and own[3].std() > 0.05
for patch in register.PATCHES:
    if patch.replacement.startswith("sg_rlhf.overlay.model.adam:"):
        register.apply_at_import([patch._replace(when=lambda: True)])
ours, offloaded = train("none"), train("cpu")
print(json.dumps({
    "kernels": [fused_adam.FusedAdamBuilder.__module__, cpu_adam.CPUAdamBuilder.__module__],
    "same class, states and groups": own[:3] == ours[:3],
    "states": [own[1], offloaded[1]],
    "classes": [own[0], offloaded[0]],
    "off": [(own[3] - other[3]).abs().max().item() for other in (ours, offloaded)],
}))
"""


def test_zero_3_trains_with_them_as_with_deepspeeds_own(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRAINED, str(tmp_path / "rendezvous")],
        env={**os.environ, "SG_PLATFORM": "cpu", "LOCAL_RANK": "0"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["kernels"] == ["sg_rlhf.overlay.model.adam"] * 2
    assert seen["same class, states and groups"] is True
    assert seen["classes"] == ["FusedAdam", "DeepSpeedCPUAdam"]
    assert seen["states"] == [[["exp_avg", "exp_avg_sq", "step"]]] * 2
    assert max(seen["off"]) < 1e-6, seen
