"""Named corrections for the mismatch between trainer and rollout engine: upstream's four keys.

They compose with every weighting (:mod:`sg_rlhf.algo.rollout_correction`). Thresholds are those of
the projects that the names come from.
"""

from __future__ import annotations

from typing import Any

from sg_rlhf.config.errors import ConfigError

_FLAG = "algo.advantage.is_correction_{}"


def _flags(mode: str, low: float, high: float) -> dict[str, Any]:
    values = {"level": "token", "mode": mode, "gating": "ratio", "threshold": [low, high]}
    return {_FLAG.format(name): value for name, value in values.items()}


#: Name -> the keys that it sets.
CORRECTIONS = {
    # Truncated: min(pi_trainer / pi_engine, 2), https://fengyao.notion.site/off-policy-rl
    "tis": _flags("clip", 0.0, 2.0),
    # Masked: a token whose ratio is above 2 has no gradient; ms-swift's threshold.
    "mis": _flags("mask", 0.0, 2.0),
    # Masked on both sides; the band of Ring-1T (arXiv 2510.18855), upstream's default.
    "icepop": _flags("mask", 0.5, 5.0),
}


def apply_preset(
    name: str | None, values: dict[str, Any], origin: dict[str, str]
) -> dict[str, Any]:
    """Add the keys of ``sg.correction`` to a recipe's values."""
    if name is None:
        return values
    for key, value in CORRECTIONS[name].items():
        given = values.get(key)
        if given is not None and given != value:
            raise ConfigError(
                f"{origin.get(key, 'recipe')}: {key}={given}: sg.correction={name} sets it to "
                f"{value}; set only one of the two"
            )
    return values | CORRECTIONS[name]
