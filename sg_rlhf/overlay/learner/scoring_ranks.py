"""The Ray actors of the models that score a rollout and do not learn: reference and reward."""

from __future__ import annotations

import openrlhf.trainer.ray.launcher as upstream

from sg_rlhf.overlay.cluster.free_port import OwnPort


class SGReferenceModelActor(
    OwnPort,
    upstream.ReferenceModelActor.__ray_metadata__.modified_class,  # type: ignore[misc]
):
    """Upstream's reference rank."""


class SGRewardModelActor(
    OwnPort,
    upstream.RewardModelActor.__ray_metadata__.modified_class,  # type: ignore[misc]
):
    """Upstream's rank of the reward model."""
