"""A recipe's run as a scheduler needs it: machines, memory, disk, the command, and the job file."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

import sg_rlhf
from sg_rlhf.common.environment import versions
from sg_rlhf.common.redaction import redact_argv
from sg_rlhf.config import Config, ConfigError, builtin_recipes
from sg_rlhf.config.derived import topology
from sg_rlhf.launch import data_commands
from sg_rlhf.machine.hardware import of_gpus
from sg_rlhf.machine.names import BY_SIZE, parse
from sg_rlhf.plan.of_recipe import plan_of

#: GPUs of a machine, at most, where models or engines have GPUs apart from the policy's.
GPUS_OF_A_NODE = 8
#: Cores per GPU: its training process, its engine, their data and compiler threads.
CORES_PER_GPU = 8
#: Cores for Ray's own processes and the controller.
CORES_BESIDE = 4
#: Host memory and disk where the model's size is not known: what a 7B recipe takes, rounded up.
MEMORY_GIB_PER_GPU, DISK_GB = 64, 1000
#: On top of the plan's figures, as a job that requests too little is killed.
MARGIN = 1.25
#: Disk for packages, the checkout and compilers' caches.
PACKAGES_GB = 50
#: Share of the memory: Ray's object store takes 30 % of it, NCCL a little.
SHARED_MEMORY = 0.35
#: KubeRay adds suffixes to the job's name and refuses a longer one.
LONGEST_NAME = 47

#: Kind -> its template.
TEMPLATES = {"sbatch": "job.sbatch", "kuberay": "rayjob.yaml", "skypilot": "skypilot.yaml"}
#: Option -> the kinds of job file that use it.
USED_BY = {
    "image": tuple(TEMPLATES),
    "time": ("sbatch", "kuberay"),
    "partition": ("sbatch",),
    "account": ("sbatch",),
}

#: GPU types to request from a cloud, by memory in GB.
CLOUD_GPUS = {
    24: ("L4", "A10G", "RTX4090"),
    40: ("A100", "L40S"),
    80: ("H100", "H200", "A100-80GB"),
}


class LaunchError(ValueError):
    """Options that do not go together; the message is one line for the user."""


@dataclass(frozen=True)
class Options:
    """The options, "" where not given; ``kind`` is a key of :data:`TEMPLATES`."""

    kind: str
    image: str = ""
    time: str = ""
    partition: str = ""
    account: str = ""

    @property
    def seconds(self) -> int | None:
        """The time in seconds; None without."""
        if not self.time:
            return None
        days, _, clock = self.time.rpartition("-")
        hours, minutes, seconds = map(int, clock.split(":"))
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds

    def words(self) -> list[str]:
        """The same options as command-line words."""
        given = [(name, getattr(self, name)) for name in USED_BY]
        return [w for k, v in given if v for w in (f"--{k}", v)]


def job_file(
    config: Config, *, configs: Sequence[str], overrides: Sequence[str], options: Options
) -> str:
    """The job file of a recipe.

    Args:
        config: the recipe, with its run directory.
        configs: its files as they were given, as ``overrides`` are.

    Raises:
        LaunchError: an override holds a secret.
    """
    pairs = zip(overrides, redact_argv(overrides), strict=True)
    secret = next((given for given, shown in pairs if given != shown), "")
    if secret:
        raise LaunchError(
            f"{secret.partition('=')[0]}: a job file is no place for a secret; set it in the job's "
            "environment (WANDB_API_KEY, HF_TOKEN) or in a recipe that only the job can read"
        )
    on_cpu = config.value("vllm.sync_backend") == "gloo"
    nodes, ranks = machines(config)
    size = gpu_memory(config)
    memory, disk, estimate = resources(config, size, nodes, ranks)
    assert config.sg.run_dir is not None
    run_dir = Path(config.sg.run_dir)
    where = relative(run_dir)
    recipe = [*builtin_recipes.words(configs), "--run-dir", where, *overrides]
    shown = ["sg-rlhf", "launch", options.kind, *recipe, *options.words()]
    gpus = 0 if on_cpu else ranks
    image = options.image
    if options.kind == "kuberay" and not image:  # Kubernetes needs one: that of our Dockerfiles
        image = f"sg-rlhf:{sg_rlhf.__version__}-{'cpu' if on_cpu else 'cuda'}"
    job = {
        "name": name_of(run_dir.name),
        "recipe": ", ".join(configs),
        "machines": _in_words(nodes, gpus),
        "printed_by": " ".join(shlex.join(shown).split()),
        # In the folder that the recipe's paths start from.
        "command": shlex.join(["sg-rlhf", "train", *recipe]),
        "data": data_commands.command_for(config),  # "" if the user must make it
        "files": data_commands.local_data(config),
        "run_dir": where,
        # The file that names the latest checkpoint.
        "checkpoint": f"{relative(Path(config.value('ckpt.path')))}/_actor/latest",
        "nodes": nodes,
        "gpus": gpus,  # of each node, as the next ones
        "ranks": ranks,  # GPUs as Ray counts them; without GPUs they are processes
        "gpu_types": () if on_cpu else CLOUD_GPUS[size],
        "cpus": CORES_BESIDE + (1 if on_cpu else CORES_PER_GPU) * ranks,
        "memory_gib": memory,  # with what is in /dev/shm
        "shared_memory_gib": max(1, math.ceil(SHARED_MEMORY * memory)),
        "disk_gb": disk,
        "estimate": estimate,
        "ray_version": versions(["ray"]).get("ray", ""),
        "image": image,
        "options": options,
    }
    environment = Environment(
        loader=PackageLoader("sg_rlhf.launch"),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["shell"] = shlex.quote
    environment.filters["quoted"] = json.dumps  # a JSON string is one of YAML too
    return environment.get_template(TEMPLATES[options.kind]).render(job=job)


def _in_words(nodes: int, gpus: int) -> str:
    machines = "one machine" if nodes == 1 else f"{nodes} machines"
    if not gpus:
        return f"{machines} without a GPU"
    count = "one GPU" if gpus == 1 else f"{gpus} GPUs"
    return f"{machines} with {count}{' each' if nodes > 1 else ''}"


def machines(config: Config) -> tuple[int, int]:
    """(machines, GPUs of each): the policy's, or as few of up to eight GPUs as all models need."""
    actors, each = config.value("actor.num_nodes"), config.value("actor.num_gpus_per_node")
    total = topology.gpus(config.value)
    if total == actors * each:
        return actors, each
    nodes = max(actors, math.ceil(total / GPUS_OF_A_NODE))
    return nodes, math.ceil(total / nodes)


def resources(config: Config, size: int, nodes: int, ranks: int) -> tuple[int, int, str]:
    """Host memory of a machine in GiB, disk in GB, by the plan with a margin; a line on the time.

    ``size`` is the memory of a GPU in GB, and each of the machines has ``ranks`` GPUs.
    """
    hardware = of_gpus(BY_SIZE[size], nodes=nodes, gpus_per_node=ranks)
    try:
        plan = plan_of(config, hardware=hardware)
    except ConfigError:
        raise
    except ValueError:  # a model of another kind
        plan = None
    if plan is None:
        return MEMORY_GIB_PER_GPU * ranks, DISK_GB, ""
    memory = _round_up(MARGIN * plan.memory.host_gib, 16)
    disk = _round_up(MARGIN * plan.memory.disk_gb + PACKAGES_GB, 50)
    return memory, disk, plan.time.line() if plan.time else ""


def _round_up(amount: float, step: int) -> int:
    return step * math.ceil(amount / step)


def gpu_memory(config: Config) -> int:
    """Memory in GB of the GPUs of the recipe's hardware: 24, 40 or 80; 80 without one."""
    return (parse(config.hardware).size if config.hardware else 0) or 80


def name_of(text: str) -> str:
    """``text`` as a name that every scheduler takes (a DNS label of at most 47 characters)."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:LONGEST_NAME].strip("-")
    return name if name[:1].isalpha() else f"run-{name}"[:LONGEST_NAME].strip("-")


def relative(path: Path) -> str:
    """``path`` as seen from here if it is below, else absolute."""
    given, here = os.path.abspath(path), os.getcwd()
    return os.path.relpath(given) if given.startswith(here + os.sep) else given
