"""Errors that stop a run on purpose; each carries its whole message, so that it survives Ray."""


class RunStopped(RuntimeError):
    """Base: the run stopped because going on would train on something wrong."""


class RewardError(RunStopped):
    """A rollout has no usable reward."""


class RetrievalError(RunStopped):
    """The search engine does not answer, or too often not."""


class NonFiniteError(RunStopped):
    """A loss or a log-probability is NaN or infinite."""


class TooFewPrompts(ValueError):
    """The data set does not fill one rollout: a wrong setting, not a run that stopped."""


class SyncError(RunStopped):
    """The engine that samples and the policy that learns disagree about log-probabilities."""
