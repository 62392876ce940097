"""What one recipe needs of the machine, and whether the things that it names are in reach.

`before_run` is the check of every run: only problems are reported.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import httpx

from sg_rlhf.config import Config, ConfigError, domain_settings, local_path
from sg_rlhf.config.checks import input_files, problems
from sg_rlhf.config.derived import topology
from sg_rlhf.data_io import model_folder
from sg_rlhf.doctor.check import FAILED, OK, SKIPPED, WARNING, Check
from sg_rlhf.doctor.checks import CPU_HOST_GIB, SLACK, Needs, check, settings_for, used
from sg_rlhf.machine.facts import Facts
from sg_rlhf.machine.gather import gather
from sg_rlhf.machine.hardware import of_machine
from sg_rlhf.machine.names import SIZES, size_of
from sg_rlhf.plan.memory import MemoryPlan
from sg_rlhf.plan.phases import DOWNLOAD, PROCESSES
from sg_rlhf.plan.run_shape import run_shape

#: Limit for an answer of the hub.
HUB_SECONDS = 5.0
#: Environment variable; 1 starts a run that the doctor would refuse.
SKIP = "SG_SKIP_DOCTOR"


def model_of(config: Config) -> tuple[str, str | None]:
    """Id or folder of the policy, and its commit, tag or branch on the hub if one is set."""
    key = "actor.model_name_or_path"
    return local_path(key, str(config.value(key) or "")), config.sg.model_revision


def for_gpus(config: Config) -> bool:
    """Whether the run uses GPUs; another one leaves those that are here alone."""
    asked = os.environ.get("SG_PLATFORM") == "cuda"
    return asked or bool(config.value("vllm.sync_backend") != "gloo")


def judge(config: Config, facts: Facts, *, cached: bool) -> tuple[Needs, list[Check]]:
    """The recipe's needs, and the check of its memory plan on a machine.

    Args:
        cached: whether the model is in the hub's cache.

    Raises:
        ConfigError: the model is a module that is not installed.
    """
    needs = Needs(
        gpus=gpus_per_node(config) if for_gpus(config) else 0,
        nodes=config.value("actor.num_nodes"),
        recipe=True,
    )
    unknown = "this model's shape is not known here"
    try:
        shape = run_shape(config)
    except ConfigError:
        raise
    except ValueError as error:  # a model of another kind
        shape, unknown = None, str(error)
    if shape is None:
        remedy = "the folder of a dense model has one"
        return needs, [Check("memory plan", SKIPPED, unknown, "config.json", remedy)]
    plan = MemoryPlan(shape, of_machine(facts, needs.nodes, gpus=used(facts, needs)))
    host, download = plan.host_gib, plan.disk.get(DOWNLOAD, 0) / 1e9
    if not needs.gpus:  # the tiny model's measured peak has its processes in it
        host = max(CPU_HOST_GIB, host - plan.host.get(PROCESSES, 0) / 2**30)
    needs = replace(
        needs,
        host_gib=host,
        download_gb=0.0 if cached else download,
        run_gb=plan.disk_gb - download,
    )
    return needs, [_memory(plan, facts, needs)] if needs.gpus else []


def gpus_per_node(config: Config) -> int:
    """GPUs per node that the recipe uses, for all models and engines."""
    return math.ceil(topology.gpus(config.value) / config.value("actor.num_nodes"))


def _memory(plan: MemoryPlan, facts: Facts, needs: Needs) -> Check:
    """Check that the peak memory of each phase fits a GPU."""
    needed = f"{plan.peak_gib:.0f} GiB a GPU, {plan.peak_phase}"
    if not facts.gpus:
        return Check("memory plan", SKIPPED, "no GPU to plan for", needed)
    has = plan.hardware.gpu_memory_gib
    found = f"{has:.0f} GiB a GPU"
    # The number of GPUs, the host and the disks have checks of their own.
    mine = [p for p in plan.problems if p.split(":")[0] not in ("GPUs", "host memory", "disk")]
    if not mine:
        tight = [remark for remark in plan.remarks if remark.startswith("tight")]
        return Check("memory plan", WARNING if tight else OK, found, needed, "; ".join(tight))
    fitting = settings_for(facts.gpus, needs)
    if fitting and size_of(facts.gpus[0].memory_mib) != max(SIZES):
        mine.append(f"{fitting} has settings for these")
    status = FAILED if plan.peak_gib > has * (1 + SLACK) else WARNING
    return Check("memory plan", status, found, needed, "; ".join(mine))


def inputs(config: Config, *, cached: bool) -> list[Check]:
    """The settings, files, servers and model of the recipe, as a run on this machine checks them.

    Raises:
        ConfigError: a file that is here would stop the run.
    """
    found = [Check("recipe", FAILED, line) for line in problems(config)]
    missing, _ = input_files.look(config)
    found += [Check("file", WARNING, "missing", remedy=line) for line in missing]
    try:
        domain_settings.check(config.sg.domains)
    except ConfigError as error:
        found.append(Check("server", WARNING, "no answer", remedy=str(error)))
    hub = model(*model_of(config), cached=cached)
    return [*found, hub] if hub else found


def cached_model(name: str, revision: str | None = None) -> Path | None:
    """The folder of a complete model in the hub's cache; None without one."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ModuleNotFoundError:
        return None
    if not model_folder.is_hub_id(name):
        return None
    config = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(config, str):
        return None
    try:
        model_folder.check(Path(config).parent, trusted=True)
    except model_folder.ModelError:
        return None
    return Path(config).parent


def model(name: str, revision: str | None = None, *, cached: bool = False) -> Check | None:
    """A model by its id: in the hub's cache, or available from the hub; None for a folder."""
    if Path(name).is_dir() or not model_folder.is_hub_id(name):
        return None
    if cached:
        return Check("model", OK, "in the hub's cache", name)
    try:
        from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_url
    except ModuleNotFoundError:
        return Check("model", SKIPPED, "huggingface_hub is not installed", name)
    instead = "actor.model_name_or_path=FOLDER"
    if constants.HF_HUB_OFFLINE:
        found = "not here, and the hub is off (HF_HUB_OFFLINE)"
        return Check("model", FAILED, found, name, f"unset it, or {instead}")
    try:
        url = hf_hub_url(name, "config.json", revision=revision)
        get_hf_file_metadata(url, timeout=HUB_SECONDS)
    except errors.GatedRepoError:
        remedy = f"accept its licence at {constants.ENDPOINT}/{name}, then HF_TOKEN=..."
        return Check("model", FAILED, "gated, and not for this token", name, remedy)
    except errors.RepositoryNotFoundError:
        found = f"not here, and not at {constants.ENDPOINT}"
        return Check("model", FAILED, found, name, "check the id; a private one needs HF_TOKEN")
    except (httpx.HTTPError, OSError) as error:
        found = f"not here, and no answer from {constants.ENDPOINT}: {str(error)[:80]}"
        remedy = f"set HF_ENDPOINT to a mirror, or https_proxy, or {instead}"
        return Check("model", FAILED, " ".join(found.split()), name, remedy)
    return Check("model", OK, "not here: a download", name)


class UnfitMachine(ValueError):
    """The run cannot work on this machine; one line per reason."""


def before_run(config: Config) -> list[str]:
    """Warnings about this machine for a run, one line each; often none.

    Raises:
        UnfitMachine: the run cannot work here.
    """
    platform = os.environ.get("SG_PLATFORM")
    if os.environ.get(SKIP) == "1" or (platform == "cpu" and for_gpus(config)):
        return []  # the latter is refused elsewhere, setting by setting, each with its remedy
    facts = gather(Path(config.sg.run_dir or "."))
    if for_gpus(config) and not facts.gpus and not facts.gpu_problem and platform != "cuda":
        return []  # as above
    cached = cached_model(*model_of(config)) is not None
    needs, more = judge(config, facts, cached=cached)
    # The run checks the recipe's files and servers itself.
    hub = model(*model_of(config), cached=cached)
    checks = [*check(facts, needs), *more, *([hub] if hub else [])]
    failed = [item.line() for item in checks if item.status == FAILED]
    if failed:
        failed[-1] += f" ({SKIP}=1 starts it all the same)"
        raise UnfitMachine("\nerror: ".join(failed))
    return [item.line() for item in checks if item.status == WARNING]
