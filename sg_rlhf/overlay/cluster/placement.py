"""The places of a run on a shared cluster: asked for at once, waited for in words, handed out.

Upstream asks for a placement group after the other and waits for each without end and without a
word; a model with one accelerator on each machine it asks for in no group at all. On a cluster that
a run joins, all of them are asked for first: an autoscaler sees the whole need, whoever waits reads
what is missing, and from then on nobody else can take a part of it. Upstream is handed the groups
as it asks for them.
"""

from __future__ import annotations

import operator
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
from ray.util.placement_group import placement_group as create

from sg_rlhf.config.topology import Group
from sg_rlhf.config.topology import groups as groups_of
from sg_rlhf.overlay.reporting.errors import RunStopped

#: What each process of a model, and each worker of an engine, asks for.
PLACE = {"GPU": 1.0, "CPU": 1.0}
#: What upstream's controller asks for; its place is behind those of the first group.
CONTROLLER = {"CPU": 1.0}
#: Between two lines of a run that waits.
EVERY_SECONDS = 60.0
#: Before the first: Ray needs a moment for what is free, too.
PATIENCE_SECONDS = 3.0
#: Between two looks.
LOOK_SECONDS = 0.5


class NotEnoughMachines(RunStopped):
    """The cluster did not have the places in time."""


@dataclass(frozen=True)
class Machine:
    """A machine of the cluster.

    Attributes:
        address: of its network.
        total: what it has, by Ray's names.
        free: what of it nobody has now.
    """

    address: str
    total: Mapping[str, float] = field(default_factory=dict)
    free: Mapping[str, float] = field(default_factory=dict)


def groups(args: Any) -> list[Group]:
    """The placement groups of a run, in the order in which upstream's ``train`` asks for them."""
    return groups_of(lambda key: operator.attrgetter(key)(args))


def bundles_of(number: int, wanted: Sequence[Group]) -> list[dict[str, float]]:
    """What the group of that number asks for; the first has the controller's place as well."""
    return [dict(PLACE)] * wanted[number].size + [dict(CONTROLLER)] * (number == 0)


# -- waiting -----------------------------------------------------------------------------------


class Reservation:
    """The groups of a run, which it has from now on.

    Args:
        made: the placement groups, in upstream's order.
        wanted: what they are for.
    """

    def __init__(self, made: Sequence[PlacementGroup], wanted: Sequence[Group]) -> None:
        self._left = list(zip(made, wanted, strict=True))
        self.made = list(made)

    def nodes(self) -> list[str]:
        """Ray's ids of the machines that the places are on."""
        found: dict[str, None] = {}
        for one in self.made:
            found |= dict.fromkeys(placement_group_table(one)["bundles_to_node_id"].values())
        return list(found)

    def take(self, size: int) -> PlacementGroup | None:
        """The group that upstream asks for next; None if it is none of these."""
        if not self._left or self._left[0][1].size != size:
            return None
        return self._left.pop(0)[0]


#: Of this process's run.
_reserved: Reservation | None = None


def reserve(
    wanted: Sequence[Group],
    seconds: float,
    say: Callable[[str], None],
    hint: str = "",
    every: float = EVERY_SECONDS,
) -> Reservation:
    """Ask for all places, and wait for them.

    Args:
        wanted: of :func:`groups`.
        seconds: how long at most.
        say: gets a line at once if there is something to wait for, and another every so often.
        hint: what may be done, for the message.
        every: seconds between two lines.

    Raises:
        NotEnoughMachines: they are not there in time; the message says what is missing.
    """
    global _reserved
    asked = [bundles_of(number, wanted) for number in range(len(wanted))]
    made = [create(bundles, strategy="PACK") for bundles in asked]
    started = time.monotonic()
    told = -every
    try:
        while pending := [
            places for one, places in zip(made, asked, strict=True) if not _is_ready(one)
        ]:
            waited = time.monotonic() - started
            lacking = missing_resources([place for group in pending for place in group], machines())
            if waited >= seconds:
                raise NotEnoughMachines(
                    f"the cluster has no room for this run after {waited:.0f} s "
                    f"(sg.cluster_wait={seconds:g}): {lacking}{hint and f': {hint}'}"
                )
            if waited - told >= every and waited >= PATIENCE_SECONDS:
                told = waited
                say(
                    f"waiting for the cluster, {waited:.0f} of at most {seconds:g} s "
                    f"(sg.cluster_wait): {lacking}"
                )
            time.sleep(max(0.0, min(LOOK_SECONDS, seconds - waited)))
    except BaseException:
        for one in made:
            remove_placement_group(one)
        raise
    _reserved = Reservation(made, wanted)
    return _reserved


def _is_ready(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group)["state"] == "CREATED")


def placement_group(
    bundles: list[dict[str, float]], strategy: str = "PACK", **more: Any
) -> PlacementGroup:
    """Of ``ray.util``, for upstream: the group that is reserved for this, else a new one."""
    found = _reserved.take(len(bundles)) if _reserved is not None else None
    return create(bundles, strategy=strategy, **more) if found is None else found


def controller_bundle() -> tuple[PlacementGroup, int] | None:
    """The group and the number of the controller's place; None where none is reserved."""
    if _reserved is None:
        return None
    first = _reserved.made[0]
    return first, first.bundle_count - 1


def clear() -> None:
    """The cluster is left, and with it the groups are gone."""
    global _reserved
    _reserved = None


def machines() -> list[Machine]:
    """Those of the cluster that are alive."""
    free = ray._private.state.available_resources_per_node()
    return [
        Machine(node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]


# -- in words ----------------------------------------------------------------------------------


def missing_resources(places: Sequence[Mapping[str, float]], there: Sequence[Machine]) -> str:
    """What of the places no machine has room for, and what there is, in one line."""
    wanted = Counter(map(_amounts, places))
    missing = Counter(map(_amounts, _unplaced(places, [machine.free for machine in there])))
    nowhere = Counter(map(_amounts, _unplaced(places, [machine.total for machine in there])))
    said = []
    for amounts, count in missing.items():
        taken = count - nowhere[amounts]
        why = f", {taken} of them in use" if taken > 0 else ""
        said.append(f"{count} of {wanted[amounts]} places of {amounts} missing{why}")
    free = [f"{one.address} {_free(one)}" for one in there]
    return f"{'; '.join(said) or 'all are free, and not given yet'} (free: {', '.join(free)})"


def _unplaced(
    places: Sequence[Mapping[str, float]], room: Sequence[Mapping[str, float]]
) -> list[Mapping[str, float]]:
    """The places that fit nowhere, those with a GPU first, each where the fewest GPUs are."""
    left = [dict(one) for one in room]
    without = []
    for place in sorted(places, key=lambda one: -one.get("GPU", 0.0)):
        fitting = [
            one for one in left if all(one.get(n, 0.0) >= amount for n, amount in place.items())
        ]
        if not fitting:
            without.append(place)
            continue
        chosen = min(fitting, key=lambda one: one.get("GPU", 0.0))
        for name, amount in place.items():
            chosen[name] -= amount
    return without


def _amounts(place: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in place.items())


def _free(machine: Machine) -> str:
    return " and ".join(
        f"{machine.free.get(name, 0.0):g} of {machine.total.get(name, 0.0):g} {name}"
        for name in PLACE
    )
