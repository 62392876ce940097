"""Gather the facts of this machine within a time limit."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from sg_rlhf.common import resources
from sg_rlhf.doctor import host, network
from sg_rlhf.doctor.facts import ABSENT, Facts
from sg_rlhf.machine import gpus

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parents[2]
#: Ports of `ray start --head`: the cluster and its dashboard.
RAY_PORTS = (6379, 8265)


@dataclass(frozen=True)
class Wanted:
    """What to look for beyond the machine itself.

    Attributes:
        run_dir: where a run would write.
        models: ids of the hub or folders.
        data: files that the recipe reads.
        retriever: ``sg.search.url``, if the recipe searches.
        wandb_key: whether the recipe has one.
        hub: test the connection to the hub, unless all models are on this machine.
        seconds: time limit for all probes.
    """

    run_dir: Path = field(default_factory=lambda: Path("runs"))
    models: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    retriever: str | None = None
    wandb_key: bool = False
    hub: bool = True
    seconds: float = 10.0


def environment_folder() -> Path:
    """Folder of the environment, installed or not: ``.venv`` of a checkout."""
    return ROOT / ".venv" if (ROOT / "scripts" / "bootstrap.sh").is_file() else Path(sys.prefix)


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def gather(wanted: Wanted, environment: Mapping[str, str] | None = None) -> Facts:
    """The facts of this machine. A missing part is a fact and never an error."""
    variables = dict(os.environ if environment is None else environment)
    deadline = time.monotonic() + wanted.seconds
    cache = network.hub_cache(variables)
    models = network.models_here(wanted.models, cache)
    # The probes run in parallel; their answers are read below.
    smi = gpus.NvidiaSmi(variables, wanted.seconds)
    nvcc, compiler = host.Nvcc(variables), host.Compiler(variables)
    python = host.Python311(variables)
    needed = not models or ABSENT in models.values()
    hub = network.HubProbe(variables, wanted.hub and needed, wanted.seconds)
    retriever = None
    if wanted.retriever:
        retriever = network.RetrieverProbe(wanted.retriever, variables, wanted.seconds)
    folder = environment_folder()
    return Facts(
        host_memory_gib=host.memory_gib(),
        cgroup_memory_gib=host.cgroup_memory_gib(),
        dev_shm_mib=host.dev_shm_mib(),
        disks=host.disks({"environment": folder, "run": wanted.run_dir, "models": cache}),
        ulimit_nofile=host.open_files(),
        cores=resources.cores(),
        ports_in_use=network.ports_in_use(RAY_PORTS),
        flash_attn=_is_installed("flash-attn"),
        written_gb=host.size_gb(wanted.run_dir),
        installed=(folder / ".sg_stamp").is_file() or _is_installed("ray"),
        models=models,
        data={name: Path(name).is_file() for name in wanted.data},
        wandb=network.wandb(variables, wanted.wandb_key),
        container=host.container(variables),
        slurm="SLURM_JOB_ID" in variables,
        ray_address=variables.get("RAY_ADDRESS"),
        **smi.facts(),
        cuda_toolkit=nvcc.release(deadline),
        compiler=compiler.found(deadline),
        python=python.facts(deadline),
        hub=hub.facts(deadline),
        retriever=retriever.who(deadline) if retriever else None,
    )
