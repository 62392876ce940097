"""Errors that stop a run on purpose; each carries its whole message, so that it survives Ray."""

from __future__ import annotations

from collections.abc import Iterator


class RunStopped(RuntimeError):
    """Base: the run stopped because going on would train on something wrong."""


class RewardError(RunStopped):
    """A rollout has no usable reward."""


class RetrievalError(RunStopped):
    """The search engine does not answer, or too often not."""


class NonFiniteError(RunStopped):
    """A loss or a log-probability is NaN or infinite."""


class FrozenError(RunStopped):
    """An optimizer step did not train tensors that it should have."""


class CheckpointError(RunStopped):
    """No checkpoint is whole, or the one that is cannot be loaded."""


class ModelCodeError(RunStopped):
    """A model brings code of its own, and nobody asked for it by name."""


class Terminated(RunStopped):
    """SIGTERM: the run ended between two rollouts, after a checkpoint."""


class UnusablePrompts(ValueError):
    """Base: the data do not suit the run; a wrong setting, not a run that stopped."""


class TooFewPrompts(UnusablePrompts):
    """The data set does not fill one rollout."""


class UnfitPrompts(UnusablePrompts):
    """The prompts are written for another family of models."""


class LostProcess(RuntimeError):
    """A process of the run, or a machine with several, is gone; the message says which."""


class EngineLost(RunStopped):
    """A rollout engine died or hung, and there is none in its place."""


class EngineReplaced(RuntimeError):
    """A rollout engine was started in another one's place and does not have its weights yet."""


class SyncError(RunStopped):
    """The engine that samples and the policy that learns disagree about log-probabilities."""


def cause_chain(error: BaseException) -> Iterator[BaseException]:
    """An error, what caused it, and so on to the innermost, through Ray's task errors."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        yield current
        inner = getattr(current, "cause", None)
        current = inner if isinstance(inner, BaseException) else current.__cause__


def reraise_run_error(error: BaseException) -> None:
    """Raise the error of ours that is inside a nest of Ray's task errors; nothing if none is."""
    for current in cause_chain(error):
        for kind in (Terminated, CheckpointError, RunStopped, UnusablePrompts):
            if isinstance(current, kind):
                raise kind(str(getattr(current, "cause", current))) from None
