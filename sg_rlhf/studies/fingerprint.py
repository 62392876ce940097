"""What a cell trains, in the words that settings had when the first cells were trained.

A finished cell is recognised by a hash of its settings. A setting that gets another name or
place later trains the same run, and must not ask for it again: so the hash is of the first words,
and of what has no such word where it is not at its default.
"""

from __future__ import annotations

from typing import Any

from sg_rlhf.algo.weightings import Weighting, weighting_class
from sg_rlhf.algo.weightings.short_forms import SHORT_FORMS, parameter_of
from sg_rlhf.config import Config
from sg_rlhf.config.resume_compatibility import NUMERICS_ONLY

#: Where and how a run writes: the same run elsewhere is the same cell.
PLACES = ("sg.run_dir", "ckpt.", "logger.")
#: How it is computed: with or without padding, and the rest of that kind.
LAYOUT = ("ds.packing_samples", *NUMERICS_ONLY)
#: Settings and parameters of every weighting that came later.
ADDED = frozenset({
    "batches", "probability", "correction", "truncated_sampling", "batch_invariant",
    "max_staleness", "stale", "uncorrected",
})  # fmt: skip
#: Sections of domains that the first recipes had, empty where they set nothing.
SECTIONS = ("search",)
#: Values, or their starts, that were called otherwise.
RENAMED = {"module:sg_rlhf.tiny.": "module:sg_rlhf.lab.", "weighted_ppo": "grpo_sg"}


def decisive(config: Config) -> dict[str, Any]:
    """Everything that decides what a recipe trains, by its first name."""
    changed = config.sg.model_dump(exclude_defaults=True)
    own = config.sg.model_dump()
    weighting, objective = own.pop("weighting"), own.pop("objective")
    own |= dict.fromkeys(SECTIONS, None) | own.pop("domains")
    settings = {
        f"sg.{name}": value for name, value in own.items() if name not in ADDED or name in changed
    }
    if objective:
        settings["sg.objective"] = objective
    return {
        key: _first_value(value)
        for key, value in {**config.values, **settings, **_flat(weighting)}.items()
        if not key.startswith(PLACES + LAYOUT)
    }


def _flat(section: dict[str, Any]) -> dict[str, Any]:
    """``sg.weighting`` as the flat keys that every recipe had, whatever its weighting read."""
    weighting = weighting_class(section["type"])
    found = {"sg.shaping": section["type"]}
    rest = {name: value for name, value in section.items() if name != "type"}
    for flat, (owner, _) in SHORT_FORMS.items():
        if flat in ADDED:
            continue
        name = parameter_of(flat, weighting)
        found[f"sg.{flat}"] = _default(owner, flat) if name is None else rest.pop(name)
    for name, value in rest.items():
        if name not in ADDED or value != _default(Weighting, name):
            found[f"sg.weighting.{name}"] = value
    return found


def _default(owner: type[Weighting], flat: str) -> Any:
    return getattr(owner, SHORT_FORMS[flat][1])


def _first_value(value: Any) -> Any:
    for name, first in RENAMED.items():
        if isinstance(value, str) and value.startswith(name):
            return first + value.removeprefix(name)
    return value
