"""Rollouts as experience: upstream's conversion, with the length of what the model wrote."""

from __future__ import annotations

from typing import Any

import openrlhf.trainer.ppo_utils.samples_generator as upstream


class SGSamplesGenerator(upstream.SamplesGenerator):
    """Upstream's generator; a dialogue's response length counts the model's own tokens.

    Upstream takes the distance from the first to the last of them, so text that an environment
    wrote in between would count in the metrics and in the overlong penalty. Equal to upstream's
    where a response is one piece.
    """

    def _process_response_into_experience(self, response: Any, **generate_kwargs: Any) -> Any:
        experience = super()._process_response_into_experience(response, **generate_kwargs)
        experience.response_length = experience.action_mask.sum(dim=-1)
        return experience
