"""Reserves the GPUs and CPUs of a run on a shared cluster, and starts its actors there.

Upstream creates one placement group after the other and waits for each without limit and without a
message. A model with one GPU per node gets no group at all. On a joined cluster, :func:`reserve`
creates all groups first. So an autoscaler sees the whole demand, the user reads which resources are
missing, and no other job can take a part. Upstream then gets these groups from
:func:`placement_group`.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
from ray.util.placement_group import placement_group as create
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sg_rlhf.config.derived.topology import Group
from sg_rlhf.overlay.reporting.errors import RunStopped

#: The resources of one process of a model, or of one worker of an engine.
BUNDLE = {"GPU": 1.0, "CPU": 1.0}
#: The resources of the controller. Its bundle is the last one of the first group.
CONTROLLER_BUNDLE = {"CPU": 1.0}
#: Seconds between two messages of a run that waits.
MESSAGE_SECONDS = 60.0
#: Seconds that a run which joins a cluster waits for its resources.
WAIT_SECONDS = 1800.0
#: Seconds before the first message. Ray needs a moment to give free resources, too.
FIRST_MESSAGE_SECONDS = 3.0
#: Seconds between two looks at the groups.
POLL_SECONDS = 0.5


class NotEnoughMachines(RunStopped):
    """The cluster did not have the resources in time."""


@dataclass(frozen=True)
class Node:
    """A node of the cluster.

    Attributes:
        address: in the network of the cluster.
        total: its resources, by Ray's names.
        free: its resources that nobody uses now.
    """

    address: str
    total: Mapping[str, float] = field(default_factory=dict)
    free: Mapping[str, float] = field(default_factory=dict)


def bundles(index: int, wanted: Sequence[Group]) -> list[dict[str, float]]:
    """The bundles of group ``index``. The first group also has the controller's bundle."""
    return [dict(BUNDLE)] * wanted[index].size + [dict(CONTROLLER_BUNDLE)] * (index == 0)


# -- waiting -----------------------------------------------------------------------------------


class Reservation:
    """The placement groups that a run has reserved.

    Args:
        groups: in upstream's order.
        wanted: the use of each group.
    """

    def __init__(self, groups: Sequence[PlacementGroup], wanted: Sequence[Group]) -> None:
        self._remaining = list(zip(groups, wanted, strict=True))
        self.groups = list(groups)

    def nodes(self) -> list[str]:
        """Ray's ids of the nodes with a bundle of the run."""
        ids: dict[str, None] = {}
        for group in self.groups:
            ids |= dict.fromkeys(placement_group_table(group)["bundles_to_node_id"].values())
        return list(ids)

    def pop(self, size: int) -> PlacementGroup | None:
        """The next group if it has this many bundles for upstream, else None."""
        if not self._remaining or self._remaining[0][1].size != size:
            return None
        return self._remaining.pop(0)[0]


#: The reservation of this process's run.
_reserved: Reservation | None = None


def reserve(
    wanted: Sequence[Group],
    seconds: float,
    say: Callable[[str], None],
    hint: str = "",
    every: float = MESSAGE_SECONDS,
) -> Reservation:
    """Create all placement groups of a run, and wait until the cluster has the resources.

    Args:
        wanted: of :func:`sg_rlhf.config.derived.topology.groups`.
        seconds: how long to wait at most.
        say: gets a message while the run waits.
        hint: a remedy, for the error message.
        every: seconds between two messages.

    Raises:
        NotEnoughMachines: resources are still missing; the message says which.
    """
    global _reserved
    requested = [bundles(index, wanted) for index in range(len(wanted))]
    created = [create(group, strategy="PACK") for group in requested]
    started = time.monotonic()
    last_message = -every
    try:
        while pending := [
            group for group, made in zip(requested, created, strict=True) if not _is_ready(made)
        ]:
            waited = time.monotonic() - started
            missing = missing_resources([bundle for group in pending for bundle in group], nodes())
            if waited >= seconds:
                raise NotEnoughMachines(
                    f"the cluster has too few free resources for this run after {waited:.0f} s "
                    f"of at most {seconds:g}: {missing}{hint and f': {hint}'}"
                )
            if waited - last_message >= every and waited >= FIRST_MESSAGE_SECONDS:
                last_message = waited
                say(f"waiting for the cluster, {waited:.0f} of at most {seconds:g} s: {missing}")
            time.sleep(max(0.0, min(POLL_SECONDS, seconds - waited)))
    except BaseException:
        for group in created:
            remove_placement_group(group)
        raise
    _reserved = Reservation(created, wanted)
    return _reserved


def _is_ready(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group)["state"] == "CREATED")


def clear() -> None:
    """Forget the reservation. Ray removes the groups when the driver disconnects."""
    global _reserved
    _reserved = None


def nodes() -> list[Node]:
    """The nodes of the cluster that are alive."""
    free = ray._private.state.available_resources_per_node()
    return [
        Node(node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]


# -- starting actors ---------------------------------------------------------------------------


def placement_group(
    bundles: list[dict[str, float]], strategy: str = "PACK", **more: Any
) -> PlacementGroup:
    """Ray's ``placement_group`` for upstream: the next reserved group, else a new one."""
    reserved = _reserved.pop(len(bundles)) if _reserved is not None else None
    return create(bundles, strategy=strategy, **more) if reserved is None else reserved


def always_in_a_group(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``RayActorGroup._initiate_actors``: its actors are always in a placement group.

    Upstream creates one only if a node has several processes of the model.
    """

    @functools.wraps(original)
    def _initiate_actors(self: Any, pg: Any, num_gpus_per_actor: float) -> None:
        if pg is None:
            size = self._num_nodes * self._num_gpus_per_node
            pg = placement_group([dict(BUNDLE)] * size)
        original(self, pg, num_gpus_per_actor)

    return _initiate_actors


def start_controller(actor_class: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Start the controller, in its reserved bundle if there is one.

    Args:
        actor_class: the controller's class, from ``ray.remote``.
        args, kwargs: of its constructor.

    Returns:
        The handle of the actor.
    """
    if _reserved is None:
        return actor_class.remote(*args, **kwargs)
    first = _reserved.groups[0]
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=first, placement_group_bundle_index=first.bundle_count - 1
    )
    return actor_class.options(scheduling_strategy=strategy).remote(*args, **kwargs)


# -- messages ----------------------------------------------------------------------------------


def missing_resources(requested: Sequence[Mapping[str, float]], available: Sequence[Node]) -> str:
    """One line that says which bundles fit on no node, and which resources are free.

    Args:
        requested: bundles.
        available: the nodes of the cluster.
    """
    wanted = Counter(map(_amounts, requested))
    missing = Counter(map(_amounts, _unplaced(requested, [node.free for node in available])))
    never = Counter(map(_amounts, _unplaced(requested, [node.total for node in available])))
    sentences = []
    for amounts, count in missing.items():
        in_use = count - never[amounts]
        why = f", {in_use} of them in use" if in_use > 0 else ""
        sentences.append(f"{count} of {wanted[amounts]} places of {amounts} missing{why}")
    free = [f"{node.address} {_free(node)}" for node in available]
    return f"{'; '.join(sentences) or 'all are free, and not given yet'} (free: {', '.join(free)})"


def _unplaced(
    requested: Sequence[Mapping[str, float]], resources: Sequence[Mapping[str, float]]
) -> list[Mapping[str, float]]:
    """The bundles that fit on no node.

    Bundles with a GPU come first. Each takes the node with the fewest GPUs that fits.
    """
    remaining = [dict(node) for node in resources]
    unplaced = []
    for bundle in sorted(requested, key=lambda b: -b.get("GPU", 0.0)):
        fitting = [
            node
            for node in remaining
            if all(node.get(name, 0.0) >= amount for name, amount in bundle.items())
        ]
        if not fitting:
            unplaced.append(bundle)
            continue
        chosen = min(fitting, key=lambda node: node.get("GPU", 0.0))
        for name, amount in bundle.items():
            chosen[name] -= amount
    return unplaced


def _amounts(bundle: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())


def _free(node: Node) -> str:
    return " and ".join(
        f"{node.free.get(name, 0.0):g} of {node.total.get(name, 0.0):g} {name}" for name in BUNDLE
    )
