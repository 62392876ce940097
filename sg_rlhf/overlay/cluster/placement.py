"""Reserves the GPUs and CPUs of a run.

:func:`reserve` creates all placement groups before the first process starts. So an autoscaler sees
the whole demand, the user reads which resources are missing, and no other job can take a part.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
from ray.util.placement_group import placement_group as create
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sg_rlhf.config.derived.topology import CONTROLLER_CPUS, Group
from sg_rlhf.overlay.reporting.errors import RunStopped

#: The resources of one process of a model, or of one worker of an engine.
BUNDLE = {"GPU": 1.0, "CPU": 1.0}
#: The resources of the controller. Its bundle is the last one of the first group.
CONTROLLER_BUNDLE = {"CPU": float(CONTROLLER_CPUS)}
#: Seconds between two messages of a run that waits.
MESSAGE_SECONDS = 60.0
#: Seconds that a run which joins a cluster waits for its resources.
WAIT_SECONDS = 1800.0
#: Seconds before the first message. Ray needs a moment to give free resources, too.
FIRST_MESSAGE_SECONDS = 3.0
#: Seconds to wait for each group before the next look.
POLL_SECONDS = 0.5


class NotEnoughMachines(RunStopped):
    """The cluster did not have the resources in time."""


@dataclass(frozen=True)
class Node:
    """A node of the cluster: its address there, and the resources that nobody uses now."""

    address: str
    total: Mapping[str, float] = field(default_factory=dict)
    free: Mapping[str, float] = field(default_factory=dict)


def bundles(index: int, wanted: Sequence[Group]) -> list[dict[str, float]]:
    """The bundles of group ``index``. The first group also has the controller's bundle."""
    return [dict(BUNDLE)] * wanted[index].size + [dict(CONTROLLER_BUNDLE)] * (index == 0)


# -- waiting -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """The placement groups of a run; ``wanted`` has the models and the size of each."""

    groups: tuple[PlacementGroup, ...]
    wanted: tuple[Group, ...]

    def group_of(self, model: str) -> PlacementGroup:
        """The group that a model is in."""
        return self.groups[self._index(model)]

    def is_shared(self, model: str) -> bool:
        """Whether other models use the same GPUs."""
        return len(self.wanted[self._index(model)].models) > 1

    def bundle_indices(self, model: str) -> list[int]:
        """The bundles with a GPU of a model's group; those of one node follow each other."""
        index = self._index(model)
        nodes = placement_group_table(self.groups[index])["bundles_to_node_id"]
        order = list(dict.fromkeys(nodes.values()))
        size = self.wanted[index].size
        return sorted(range(size), key=lambda bundle: (order.index(nodes[bundle]), bundle))

    def of_controller(self) -> PlacementGroupSchedulingStrategy:
        """The controller's bundle, as Ray's actors take it."""
        first = self.groups[0]
        return PlacementGroupSchedulingStrategy(
            placement_group=first, placement_group_bundle_index=first.bundle_count - 1
        )

    def nodes(self) -> list[str]:
        """Ray's ids of the nodes with a bundle of the run."""
        ids: dict[str, None] = {}
        for group in self.groups:
            ids |= dict.fromkeys(placement_group_table(group)["bundles_to_node_id"].values())
        return list(ids)

    def _index(self, model: str) -> int:
        return next(i for i, group in enumerate(self.wanted) if model in group.models)


def reserve(
    wanted: Sequence[Group],
    seconds: float,
    say: Callable[[str], None],
    hint: str = "",
) -> Placement:
    """Create all placement groups of a run and wait for them; raises NotEnoughMachines."""
    requested = [bundles(index, wanted) for index in range(len(wanted))]
    created = [create(group, strategy="PACK") for group in requested]
    started = time.monotonic()
    last_message = -MESSAGE_SECONDS
    try:
        while pending := [
            group
            for group, made in zip(requested, created, strict=True)
            if not made.wait(POLL_SECONDS)
        ]:
            waited = time.monotonic() - started
            missing = missing_resources([bundle for group in pending for bundle in group], nodes())
            if waited >= seconds:
                raise NotEnoughMachines(
                    f"the cluster has too few free resources for this run after {waited:.0f} s "
                    f"of at most {seconds:g}: {missing}{hint and f': {hint}'}"
                )
            if waited - last_message >= MESSAGE_SECONDS and waited >= FIRST_MESSAGE_SECONDS:
                last_message = waited
                say(f"waiting for the cluster, {waited:.0f} of at most {seconds:g} s: {missing}")
    except BaseException:
        for group in created:
            remove_placement_group(group)
        raise
    return Placement(tuple(created), tuple(wanted))


def nodes() -> list[Node]:
    """The nodes of the cluster that are alive."""
    free = ray._private.state.available_resources_per_node()
    return [
        Node(node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]


# -- messages ----------------------------------------------------------------------------------


def missing_resources(requested: Sequence[Mapping[str, float]], available: Sequence[Node]) -> str:
    """One line that says which bundles fit on no node, and which resources are free."""
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
    """The bundles that fit on no node; each takes the node with the fewest GPUs that fits."""
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
