"""Experience making: a finite check, KL by our names, and Eq. 4's choice of std."""

from __future__ import annotations

from typing import Any

import openrlhf.trainer.ppo_utils.experience_maker as upstream
import torch

from sg_rlhf.algo.advantages import population_std_correction
from sg_rlhf.overlay import kl
from sg_rlhf.overlay.errors import NonFiniteError
from sg_rlhf.overlay.losses import kl_dispatcher


class SGExperienceMaker(upstream.RemoteExperienceMaker):
    """Upstream's experience maker with checks where it hands data on to the update."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kl = kl_dispatcher(self.args, None)

    def make_experience(self, samples_list: list[Any]) -> list[Any]:
        """Upstream's log-probs of policy and reference; raises if one is not finite."""
        with kl.computed_by(self._kl):
            samples = super().make_experience(samples_list)
        for sample in samples:
            mask = sample.action_mask.bool()
            for name, log_probs in (
                ("policy", sample.action_log_probs),
                ("reference model", sample.base_action_log_probs),
            ):
                if log_probs is None:
                    continue
                bad = int((~torch.isfinite(log_probs[mask])).sum())
                if bad:
                    raise NonFiniteError(
                        f"{bad} of {int(mask.sum())} log-probs of the {name} are not finite "
                        f"before the update (prompt: {sample.prompts[0][-200:]!r}); "
                        "nothing was trained on them"
                    )
        return samples

    def compute_advantages_and_returns(self, experiences: list[Any]) -> list[Any]:
        """Upstream's advantages; with ``sg.advantage_std=population`` Eq. 4's std instead."""
        experiences = super().compute_advantages_and_returns(experiences)
        if self.args.sg.advantage_std == "population":
            factor = population_std_correction(self.args.rollout.n_samples_per_prompt)
            for experience in experiences:
                experience.advantages = experience.advantages * factor
                experience.returns = experience.returns * factor
        return experiences
