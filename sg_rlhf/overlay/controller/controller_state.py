"""State of the controller that checkpoints hold: token counts, KL coefficient, async buffer."""

from __future__ import annotations

from typing import Any

from sg_rlhf.overlay.rollout.async_buffer import BUFFER_KEY
from sg_rlhf.overlay.rollout.generator import SGSamplesGenerator

#: Key of the token counts in a checkpoint's client state; each is a metric ``progress/...``, too.
TOKENS = "sg_tokens"


class ControllerState:
    """State that a resumed run needs in addition to upstream's client state.

    Args:
        generator: of the run, with the buffer of an asynchronous run.
        kl_controller: upstream's; its coefficient adapts with ``algo.kl.target``, and upstream does
            not restore it.
    """

    def __init__(self, generator: SGSamplesGenerator, kl_controller: Any) -> None:
        self._generator, self._kl_controller = generator, kl_controller
        self._tokens = {"generated_tokens": 0, "trained_tokens": 0}

    def restore(self, states: dict[str, Any]) -> None:
        """Continue from a checkpoint's client state, or from that of a new run."""
        self._kl_controller.value = states.get("kl_coefficient", self._kl_controller.value)
        self._tokens = states.get(TOKENS, self._tokens)

    def count_tokens(self, generated: int, trained: int) -> dict[str, float]:
        """Add a rollout's tokens to those of the run.

        Args:
            generated: tokens of the trained samples and of the dropped ones. The tokens that
                dynamic filtering discarded are added here.
            trained: tokens that took part in the update.

        Returns:
            Metrics ``progress/...``.
        """
        generated += self._generator.pop_filtered_tokens()
        self._tokens = {
            "generated_tokens": self._tokens["generated_tokens"] + generated,
            "trained_tokens": self._tokens["trained_tokens"] + trained,
        }
        return {f"progress/{name}": float(count) for name, count in self._tokens.items()}

    def add_to(self, client_states: dict[str, Any]) -> dict[str, Any]:
        """The client state of a checkpoint.

        Args:
            client_states: upstream's.
        """
        buffer = self._generator.buffer
        if buffer is not None:  # a resumed run does not generate filtered prompts again
            self.count_tokens(0, 0)
        states = {
            **client_states,
            "kl_coefficient": self._kl_controller.value,
            TOKENS: self._tokens,
        }
        if buffer is None or not client_states:
            return states
        buffer_state = buffer.state()
        return {
            **states,
            "data_loader_state_dict": buffer_state.pop("loader"),
            BUFFER_KEY: buffer_state,
        }
