"""State of the controller that checkpoints hold: counts, KL coefficient, best metric, buffer."""

from __future__ import annotations

import math
from typing import Any

from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController, FixedKLController

from sg_rlhf.overlay.rollout.async_buffer import BUFFER_KEY
from sg_rlhf.overlay.rollout.generator import SamplesGenerator

#: Key of the token counts in a checkpoint's client state; each is a metric ``progress/...``, too.
TOKENS = "sg_tokens"


class ControllerState:
    """State that a resumed run needs in addition to its place in the data.

    ``metric_key`` is ``ckpt.best_metric_key``: "none" for no best checkpoint, "" for the first
    metric ``..._pass1`` of the evaluations.
    """

    def __init__(
        self,
        generator: SamplesGenerator,
        kl_controller: AdaptiveKLController | FixedKLController,
        metric_key: str | None = None,
    ) -> None:
        self._generator, self._kl_controller = generator, kl_controller
        self.metric_key = metric_key or ""
        self.latest_metric: float | None = None
        self._best_metric = -math.inf
        self._tokens = {"generated_tokens": 0, "trained_tokens": 0}

    def restore(self, states: dict[str, Any]) -> None:
        """Continue from a checkpoint's client state, or from that of a new run."""
        self._kl_controller.value = states.get("kl_coefficient", self._kl_controller.value)
        self._tokens = states.get(TOKENS, self._tokens)
        self.metric_key = states.get("best_eval_metric_key") or self.metric_key
        if (best := states.get("best_eval_metric_value")) is not None:
            self._best_metric = best
            self.latest_metric = states.get("latest_eval_metric_value", best)

    def is_best(self, eval_metrics: dict[str, float]) -> bool:
        """Whether an evaluation has the best metric so far. Keeps it."""
        if not self.metric_key:
            names = sorted(name for name in eval_metrics if name.endswith("_pass1"))
            self.metric_key = names[0] if names else ""
        if self.metric_key not in eval_metrics:
            return False
        self.latest_metric = eval_metrics[self.metric_key]
        is_best = self.latest_metric > self._best_metric
        self._best_metric = max(self._best_metric, self.latest_metric)
        return is_best

    def count_tokens(self, generated: int, trained: int) -> dict[str, float]:
        """Add a rollout's tokens to those of the run."""
        generated += self._generator.pop_filtered_tokens()
        self._tokens = {
            "generated_tokens": self._tokens["generated_tokens"] + generated,
            "trained_tokens": self._tokens["trained_tokens"] + trained,
        }
        return {f"progress/{name}": float(count) for name, count in self._tokens.items()}

    def add_to(self, client_states: dict[str, Any]) -> dict[str, Any]:
        """The client state of a checkpoint."""
        buffer = self._generator.buffer
        if buffer is not None:  # a resumed run does not generate filtered prompts again
            self.count_tokens(0, 0)
        states = {
            **client_states,
            "kl_coefficient": self._kl_controller.value,
            TOKENS: self._tokens,
            "best_eval_metric_key": self.metric_key,
            "best_eval_metric_value": self._best_metric,
            "latest_eval_metric_value": self.latest_metric,
        }
        if buffer is None or not client_states:
            return states
        buffer_state = buffer.state()
        return {
            **states,
            "data_loader_state_dict": buffer_state.pop("loader"),
            BUFFER_KEY: buffer_state,
        }
