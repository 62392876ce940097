"""Errors that stop a run on purpose; each carries its whole message, so that it survives Ray."""


class RunStopped(RuntimeError):
    """Base: the run stopped because going on would train on something wrong."""


class RewardError(RunStopped):
    """A rollout has no usable reward."""


class RetrievalError(RunStopped):
    """The search engine does not answer, or too often not."""


class NonFiniteError(RunStopped):
    """A loss or a log-probability is NaN or infinite."""


class UnusablePrompts(ValueError):
    """Base: the data do not suit the run; a wrong setting, not a run that stopped."""


class TooFewPrompts(UnusablePrompts):
    """The data set does not fill one rollout."""


class UnfitPrompts(UnusablePrompts):
    """The prompts are written for another family of models."""


class SyncError(RunStopped):
    """The engine that samples and the policy that learns disagree about log-probabilities."""
