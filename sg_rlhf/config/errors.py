"""What a wrong recipe raises."""


class ConfigError(ValueError):
    """A recipe or an override is wrong; the message is one line for the user."""
