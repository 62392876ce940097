"""Upstream's actors in the places that :mod:`.placement` reserved for them."""

from __future__ import annotations

from typing import Any

from openrlhf.trainer.ray.launcher import RayActorGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sg_rlhf.overlay.cluster import placement


class PlacedActorGroup(RayActorGroup):
    """Upstream's group of a model's processes; always in a placement group.

    Upstream makes one only where a machine has several of its processes.
    """

    def _initiate_actors(self, pg: Any, num_gpus_per_actor: float) -> None:
        if pg is None:
            size = self._num_nodes * self._num_gpus_per_node
            pg = placement.placement_group([dict(placement.PLACE)] * size)
        super()._initiate_actors(pg, num_gpus_per_actor)


class PlacedController:
    """An actor class whose only actor is the run's controller.

    Args:
        actor: of Ray.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Start it, in its place where one is reserved."""
        place = placement.controller_bundle()
        if place is None:
            return self._actor.remote(*args, **kwargs)
        group, number = place
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=number
        )
        return self._actor.options(scheduling_strategy=strategy).remote(*args, **kwargs)
