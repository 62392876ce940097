"""What a wrong recipe raises."""

from sg_rlhf.common.text import OneLineError


class ConfigError(OneLineError):
    """A recipe or an override is wrong; the message is one line for the user."""


class MissingFile(ConfigError):
    """A recipe names a file that is not on this machine, or names none yet."""
