"""The stages: what each one shows, what it needs, how long it may take."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

#: The oldest PyTorch whose wheel has ``torch.nn.attention.varlen`` with a causal window.
OLDEST_TORCH = (2, 11)
#: How each package that a stage may lack is installed where there is no ``.venv``.
HOW = {
    "torch": "pip install 'torch>=2.11'",
    "transformers": "pip install 'transformers>=5'",
    "deepspeed": "pip install deepspeed==0.19.8",
    "wrapt": "pip install wrapt",
}
FROM_BOOTSTRAP = "scripts/bootstrap.sh installs it"


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        key: the letter on the command line.
        name: the first part of the result's file name, after the key.
        title: one line, for the terminal and the table.
        needs: packages that must be there; the others a part of it may miss and says so.
        limit: seconds after which it is ended.
        module: has ``run(record, job)``.
    """

    key: str
    name: str
    title: str
    needs: tuple[str, ...]
    limit: int
    module: str

    def missing(self) -> str | None:
        """Why it cannot run with what is installed, or None."""
        for package in self.needs:
            if importlib.util.find_spec(package) is None:
                how = HOW.get(package, FROM_BOOTSTRAP)
                return f"needs {package}, which is not installed: {how}"
        found = metadata.version("torch")
        if tuple(map(int, re.findall(r"\d+", found)[:2])) < OLDEST_TORCH:
            return f"needs torch {'.'.join(map(str, OLDEST_TORCH))} or later, found {found}"
        return None


_PIPELINE = ("torch", "transformers", "deepspeed", "ray", "vllm", "openrlhf")
STAGES = (
    Stage(
        "a",
        "algo",
        "losses, weights and KL on CUDA equal the CPU; the host never waits",
        ("torch",),
        240,
        "tests.gpu.algo",
    ),
    Stage(
        "b",
        "attention_head",
        "packed attention and log-probs without logits: values, memory, time",
        ("torch",),
        280,
        "tests.gpu.attention_and_head",
    ),
    Stage(
        "c",
        "zero3",
        "DeepSpeed ZeRO-3: step, offload, save, load, resume, NaN watch, rotary",
        ("torch", "transformers", "deepspeed", "wrapt"),
        290,
        "tests.gpu.zero3",
    ),
    Stage(
        "d",
        "ipc",
        "434 weights from one process to another over CUDA IPC, bit for bit",
        ("torch",),
        180,
        "tests.gpu.ipc",
    ),
    Stage(
        "e",
        "pipeline",
        "the whole pipeline: a random Qwen2 of 0.5B, 3 rollouts, each sync checked",
        _PIPELINE,
        480,
        "tests.gpu.random_pipeline",
    ),
    Stage(
        "f",
        "recipe_3b",
        "the 3B recipe for 3 rollouts, batches and responses cut to fit the time",
        _PIPELINE,
        900,
        "tests.gpu.recipe_3b",
    ),
    Stage(
        "g",
        "tiny_run",
        "the shipped tiny model learns Knights & Knaves: held-out accuracy rises",
        _PIPELINE,
        300,
        "tests.gpu.tiny_run",
    ),
    Stage(
        "h",
        "memory",
        "a rank of the recipes for 8, 4 and 1 GPUs: memory beside the plan, waits",
        _PIPELINE,
        600,
        "tests.gpu.memory_peaks",
    ),
)
BY_KEY = {stage.key: stage for stage in STAGES}


def chosen(keys: Iterable[str]) -> list[Stage]:
    """The stages of these letters, in the table's order; all of them for none.

    Raises:
        ValueError: no such stage.
    """
    keys = list(keys)
    for key in keys:
        if key not in BY_KEY:
            raise ValueError(f"stage {key!r}: expected one of {', '.join(BY_KEY)}")
    return [stage for stage in STAGES if not keys or stage.key in keys]


def table() -> str:
    """The table of docs/gpu.md."""
    lines = ["| stage | shows | needs | at most | result |", "|---|---|---|---|---|"]
    for stage in STAGES:
        needs = "the full environment" if stage.needs == _PIPELINE else ", ".join(stage.needs)
        if stage.key == "f":
            needs += ", the model"
        lines.append(
            f"| {stage.key} | {stage.title} | {needs} | {stage.limit / 60:.0f} min "
            f"| `{stage.key}_{stage.name}_<gpu>.json` |"
        )
    return "\n".join(lines)
