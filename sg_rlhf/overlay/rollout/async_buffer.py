"""Rollouts that are sampled while the policy is trained on earlier ones, with a bound on their age.

Prompts are asked for in units (``rollout.vllm_generate_batch_size`` prompts), each by a thread of
its own, whose responses depend on the unit's number and the prompt's place in it alone. The
controller takes ``rollout.batch_size`` prompts for each update. Two rules keep the bound:

- ``wait``: prompts are trained in the order in which they were drawn, and a unit is asked for only
  when the last of it will be trained within the bound. No sample is ever too old.
- ``drop``: prompts are trained as they are finished, units are asked for up to
  ``train.async_queue_size`` rollouts ahead, and a prompt of which a token is too old is left out.

All that was drawn and not yet trained is in the checkpoint (:meth:`RolloutsAhead.state`).
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from openrlhf.trainer.ppo_utils.experience import Experience

from sg_rlhf.overlay.reporting.errors import RunStopped
from sg_rlhf.overlay.settings.async_config import AsyncConfig
from sg_rlhf.run_dir.weight_versions import oldest_version

#: What the rollouts ahead are called among the states of a checkpoint.
BUFFER_KEY = "sg_rollouts_ahead"
#: How often the controller lets threads of its own use the ranks while it waits, seconds.
LOCK_YIELD_SECONDS = 0.05


@dataclass
class PromptBatch:
    """Prompts that are asked for together.

    Attributes:
        number: of the unit in the run; seeds its responses.
        drawn: rows of the data loader, of one prompt each, in the order of drawing.
        answered: place in ``drawn`` -> the prompt's samples; [] where it was taken or left out.
        last: whether the data of the epoch ended with it.
        done: whether all is answered.
        asked, passed: its prompts that were answered since a rollout was last taken of it, and
            those of them that dynamic filtering kept.
    """

    number: int
    drawn: list[Any]
    answered: dict[int, list[Any]] = field(default_factory=dict)
    last: bool = False
    done: bool = False
    asked: int = 0
    passed: int = 0

    def unanswered(self) -> list[int]:
        """Places of the prompts without an answer."""
        return [place for place in range(len(self.drawn)) if place not in self.answered]

    def left(self) -> int:
        """Prompts that are still to be trained."""
        return sum(bool(self.answered.get(p, True)) for p in range(len(self.drawn)))


#: Samples a unit: tells each answer to its second argument, which returns what to ask instead.
SampleFn = Callable[[PromptBatch, Callable[[int, list[Any]], list[Any]]], None]


class AsyncRolloutBuffer:
    """What has been drawn and is not trained yet.

    Args:
        lead: the settings.
        loader: of the prompts; each iteration is an epoch, its rows hold one prompt.
        epochs: of the run.
        sample: see :data:`Sampler`; runs in a thread of its own.
        ranks: held by whoever gives the trainer's ranks work, as of
            :class:`sg_rlhf.overlay.rollout.engine_pool.EnginePool`.
    """

    def __init__(
        self,
        lead: AsyncConfig,
        loader: Any,
        epochs: int,
        sample: SampleFn,
        ranks: threading.Condition | None = None,
    ) -> None:
        self.lead = lead
        self.ranks = ranks or threading.Condition()
        self._loader, self._epochs, self._sample = loader, epochs, sample
        self._changed = threading.Condition()
        self._units: list[PromptBatch] = []
        self._next = 0
        self._rows: Iterator[Any] | None = None
        self._failure: BaseException | None = None
        self._restored: dict[str, Any] | None = None
        self._dropped = self._drawn = 0

    # -- asking --------------------------------------------------------------------------------

    def ask(self, version: int, next_rollout: int) -> None:
        """Draw and ask for as many units as the rule allows.

        Args:
            version: of the engines' weights.
            next_rollout: number of the rollout that is trained next.
        """
        with self._changed:
            self._go_on()
            while self._may_ask(version, next_rollout) and self._draw():
                pass

    def _may_ask(self, version: int, next_rollout: int) -> bool:
        if self._units and self._units[-1].last and not self._epochs:
            return False
        waiting = sum(unit.left() for unit in self._units)
        last_trained = next_rollout + -(-(waiting + self.lead.unit) // self.lead.batch) - 1
        if last_trained - version <= self.lead.rollouts:
            return True
        # A rollout that lacks prompts, of an odd rest or for what was left out, is asked for now.
        return self.lead.drop and next_rollout == version and waiting < self.lead.batch

    def _draw(self) -> bool:
        if self._rows is None:
            if not self._epochs:
                return False
            self._epochs -= 1
            self._rows = iter(self._loader)
        unit = PromptBatch(self._next, [])
        for row in self._rows:
            unit.drawn.append(row)
            if len(unit.drawn) == self.lead.unit:
                break
        self._drawn += len(unit.drawn)
        if len(unit.drawn) < self.lead.unit:
            self._rows, unit.last = None, True
            self._leave_out_rest(unit)
        # An epoch's end without prompts takes no number: those of a bound of 0 are the rollouts'.
        self._next += bool(unit.drawn)
        self._units.append(unit)
        self._start(unit)
        return True

    def _leave_out_rest(self, unit: PromptBatch) -> None:
        """Prompts that fill no rollout, unless they may stand in for others."""
        if self.lead.drop:
            return
        ends = [i for i, before in enumerate(self._units) if before.last]
        waiting = sum(before.left() for before in self._units[ends[-1] + 1 if ends else 0 :])
        rest = (waiting + len(unit.drawn)) % self.lead.batch
        if self.lead.filters and waiting + len(unit.drawn) >= self.lead.batch:
            return
        del unit.drawn[max(0, len(unit.drawn) - rest) :]

    def _start(self, unit: PromptBatch) -> None:
        if not unit.unanswered():
            unit.done = True
            return
        before = [] if self.lead.overlaps else [u for u in self._units if u.number < unit.number]
        run = threading.Thread(target=self._run, args=(unit, before), name="rollouts", daemon=True)
        run.start()

    def _run(self, unit: PromptBatch, before: list[PromptBatch]) -> None:
        try:
            with self._changed:
                self._changed.wait_for(lambda: all(earlier.done for earlier in before))
            self._raise_failure()
            self._sample(unit, lambda place, samples: self._answer(unit, place, samples))
        except BaseException as error:
            self._failure = error
        with self._changed:
            unit.done = True
            self._changed.notify_all()

    def _answer(self, unit: PromptBatch, place: int, samples: list[Any]) -> list[Any]:
        """Keep an answer; [] is a prompt without a signal, for which another is drawn."""
        with self._changed:
            unit.answered[place] = samples
            unit.asked += 1
            unit.passed += bool(samples)
            instead = []
            if not samples and self._rows is not None and not unit.last:
                instead = list(itertools.islice(self._rows, 1))
                if instead:
                    unit.drawn += instead
                    self._drawn += 1
                else:  # it ends with the last unit that was drawn
                    self._rows = None
                    self._units[-1].last = True
            self._changed.notify_all()
            return instead

    def drain(self) -> None:
        """Wait until nothing is asked of the engines."""
        with self.ranks:
            while any(not unit.done for unit in self._units) and self._failure is None:
                self.ranks.wait(LOCK_YIELD_SECONDS)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # -- taking --------------------------------------------------------------------------------

    def take(self, version: int) -> tuple[list[Any], float | None, int, bool]:
        """The samples of the next rollout, whose number is ``version``, once they are there.

        Returns:
            As upstream's ``generate_samples``: samples, the share of prompts that passed the filter
            in %, prompts drawn since the last call, and whether the epoch is over; without samples
            where the epoch's prompts no longer fill a rollout.
        """
        with self._changed:
            self._go_on()
            while True:
                self._raise_failure()
                self._drop_stale(version)
                self.ask(version, version)
                found = self._ready()
                if found is not None:
                    return self._result(found, version)
                self._changed.wait(1.0)

    def _result(
        self, taken: list[tuple[PromptBatch, int]], version: int
    ) -> tuple[list[Any], float | None, int, bool]:
        samples = [s for unit, place in taken for s in unit.answered[place]]
        for unit, place in taken:
            unit.answered[place] = []
        units = list({id(unit): unit for unit, _ in taken}.values())
        asked, passed = sum(unit.asked for unit in units), sum(unit.passed for unit in units)
        for unit in units:
            unit.asked = unit.passed = 0
        share = 100.0 * passed / asked if asked else None
        drawn, self._drawn = self._drawn, 0
        if not taken:  # the epoch's rest, which fills no rollout
            ends = [i for i, unit in enumerate(self._units) if unit.last]
            del self._units[: ends[0] + 1 if ends else 0]
            # The next epoch's draws are those of a synchronous run, which numbers what it trains.
            if not (self._units or self.lead.drop) and self.lead.unit == self.lead.batch:
                self._next = version
        else:
            self._forget()
        return samples, share, drawn, not taken

    def _forget(self) -> None:
        """Units of which nothing is left; an epoch's last one says that it is over."""
        self._units = [u for u in self._units if not u.done or u.last or u.left()]

    def _ready(self) -> list[tuple[PromptBatch, int]] | None:
        """The prompts of the next rollout; [] at the end of an epoch; None if they are not there.

        No rollout has prompts of two epochs.
        """
        epoch: list[PromptBatch] = []
        for unit in self._units:
            epoch.append(unit)
            if unit.last:
                break
        found = []
        for unit in epoch:
            for place in range(len(unit.drawn)):
                if unit.answered.get(place):
                    found.append((unit, place))
                elif place not in unit.answered and not self.lead.drop:
                    return None
                if len(found) == self.lead.batch:
                    return found
            if not unit.done and not self.lead.drop:  # a filtered prompt's replacement comes
                return None
        over = bool(epoch) and epoch[-1].last and all(unit.done for unit in epoch)
        return [] if over or not (epoch or self._epochs or self._rows) else None

    def _drop_stale(self, version: int) -> None:
        for unit in self._units:
            for place, samples in unit.answered.items():
                ages = [version - oldest_version(s.weight_runs) for s in samples if s.weight_runs]
                if max(ages, default=0) <= self.lead.bound:
                    continue
                if not self.lead.drop:
                    raise RunStopped(
                        f"a sample of unit {unit.number} is {max(ages)} weight syncs old, above "
                        f"sg.max_staleness={self.lead.bound}, although it was waited for"
                    )
                self._dropped += sum(int(s.action_mask.sum()) for s in samples)
                unit.answered[place] = []
        self._forget()

    def take_dropped(self) -> int:
        """Tokens that were left out for their age since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    # -- the checkpoint ------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the data loader's state, and what was drawn and is not trained yet.

        Prompts without an answer are asked again by a resumed run, with the same seeds. Until the
        first of them is asked, a resumed run is where its own checkpoint left it.
        """
        with self._changed:
            if self._restored is not None:
                return dict(self._restored)
            units = [
                {
                    "number": unit.number,
                    "drawn": list(unit.drawn),
                    "answered": {
                        place: [_plain(s) for s in samples]
                        for place, samples in unit.answered.items()
                    },
                    "last": unit.last,
                    "counts": (unit.asked, unit.passed),
                }
                for unit in self._units
            ]
            return {
                "loader": self._loader.state_dict(),
                "units": units,
                "next": self._next,
                "epochs": self._epochs,
                "in_epoch": self._rows is not None,
                "drawn": self._drawn,
            }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state`, once the loader has its own state and the engines weights.

        Args:
            state: from the checkpoint; of a synchronous run's it has the loader's state alone.
        """
        nothing = {"units": [], "next": 0, "epochs": self._epochs, "in_epoch": False, "drawn": 0}
        self._restored = {**nothing, **state}

    def _go_on(self) -> None:
        if self._restored is None:
            return
        state, self._restored = self._restored, None
        self._next, self._epochs = state["next"], state["epochs"]
        self._drawn = state["drawn"]
        if state["in_epoch"]:
            self._rows = iter(self._loader)
        for kept in state["units"]:
            answered = {
                place: [_experience(s) for s in samples]
                for place, samples in kept["answered"].items()
            }
            unit = PromptBatch(kept["number"], kept["drawn"], answered, kept["last"])
            unit.asked, unit.passed = kept.get("counts", (0, 0))
            self._units.append(unit)
        for unit in self._units:
            self._start(unit)


def _plain(sample: Any) -> dict[str, Any]:
    values = {f.name: getattr(sample, f.name) for f in dataclasses.fields(sample)}
    return values | {"weight_runs": sample.weight_runs}


def _experience(values: dict[str, Any]) -> Any:
    runs = values["weight_runs"]
    sample: Any = Experience(**{k: v for k, v in values.items() if k != "weight_runs"})
    sample.weight_runs = runs
    return sample


def version_runs_and_lengths(samples: Iterable[Any]) -> list[tuple[Any, int]]:
    """(runs, own tokens) of each sample, for :func:`sg_rlhf.run_dir.weight_versions.staleness`."""
    return [(s.weight_runs or [[0, 0]], int(s.action_mask.sum())) for s in samples]
