"""OpenRLHF's settings: type, range, default and meaning of each, and the check of a value.

``upstream_flags.json`` lists them, so that a recipe is checked without OpenRLHF and without its
imports. A test compares the list with the parser of the installed OpenRLHF, which does not check
ranges and fails much later.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, StrictBool, TypeAdapter, ValidationError

from sg_rlhf.algo.objectives import OBJECTIVES
from sg_rlhf.common.redaction import redact
from sg_rlhf.config.errors import ConfigError

LIST = Path(__file__).with_suffix(".json")
#: Schedules of transformers that run with the arguments that upstream gives. The others need a
#: metric at each step, or the number of their decay steps.
SCHEDULES = (
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial",
    "inverse_sqrt", "cosine_with_min_lr", "cosine_warmup_with_min_lr",
)  # fmt: skip
#: What the overlay adds to upstream's choices.
POLICY_LOSS_TYPES = ("weighted_ppo", *(n for n in OBJECTIVES if n != "ppo"))
KL_ESTIMATORS = ("wk3", "wk3_eq11")
#: Eq. 5 of arXiv 2511.00066: the mean over prompts of each one's token mean.
PROMPT_MEAN = "prompt-mean"
EXTRA_CHOICES = {
    "actor.policy_loss_type": POLICY_LOSS_TYPES,
    "actor.loss_agg_mode": (PROMPT_MEAN,),
    "algo.kl.estimator": KL_ESTIMATORS,
    "ds.param_dtype": ("fp32",),
    "actor.lr_scheduler": SCHEDULES,
    "critic.lr_scheduler": SCHEDULES,
}
#: pydantic's bounds, in words.
BOUNDS = {
    "ge": "{:.12g} or more",
    "gt": "above {:.12g}",
    "le": "at most {:.12g}",
    "lt": "below {:.12g}",
}
_TYPES = {"bool": bool, "int": int, "float": float, "str": str}


@dataclass(frozen=True)
class Flag:
    """A setting of upstream."""

    key: str  # its dotted name
    type: type  # of the value, or of each item of a list
    default: Any  # upstream's
    help: str  # what it sets
    #: Of a list its number of items, or ``+`` or ``*`` for any; None for a single value.
    nargs: int | str | None = None
    choices: tuple[str, ...] | None = None  # all values, if they are few
    bounds: Mapping[str, float] = field(default_factory=dict)  # of a number: ge, gt, le, lt
    also: float | None = None  # a value outside the bounds, such as -1 for "never"
    infinite: bool = False  # a number may be infinite, upstream's "no limit"

    def describe(self) -> str:
        """The values that a recipe may set, in words."""
        if self.type is bool:
            return "true or false"
        words = {int: "an integer", float: "a number", str: "text"}[self.type]
        if self.choices:
            words = "one of " + ", ".join(self.choices)
        words = ", ".join([words, *(BOUNDS[name].format(at) for name, at in self.bounds.items())])
        if self.also is not None:
            words += f", or {self.also:g}"
        count = f"{self.nargs} times " if isinstance(self.nargs, int) else ""
        return words if self.nargs is None else f"a list ({count}{words})"

    @functools.cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self._annotation(), config=ConfigDict(coerce_numbers_to_str=True))

    def _annotation(self) -> Any:
        if self.type is bool:
            return StrictBool
        one: Any
        if self.choices:
            one = Annotated[Literal[self.choices], BeforeValidator(_on_or_off)]
        elif self.type is str:
            one = Annotated[str, Field(pattern=r"^[^\x00]*$")]  # a process gets it as an argument
        else:
            limits: dict[str, Any] = dict(self.bounds)
            if self.type is float:
                limits["allow_inf_nan"] = self.infinite
            one = Annotated[self.type, Field(**limits), BeforeValidator(_number)]
        if self.also is not None:
            one |= Annotated[self.type, Field(ge=self.also, le=self.also)]
        if self.nargs is None:
            return one
        exact = self.nargs if isinstance(self.nargs, int) else None
        items = Annotated[list[one], Field(min_length=exact, max_length=exact)]
        return Annotated[items, BeforeValidator(lambda v: v if isinstance(v, list) else [v])]

    def checked(self, value: Any, where: str) -> Any:
        """A recipe's value, in the setting's type.

        ``null`` stays None where upstream's default is None. Elsewhere it is refused, as upstream
        would train with its default. ``where`` is the file or the command line that sets it.
        """
        if value is None and self.default is None:
            return None
        try:
            return self._adapter.validate_python(value)
        except ValidationError:
            given, hint = repr(redact(self.key, value)), ""
            if value is None:
                default = json.dumps(redact(self.key, self.default))
                given = "null"
                hint = f"; OpenRLHF would take its default, {default}: set a value, or leave it out"
            expected = self.describe()
            raise ConfigError(f"{where}: {self.key}={given}: expected {expected}{hint}") from None


def _number(value: Any) -> Any:
    """Refuse truth values, which are integers to pydantic, and NaN."""
    if isinstance(value, bool) or value != value:
        raise ValueError
    return value


def _on_or_off(value: Any) -> Any:
    """YAML reads the bare words as truth values."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


@functools.cache
def flags() -> dict[str, Flag]:
    """Every setting of upstream by its dotted key, with the overlay's choices."""
    table = {}
    for key, entry in json.loads(LIST.read_text()).items():
        bounds = {name: entry.pop(name) for name in BOUNDS if name in entry}
        choices = (*entry.pop("choices", ()), *EXTRA_CHOICES.get(key, ())) or None
        kind = _TYPES[entry.pop("type")]
        table[key] = Flag(key, kind, bounds=bounds, choices=choices, **entry)
    return table
