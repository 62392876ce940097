"""A run that goes on over a NaN or an infinity (``sg.on_nonfinite=skip``): its steps and rows.

An optimizer step whose loss or gradient is not finite on any rank is not taken on all of them
(:class:`sg_rlhf.overlay.learner.gradient_check.StepSkipper`). A sample whose reward or log-prob
is not
finite before the update is left out of it (:mod:`sg_rlhf.overlay.learner.sample_mask`). Both leave
a row in
``nonfinite.jsonl``, and more skipped steps in a row than ``sg.max_nonfinite`` stop the run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from sg_rlhf.overlay.learner import gradient_check
from sg_rlhf.run_dir import jsonl_log

#: In an experience's info: the sample's place in the rollout.
PLACE = "place"
#: In a rank's status: rows of ``nonfinite.jsonl``, and why the run stops.
ROWS, STOP = "sg_nonfinite", "sg_stop"
SKIPPED_STEPS, LEFT_OUT = "nonfinite/skipped_steps", "nonfinite/samples"
#: Characters of a prompt's end in a row.
MAX_SHOWN_CHARACTERS = 200
#: The weight in upstream's means of a micro-batch that has no part in them; it divides by the sum.
NO_WEIGHT = 1e-9


class TooManySkips(Exception):
    """Leaves the update on every rank; the controller stops the run with its message."""


def sample(place: int | None, prompt: str, group: int, shown: bool = True) -> dict[str, Any]:
    """What a row says of a sample.

    Args:
        place: in the rollout, in order of prompts; None where it is not known.
        prompt: its text.
        group: responses of a prompt.
        shown: with the end of the prompt.
    """
    prompt_index, response_index = (None, None) if place is None else divmod(place, group)
    return {
        "prompt_index": prompt_index,
        "response_index": response_index,
        "prompt_sha256": hashlib.sha256(prompt.encode()).hexdigest(),
        **({"prompt_end": prompt[-MAX_SHOWN_CHARACTERS:]} if shown else {}),
    }


def take(status: dict[str, Any], left_out: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rollout's rows, of which the counts stay in the status.

    Args:
        status: of the ranks' update, of which :data:`ROWS` is taken.
        left_out: the rows of the samples that were left out before it.
    """
    rows = [*left_out, *status.pop(ROWS, [])]
    status[SKIPPED_STEPS] = float(sum(row.get("optimizer_step") is not None for row in rows))
    status[LEFT_OUT] = float(sum(row.get("left_out", 0) for row in rows))
    return rows


def without_part(status: dict[str, Any]) -> None:
    """Take a micro-batch out of upstream's means over micro-batches and ranks.

    Args:
        status: what upstream's ``training_step`` returns of it.
    """
    metrics = status["metrics"]
    for key, value in metrics.items():
        if isinstance(value, torch.Tensor):
            metrics[key] = torch.nan_to_num(value.float(), 0.0, 0.0, 0.0)
    status["num_samples"] = status["num_action_tokens"] = NO_WEIGHT


class RankSkips:
    """One rank's part in what an update skips.

    Args:
        args: upstream's nested namespace with ``sg``.
        optimizer: DeepSpeed's.
        named: the model's parameters.
        scheduler: of the learning rate.

    Attributes:
        faulty: whether the loss of the present micro-batch was not finite.
    """

    def __init__(
        self, args: Any, optimizer: Any, named: gradient_check.Named, scheduler: Any
    ) -> None:
        self._group = args.rollout.n_samples_per_prompt
        self._bound = args.sg.max_nonfinite
        self._watch = gradient_check.StepSkipper(
            optimizer, named, scheduler, scaled=args.ds.param_dtype == "fp16"
        )
        self.faulty = False
        self._in_a_row = 0
        self._present: list[tuple[int | None, str]] = []
        self._seen: list[tuple[int | None, str]] = []
        self._suspects: list[tuple[int | None, str]] = []
        self._said: list[str] = []
        self._rows: list[dict[str, Any]] = []
        self._left_out: list[tuple[int | None, str]] = []

    def micro_batch(self, experience: Any) -> None:
        """A micro-batch is next; takes the places of its samples out of upstream's metrics."""
        prompts = list(experience.prompts or [])
        prompts += [""] * (len(experience.sequences) - len(prompts))
        found = experience.info.pop(PLACE, None)
        places = [None] * len(prompts) if found is None else [int(place) for place in found]
        self._present = list(zip(places, prompts, strict=True))
        self._seen += self._present
        self.faulty = False

    def fault(self, said: str, rows: Sequence[bool]) -> None:
        """The loss of the present micro-batch is not finite.

        Args:
            said: what is said of it, in one line.
            rows: which samples have a number that is not; where none has, it may be any.
        """
        self.faulty = self._watch.at_fault = True
        self._said.append(said)
        bad = [sample for sample, is_bad in zip(self._present, rows, strict=True) if is_bad]
        self._suspects += bad or self._present

    def leave_out(self, item: Any) -> None:
        """Mask the tokens of a sample of the replay buffer whose log-probs are not finite."""
        item.action_mask = torch.zeros_like(item.action_mask)
        item.action_log_probs = torch.zeros_like(item.action_log_probs)
        place = item.info.get(PLACE)
        prompt = item.prompts[0] if item.prompts else ""
        self._left_out.append((None if place is None else int(place), prompt))

    def stepped(self, step: int) -> bool:
        """Whether the optimizer step just made was skipped; asked on every rank.

        Args:
            step: its number in the run.

        Raises:
            BoundReached: one more than may be skipped in a row.
        """
        skipped = self._watch.skipped
        if skipped:
            self._in_a_row += 1
            self._note(step)
        else:
            self._in_a_row = 0
        self._seen, self._suspects, self._said = [], [], []
        return skipped

    def _note(self, step: int) -> None:
        of_ranks = gradient_check.gathered((self._said, self._suspects, self._seen))
        said = [text for texts, _, _ in of_ranks for text in texts]
        suspects = [sample for _, samples, _ in of_ranks for sample in samples]
        seen = [sample for _, _, samples in of_ranks for sample in samples]
        of_gradient = str(self._watch.faults.error(step))
        message = said[0] if said else of_gradient
        self._rows.append(
            {
                "optimizer_step": step,
                "cause": "the policy loss" if said else "the gradient",
                "in_a_row": self._in_a_row,
                "message": message,
                # Of a gradient all that is known is the optimizer step's samples.
                "samples": self._samples(suspects if said else seen, shown=bool(said)),
            }
        )
        if self._in_a_row > self._bound:
            raise TooManySkips(
                f"{message}; {self._bound} optimizer steps in a row were skipped before it "
                f"(sg.max_nonfinite={self._bound}; their samples: {jsonl_log.NONFINITE})"
            )

    def _samples(self, found: list[tuple[int | None, str]], shown: bool) -> list[dict[str, Any]]:
        # Ranks that share samples have each of them.
        each = sorted(set(found), key=lambda s: (s[0] is None, s[0] or 0, s[1]))
        return [sample(place, prompt, self._group, shown) for place, prompt in each]

    def take(self) -> dict[str, Any]:
        """The update's rows, those of all ranks on each; asked on every rank, at its end."""
        rows, self._rows = self._rows, []
        left_out = {s for samples in gradient_check.gathered(self._left_out) for s in samples}
        self._left_out = []
        if left_out:
            rows = [
                {
                    "optimizer_step": None,
                    "cause": "log-probs of the policy",
                    "left_out": len(left_out),
                    "samples": self._samples(list(left_out), shown=True),
                },
                *rows,
            ]
        return {ROWS: rows}
