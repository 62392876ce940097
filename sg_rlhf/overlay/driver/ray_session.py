"""Starts or joins a Ray cluster with the environment of the workers, and leaves it."""

from __future__ import annotations

import json
import os
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

from sg_rlhf.common import home, resources
from sg_rlhf.common.environment import network_variables
from sg_rlhf.config import domain_settings
from sg_rlhf.config.derived import topology
from sg_rlhf.overlay.cluster import node_check, placement
from sg_rlhf.overlay.cpu import platform
from sg_rlhf.overlay.fork_server import client as fork_server
from sg_rlhf.overlay.patches.table import WORKER_SETUP_HOOK
from sg_rlhf.overlay.reporting import activity
from sg_rlhf.overlay.reporting.terminal import keep_worker_logs
from sg_rlhf.overlay.settings import worker_settings
from sg_rlhf.overlay.settings.lookup import value_of
from sg_rlhf.overlay.settings.worker_settings import WorkerSettings
from sg_rlhf.ray_session import cluster
from sg_rlhf.sampling import vllm_settings


def accelerators_needed(args: Namespace) -> int:
    """The number of GPUs in all placement groups of a run (logical GPUs without CUDA)."""
    return topology.gpus(value_of(args))


def connect(args: Namespace, workers: fork_server.ForkServer | None = None) -> bool:
    """Join the cluster at ``RAY_ADDRESS`` (``ray job submit`` sets it), or start a local one.

    Raises ClusterError: there is none, or the local one has too few accelerators or CPUs.
    """
    needed = accelerators_needed(args)
    on_cpu = platform.is_cpu()
    # The driver loads tokenizers too.
    os.environ[worker_settings.VARIABLE] = WorkerSettings.from_args(args).to_json()
    runtime: dict[str, Any] = {
        "env_vars": worker_variables(args, on_cpu),
        "worker_process_setup_hook": WORKER_SETUP_HOOK,
    }
    if workers is not None:
        runtime["py_executable"] = shlex.quote(str(workers.python))
        runtime["env_vars"][fork_server.PYTHON_VARIABLE] = str(workers.python)
    options: dict[str, Any] = {
        "runtime_env": runtime,
        "log_to_driver": bool(args.sg.verbose),
        "logging_level": "info" if args.sg.verbose else "warning",
    }
    local = "RAY_ADDRESS" not in os.environ
    if local:
        if on_cpu:
            if resources.visible_gpus() == []:
                # Ray refuses logical GPUs where the variable names none.
                del os.environ["CUDA_VISIBLE_DEVICES"]
            options |= {
                "num_gpus": needed,
                "num_cpus": needed + topology.CONTROLLER_CPUS,
                "object_store_memory": 512 * 2**20,
            }
        cluster.start(**options)
        _check_resources(needed, on_cpu)
        return True
    cluster.join(os.environ["RAY_ADDRESS"], **options)
    return False


def reserve_placement(args: Namespace, local: bool) -> placement.Placement:
    """Reserve the resources of the run; on a joined cluster, check the nodes as well.

    Raises NotEnoughMachines, or ClusterError for nodes that differ from the driver.
    """
    what = "CPUs" if platform.is_cpu() else "GPUs and CPUs"
    where = "" if local else " on the cluster"
    with activity.phase(activity.DRIVER, f"{activity.RESERVING} {what}{where}"):
        reserved = placement.reserve(
            topology.groups(value_of(args)),
            placement.WAIT_SECONDS,
            say=lambda text: activity.show_message(activity.DRIVER, text),
            hint=_what_to_start(accelerators_needed(args), platform.is_cpu()),
        )
    if not local:
        with activity.phase(activity.DRIVER, "comparing the machines' packages"):
            node_check.check_nodes(
                reserved.nodes(), Path(args.sg.run_dir) if args.sg.run_dir else None
            )
    return reserved


def worker_variables(args: Namespace, on_cpu: bool) -> dict[str, str]:
    """The environment variables of every worker of this run.

    Without those of the submitted job's own runtime environment: Ray refuses one that both have.
    """
    variables = {
        "TOKENIZERS_PARALLELISM": os.environ.get("TOKENIZERS_PARALLELISM", "true"),
        "NCCL_DEBUG": "WARN",
        "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": os.environ.get(
            "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS", "1"
        ),
    }
    variables |= network_variables()
    variables[worker_settings.VARIABLE] = WorkerSettings.from_args(args).to_json()
    # A worker without a GPU must not conclude that the run is without CUDA.
    variables[platform.PLATFORM_VARIABLE] = "cpu" if on_cpu else "cuda"
    variables |= domain_settings.worker_variables(args.sg.domains)
    if on_cpu:
        variables |= platform.environment()
    else:
        variables |= vllm_settings.cuda_variables()
        # DeepSpeed would refuse CUDA toolkits from 13.1 on: see config.checks.cuda_toolkit.
        variables["DS_SKIP_CUDA_CHECK"] = os.environ.get("DS_SKIP_CUDA_CHECK", "1")
    if home.replaced():  # on other machines too
        variables |= {"HOME": home.replaced(), home.VARIABLE: home.replaced()}
    job = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR) or "{}")
    from_job = (job.get("runtime_env") or {}).get("env_vars") or {}
    return {name: value for name, value in variables.items() if name not in from_job}


def _check_resources(needed: int, on_cpu: bool) -> None:
    total = ray.cluster_resources()
    for name, count in (("GPU", needed), ("CPU", needed + topology.CONTROLLER_CPUS)):
        if total.get(name, 0) < count:
            raise cluster.ClusterError(
                f"the Ray cluster has {total.get(name, 0):g} {name}, "
                f"but this run needs {count}: {_what_to_start(needed, on_cpu)}"
            )


def _what_to_start(needed: int, on_cpu: bool) -> str:
    if on_cpu:
        cpus = needed + topology.CONTROLLER_CPUS
        return (
            f"start machines with `ray start --num-gpus N --num-cpus N` so that they have {needed} "
            f"GPU and {cpus} CPU together (logical GPUs: nothing is reserved)"
        )
    return "start more machines, or lower actor.num_gpus_per_node and vllm.num_engines"


def shut_down(
    local: bool, run_dir: str | None, workers: fork_server.ForkServer | None = None
) -> None:
    """Disconnect from Ray. End a local cluster and every process that this one started."""
    children = psutil.Process().children(recursive=True) if local else []
    if local and run_dir and ray.is_initialized():
        session = Path(ray._private.worker._global_node.get_session_dir_path())
        try:
            keep_worker_logs(session, Path(run_dir))
        except OSError as error:  # a full disk must not hide why the run ended
            print(f"the workers' logs stay in {session}: {error}")
    ray.shutdown()
    if workers is not None:
        workers.close()
    cluster.kill_all(children, grace_seconds=10.0)
