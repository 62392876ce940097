"""Buffer of an asynchronous run: rollouts are generated while the policy trains on earlier ones.

Prompts are submitted in batches of ``rollout.vllm_generate_batch_size``, each by its own thread.
Responses depend only on the batch's number and the prompt's index in it. Prompts are trained in the
order in which they were drawn. A batch is submitted only when its last prompt will be trained
within ``sg.max_staleness``, so no sample is ever too old.

A checkpoint holds everything that was drawn and not trained yet (:meth:`AsyncRolloutBuffer.state`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from openrlhf.trainer.ppo_utils.experience import Experience
from torchdata.stateful_dataloader import StatefulDataLoader

from sg_rlhf.config.derived.async_config import AsyncConfig
from sg_rlhf.overlay.reporting.errors import RunStopped
from sg_rlhf.overlay.rollout.samples import PromptRow, RolloutSamples
from sg_rlhf.run_dir.weight_versions import oldest_version

#: Key of the buffer's state in a checkpoint's client state.
BUFFER_KEY = "sg_rollouts_ahead"
#: Seconds for which the controller releases the trainer lock while it waits.
LOCK_YIELD_SECONDS = 0.05


@dataclass
class PromptBatch:
    """Prompts that are submitted together.

    Attributes:
        number: of the batch in the run; seeds its responses.
        prompts: rows of the data loader, of one prompt each, in the order of drawing.
        completed: index in ``prompts`` -> the prompt's samples; [] if they were filtered or taken.
        is_epoch_end: whether the epoch's data ended with this batch.
        n_completed, n_passed: prompts completed since a rollout last took some; not filtered out.
    """

    number: int
    prompts: list[PromptRow]
    completed: dict[int, list[Experience]] = field(default_factory=dict)
    is_epoch_end: bool = False
    is_finished: bool = False
    n_completed: int = 0
    n_passed: int = 0

    def pending(self) -> list[int]:
        """Indices of the prompts that are not completed."""
        return [index for index in range(len(self.prompts)) if index not in self.completed]

    def remaining(self) -> int:
        """Number of prompts that are still to be trained."""
        return sum(bool(self.completed.get(i, True)) for i in range(len(self.prompts)))


#: Called with a prompt's index and samples ([] if it was filtered); returns the prompts to submit
#: instead.
OnPromptDone = Callable[[int, list[Experience]], list[PromptRow]]
#: Generates the responses of a batch.
SampleFn = Callable[[PromptBatch, OnPromptDone], None]


class AsyncRolloutBuffer:
    """Prompts that were drawn and are not trained yet, with their samples."""

    def __init__(
        self,
        config: AsyncConfig,
        loader: StatefulDataLoader,
        epochs: int,
        sample: SampleFn,
        trainer_lock: threading.Condition | None = None,
    ) -> None:
        self.config = config
        self.trainer_lock = trainer_lock or threading.Condition()
        self._loader, self._epochs, self._sample = loader, epochs, sample
        self._changed = threading.Condition()
        self._batches: list[PromptBatch] = []
        self._next = 0
        self._rows: Iterator[PromptRow] | None = None
        self._failure: BaseException | None = None
        self._restored: dict[str, Any] | None = None
        self._drawn = 0

    # -- submitting --------------------------------------------------------------------------------

    def submit(self, version: int, next_rollout: int) -> None:
        """Draw and submit as many batches as the bound allows."""
        with self._changed:
            self._resume_from_state()
            while self._can_submit(version, next_rollout) and self._next_batch():
                pass

    def _can_submit(self, version: int, next_rollout: int) -> bool:
        if self._batches and self._batches[-1].is_epoch_end and not self._epochs:
            return False
        waiting = sum(batch.remaining() for batch in self._batches)
        # Index of the rollout that trains the last prompt of one more batch.
        rollouts = math.ceil((waiting + self.config.request_size) / self.config.batch_size)
        last_trained = next_rollout + rollouts - 1
        return last_trained - version <= self.config.max_in_flight

    def _next_batch(self) -> bool:
        if self._rows is None:
            if not self._epochs:
                return False
            self._epochs -= 1
            self._rows = iter(self._loader)
        batch = PromptBatch(self._next, [])
        for row in self._rows:
            batch.prompts.append(row)
            if len(batch.prompts) == self.config.request_size:
                break
        self._drawn += len(batch.prompts)
        if len(batch.prompts) < self.config.request_size:
            self._rows, batch.is_epoch_end = None, True
            self._trim_remainder(batch)
        # An empty batch takes no number: so with a bound of 0 a batch has its rollout's number.
        self._next += bool(batch.prompts)
        self._batches.append(batch)
        self._start(batch)
        return True

    def _trim_remainder(self, batch: PromptBatch) -> None:
        """Drop prompts that fill no rollout, unless they may replace filtered ones."""
        ends = [i for i, other in enumerate(self._batches) if other.is_epoch_end]
        in_epoch = self._batches[ends[-1] + 1 if ends else 0 :]
        waiting = sum(other.remaining() for other in in_epoch)
        rest = (waiting + len(batch.prompts)) % self.config.batch_size
        if self.config.dynamic_filtering and waiting + len(batch.prompts) >= self.config.batch_size:
            return
        del batch.prompts[max(0, len(batch.prompts) - rest) :]

    def _start(self, batch: PromptBatch) -> None:
        if not batch.pending():
            batch.is_finished = True
            return
        # Engines compute one batch after another: which requests they compute together changes
        # rounding. Partial rollouts give that up.
        earlier = [other for other in self._batches if other.number < batch.number]
        if self.config.partial:
            earlier = []
        thread = threading.Thread(
            target=self._run, args=(batch, earlier), name="rollouts", daemon=True
        )
        thread.start()

    def _run(self, batch: PromptBatch, earlier: list[PromptBatch]) -> None:
        try:
            with self._changed:
                self._changed.wait_for(lambda: all(other.is_finished for other in earlier))
            self._raise_failure()
            self._sample(batch, lambda index, samples: self._on_prompt_done(batch, index, samples))
        except BaseException as error:
            self._failure = error
        with self._changed:
            batch.is_finished = True
            self._changed.notify_all()

    def _on_prompt_done(
        self, batch: PromptBatch, index: int, samples: list[Experience]
    ) -> list[PromptRow]:
        """Store a prompt's samples; for a filtered prompt ([]) return a replacement."""
        with self._changed:
            batch.completed[index] = samples
            batch.n_completed += 1
            batch.n_passed += bool(samples)
            replacement = []
            if not samples and self._rows is not None and not batch.is_epoch_end:
                replacement = list(itertools.islice(self._rows, 1))
                if replacement:
                    batch.prompts += replacement
                    self._drawn += 1
                else:  # the epoch ends with the last batch that was drawn
                    self._rows = None
                    self._batches[-1].is_epoch_end = True
            self._changed.notify_all()
            return replacement

    def drain(self) -> None:
        """Wait until no request is pending."""
        with self.trainer_lock:
            while any(not batch.is_finished for batch in self._batches) and self._failure is None:
                self.trainer_lock.wait(LOCK_YIELD_SECONDS)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # -- taking --------------------------------------------------------------------------------

    def pop_batch(self, version: int) -> RolloutSamples:
        """Wait for the samples of rollout ``version`` and remove them from the buffer."""
        with self._changed:
            self._resume_from_state()
            while True:
                self._raise_failure()
                self.submit(version, version)
                ready = self._collect_ready()
                if ready is not None:
                    self._check_age(ready, version)
                    return self._take(ready, version)
                self._changed.wait(1.0)

    def _take(self, taken: list[tuple[PromptBatch, int]], version: int) -> RolloutSamples:
        samples = [s for batch, index in taken for s in batch.completed[index]]
        for batch, index in taken:
            batch.completed[index] = []
        batches = list({id(batch): batch for batch, _ in taken}.values())
        completed = sum(batch.n_completed for batch in batches)
        passed = sum(batch.n_passed for batch in batches)
        for batch in batches:
            batch.n_completed = batch.n_passed = 0
        pass_rate = 100.0 * passed / completed if completed else None
        drawn, self._drawn = self._drawn, 0
        if not taken:  # the epoch is over
            ends = [i for i, batch in enumerate(self._batches) if batch.is_epoch_end]
            del self._batches[: ends[0] + 1 if ends else 0]
            # A synchronous run numbers the rollouts that it trains; the next epoch does the same.
            if not self._batches and self.config.request_size == self.config.batch_size:
                self._next = version
        else:
            self._discard_finished()
        return RolloutSamples(samples, pass_rate, drawn, is_epoch_over=not taken)

    def _discard_finished(self) -> None:
        """Remove finished batches. The last one of an epoch stays: it marks the end."""
        self._batches = [
            batch
            for batch in self._batches
            if not batch.is_finished or batch.is_epoch_end or batch.remaining()
        ]

    def _collect_ready(self) -> list[tuple[PromptBatch, int]] | None:
        """(batch, index) per prompt of the next rollout; [] at the epoch's end; None if not ready.

        A rollout never has prompts of two epochs.
        """
        epoch: list[PromptBatch] = []
        for batch in self._batches:
            epoch.append(batch)
            if batch.is_epoch_end:
                break
        ready = []
        for batch in epoch:
            for index in range(len(batch.prompts)):
                if batch.completed.get(index):
                    ready.append((batch, index))
                elif index not in batch.completed:
                    return None
                if len(ready) == self.config.batch_size:
                    return ready
            # A filtered prompt's replacement may be pending.
            if not batch.is_finished:
                return None
        is_over = bool(epoch) and epoch[-1].is_epoch_end and all(b.is_finished for b in epoch)
        return [] if is_over or not (epoch or self._epochs or self._rows) else None

    def _check_age(self, taken: list[tuple[PromptBatch, int]], version: int) -> None:
        """Stop the run if a sample is too old: it was resumed with a lower bound."""
        for batch, index in taken:
            runs = [s.weight_runs for s in batch.completed[index] if s.weight_runs]
            age = max((version - oldest_version(r) for r in runs), default=0)
            if age > self.config.max_staleness:
                raise RunStopped(
                    f"a sample of batch {batch.number} is {age} weight syncs old, above "
                    f"sg.max_staleness={self.config.max_staleness}: resume with at least {age}"
                )

    # -- the checkpoint ------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The data loader's state, and the prompts that were drawn and are not trained yet.

        Before the first submission of a resumed run this is the restored state.
        """
        with self._changed:
            if self._restored is not None:
                return dict(self._restored)
            batches = [
                {
                    "number": batch.number,
                    "prompts": list(batch.prompts),
                    "completed": {
                        index: [_to_dict(s) for s in samples]
                        for index, samples in batch.completed.items()
                    },
                    "last": batch.is_epoch_end,
                    "counts": (batch.n_completed, batch.n_passed),
                }
                for batch in self._batches
            ]
            return {
                "loader": self._loader.state_dict(),
                "batches": batches,
                "next": self._next,
                "epochs": self._epochs,
                "in_epoch": self._rows is not None,
                "num_drawn": self._drawn,
            }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state` at the next submission, when the engines have the weights."""
        empty = {
            "batches": [],
            "next": 0,
            "epochs": self._epochs,
            "in_epoch": False,
            "num_drawn": 0,
        }
        self._restored = {**empty, **state}

    def _resume_from_state(self) -> None:
        if self._restored is None:
            return
        state, self._restored = self._restored, None
        self._next, self._epochs = state["next"], state["epochs"]
        self._drawn = state["num_drawn"]
        if state["in_epoch"]:
            self._rows = iter(self._loader)
        for saved in state["batches"]:
            completed = {
                index: [_to_experience(s) for s in samples]
                for index, samples in saved["completed"].items()
            }
            batch = PromptBatch(saved["number"], saved["prompts"], completed, saved["last"])
            batch.n_completed, batch.n_passed = saved["counts"]
            self._batches.append(batch)
        for batch in self._batches:
            self._start(batch)


def _to_dict(sample: Experience) -> dict[str, Any]:
    values = {f.name: getattr(sample, f.name) for f in dataclasses.fields(sample)}
    return values | {"weight_runs": sample.weight_runs}


def _to_experience(values: dict[str, Any]) -> Experience:
    runs = values["weight_runs"]
    sample = Experience(**{k: v for k, v in values.items() if k != "weight_runs"})
    sample.weight_runs = runs
    return sample


def version_runs_and_lengths(samples: Iterable[Experience]) -> list[tuple[list[list[int]], int]]:
    """(version runs, tokens) per sample, for :func:`sg_rlhf.run_dir.weight_versions.staleness`."""
    return [(s.weight_runs or [[0, 0]], int(s.action_mask.sum())) for s in samples]
