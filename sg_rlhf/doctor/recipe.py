"""What one recipe needs of the machine: out of its keys, and out of its memory plan.

Needs the packages that read recipes (pydantic, omegaconf) and Python 3.11.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sg_rlhf.config import Config, ConfigError, load_config, local_path, run_paths, topology
from sg_rlhf.config.checks import problems
from sg_rlhf.config.run_paths import local_data
from sg_rlhf.doctor.check import FAILED, OK, SKIPPED, WARNING, Check
from sg_rlhf.doctor.facts import Facts
from sg_rlhf.doctor.gather import Wanted
from sg_rlhf.doctor.gpu_checks import settings_for, used
from sg_rlhf.doctor.host_checks import CPU_HOST_GIB, SLACK
from sg_rlhf.doctor.needs import Needs
from sg_rlhf.machine.hardware import Hardware, of_machine
from sg_rlhf.machine.names import SIZES, size_of
from sg_rlhf.plan.memory import MemoryPlan, memory_plan
from sg_rlhf.plan.run_shape import run_shape

#: Line of the plan that goes to the hub's cache and not to the run directory.
DOWNLOAD = "the model's download"
#: Line of the plan with the memory of every process without a model.
PROCESSES = "Python processes"


@dataclass(frozen=True)
class Recipe:
    """A recipe and its run directory.

    Attributes:
        without_gpus: the run will not use GPUs, even if there are some.
    """

    config: Config
    run_dir: Path
    without_gpus: bool

    @property
    def model(self) -> str:
        """Id or folder of the policy."""
        key = "actor.model_name_or_path"
        return local_path(key, str(self.config.value(key) or ""))

    @property
    def retriever(self) -> str:
        """URL of the retriever; "" for a recipe without an agent."""
        if not self.config.value("train.agent_func_path"):
            return ""
        found: list[Any] = [getattr(s, "url", "") for s in self.config.sg.domains.values()]
        return next((str(url) for url in found if url), "")

    def wanted(self, **more: Any) -> Wanted:
        """What to look for on the machine."""
        return Wanted(
            run_dir=self.run_dir,
            models=(self.model,) if self.model else (),
            data=local_data(self.config),
            retriever=self.retriever or None,
            wandb_key=bool(self.config.value("logger.wandb.key")),
            **more,
        )


def load(files: Sequence[str], overrides: Sequence[str], run_dir: str | None) -> Recipe:
    """Load a recipe as `sg_rlhf.train` does.

    Raises:
        ConfigError: one line naming the file, the key, the value and what was expected.
    """
    config = load_config(files, tuple(overrides))
    without = config.value("vllm.sync_backend") == "gloo"
    return Recipe(config, run_paths.run_dir_of(run_dir, files, config), without)


def judge(recipe: Recipe, facts: Facts) -> tuple[Needs, list[Check]]:
    """The recipe's needs, and the checks of its settings and its memory plan on this machine.

    Raises:
        ConfigError: the model is a module that is not installed.
    """
    value, without = recipe.config.value, recipe.without_gpus
    needs = Needs(
        gpus=0 if without else gpus_per_node(recipe.config),
        nodes=value("actor.num_nodes") or 1,
        recipe=True,
        nvcc_for="" if without else _to_compile(recipe.config, facts),
        model=recipe.model,
        data=local_data(recipe.config),
        retriever=recipe.retriever,
    )
    needed = "settings that go together"
    refused = [Check("recipe", FAILED, line, needed) for line in problems(recipe.config)]
    unknown = "this model's shape is not known here"
    try:
        shape = run_shape(recipe.config)
    except ConfigError:
        raise
    except ValueError as error:  # a model of another kind
        shape, unknown = None, str(error)
    if shape is None:
        remedy = "the folder of a dense model has one"
        return needs, [*refused, Check("memory plan", SKIPPED, unknown, "config.json", remedy)]
    plan = memory_plan(shape, _hardware(facts, needs))
    if needs.gpus:
        host = plan.host_gib
    else:  # what a run of the small model was measured to take has its processes in it
        host = max(CPU_HOST_GIB, plan.host_gib - plan.host.get(PROCESSES, 0) / 2**30)
    needs = replace(
        needs,
        host_gib=host,
        gated=shape.model.gated,
        model_gb=plan.disk.get(DOWNLOAD, 0) / 1e9,
        run_gb=plan.disk_gb - plan.disk.get(DOWNLOAD, 0) / 1e9,
    )
    return needs, [*refused, *([_memory(plan, facts, needs)] if needs.gpus else [])]


def _to_compile(config: Config, facts: Facts) -> str:
    """Name of flash-attn if the recipe needs it and it is not installed: it is compiled."""
    if facts.flash_attn:
        return ""
    if config.value("ds.attn_implementation") == "flash_attention_2":
        return "flash-attn (ds.attn_implementation)"
    return "flash-attn (ds.ring_attn_size)" if (config.value("ds.ring_attn_size") or 1) > 1 else ""


def gpus_per_node(config: Config) -> int:
    """GPUs per node that the recipe uses, for all models and engines."""
    return math.ceil(topology.gpus(config.value) / (config.value("actor.num_nodes") or 1))


def _hardware(facts: Facts, needs: Needs) -> Hardware:
    """The machine as input of the plan. Disks are checked separately, by file system."""
    gpus = used(facts, needs)
    return of_machine(
        [gpu.name for gpu in gpus],
        [gpu.memory_mib for gpu in gpus],
        nvlink=facts.nvlink == "all",
        host_memory_gib=facts.memory_gib or float("inf"),
        nodes=needs.nodes,
    )


def _memory(plan: MemoryPlan, facts: Facts, needs: Needs) -> Check:
    """Check that the peak memory of each phase fits a GPU."""
    least = f"{plan.peak_gib:.0f} GiB a GPU"
    if not facts.gpus:
        return Check("memory plan", SKIPPED, "no GPU to plan for", f"{least} ({plan.peak_phase})")
    has = plan.hardware.gpu_memory_gib
    found = f"{has:.0f} GiB a GPU"
    needed = f"{plan.peak_gib:.0f} GiB, {plan.peak_phase}"
    # The number of GPUs, the host and the disks have checks of their own.
    mine = [p for p in plan.problems if p.split(":")[0] not in ("GPUs", "host memory", "disk")]
    if not mine:
        tight = [remark for remark in plan.remarks if remark.startswith("tight")]
        return Check("memory plan", WARNING if tight else OK, found, needed, "; ".join(tight))
    name = settings_for(facts.gpus, needs)
    if name and size_of(facts.gpus[0].memory_mib) != max(SIZES):
        mine.append(f"{name} has settings for these")
    status = FAILED if plan.peak_gib > has * (1 + SLACK) else WARNING
    return Check("memory plan", status, found, needed, "; ".join(mine))
