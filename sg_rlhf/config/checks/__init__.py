"""Settings of a recipe that do not go together, found from the recipe alone.

``train``, its ``--dry-run``, ``plan`` and ``doctor`` all call :func:`problems`. Single values are
checked when the recipe is read (``upstream_flags``, ``sg_settings``), files by ``input_files``.
"""

from __future__ import annotations

from sg_rlhf.config.checks import engine_args, layout, losses
from sg_rlhf.config.errors import ConfigError
from sg_rlhf.config.recipe import Config

#: Each takes ``Config.value`` and raises ValueError with one line: keys, values and the remedy.
CHECKS = (
    layout.check_unsupported,
    layout.check_reward,
    layout.check_generation,
    layout.check_placement,
    layout.check_batches,
    layout.check_async,
    layout.check_engines,
    engine_args.check_engine_args,
    losses.check_advantages,
    losses.check_aggregation,
    losses.check_weighting,
    losses.check_schedule,
    losses.check_nonfinite,
)


def problems(config: Config) -> list[str]:
    """The settings that do not go together: a line for each, with keys, values and remedy."""
    try:
        layout.check_engine_count(config.value)  # the other checks multiply by it
    except ConfigError as error:
        return [str(error)]
    found = []
    for check in CHECKS:
        try:
            check(config.value)
        except ValueError as error:
            found.append(str(error))
    return found


def check(config: Config) -> None:
    """Refuse a recipe with settings that do not go together."""
    for line in problems(config):
        raise ConfigError(line)
