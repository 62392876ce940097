"""Errors that stop a run on purpose. Each carries its whole message, so that it survives Ray."""

from __future__ import annotations

from collections.abc import Iterator


class RunStopped(RuntimeError):
    """Base class: the run stopped because further training would use something wrong."""


class RewardError(RunStopped):
    """A rollout has no usable reward."""


class EnvironmentDown(RunStopped):
    """The environment of the rollouts does not work, or fails too often."""


class NonFiniteError(RunStopped):
    """A loss or a log-probability is NaN or infinite."""


class FrozenError(RunStopped):
    """An optimizer step left parameters unchanged that it should have trained."""


class CheckpointError(RunStopped):
    """No checkpoint is complete, or the complete one cannot be loaded."""


class ModelCodeError(RunStopped):
    """A model brings its own code, and the recipe does not name the model."""


class Terminated(RunStopped):
    """SIGTERM: the run ended between two rollouts, after a checkpoint."""


class UnusablePrompts(ValueError):
    """The data set does not fill one rollout, or suits another model: a wrong setting."""


class LostProcess(RuntimeError):
    """A process or a whole node of the run is lost; the message says which."""


class EngineLost(RunStopped):
    """A rollout engine died or hung, and could not be replaced."""


class EngineReplaced(RuntimeError):
    """A restarted rollout engine was called before it had its weights."""


class SyncError(RunStopped):
    """Engine and trainer disagree about log-probabilities."""


def cause_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, and so on to the innermost, through Ray's task errors."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        yield current
        inner = getattr(current, "cause", None)
        current = inner if isinstance(inner, BaseException) else current.__cause__


def reraise_run_error(error: BaseException) -> None:
    """Raise the error of this module inside Ray's task errors. Do nothing if there is none."""
    for current in cause_chain(error):
        for kind in (Terminated, CheckpointError, EngineLost, RunStopped, UnusablePrompts):
            if isinstance(current, kind):
                raise kind(str(getattr(current, "cause", current))) from None
