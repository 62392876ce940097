"""Parameters of weightings and objectives, with their ranges.

A class lists its parameters once, as fields of a frozen dataclass made by ``number``, ``integer``,
``choice``, ``switch`` or ``numbers``. Recipes, help texts and documentation read the same fields.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
import sys
import traceback
from collections.abc import Mapping
from dataclasses import Field, dataclass
from typing import Any, TypeVar

T = TypeVar("T", bound="Parameters")


class ParameterError(ValueError):
    """A parameter's value is refused."""

    def __init__(self, name: str, value: object, expected: str) -> None:
        super().__init__(f"{name}={value!r}: expected {expected}")
        self.name, self.value, self.expected = name, value, expected


@dataclass(frozen=True)
class Range:
    """The values that a parameter takes.

    Attributes:
        kind: ``number``, ``integer``, ``switch``, ``choice`` or ``numbers`` (a tuple, or None).
        above: exclusive lower bound, or None.
        least, most: inclusive bounds, or None.
        why: what goes wrong outside the range, for the error message.
    """

    kind: str
    about: str
    above: float | None = None
    least: float | None = None
    most: float | None = None
    choices: tuple[str | None, ...] = ()
    why: str = ""

    def expected(self) -> str:
        """The values, in words."""
        if self.kind == "choice":
            return "one of " + ", ".join(map(str, self.choices))
        if self.kind == "switch":
            return "true or false"
        noun = {"integer": "an integer", "numbers": "a list of numbers"}.get(self.kind, "a number")
        if self.least is not None and self.most is not None:
            noun += f" from {self.least:g} to {self.most:g}"
        elif self.above is not None and self.most is not None:
            noun += f" above {self.above:g}, at most {self.most:g}"
        elif self.kind == "number":
            noun = "a finite number"
        if self.most is None and self.above is not None:
            noun += f" above {self.above:g}"
        elif self.most is None and self.least is not None:
            noun += f" of {self.least:g} or more"
        return noun + (f", {self.why}" if self.why else "")

    def normal(self, value: Any) -> Any:
        """The value in the field's type: a list as a tuple, an int as a float for a ``number``."""
        if self.kind == "numbers" and isinstance(value, list):
            return tuple(value)
        if self.kind == "number" and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        return value

    def takes(self, value: object) -> bool:
        """Whether the value is in the range."""
        if self.kind == "choice":
            return value in self.choices
        if self.kind == "switch":
            return isinstance(value, bool)
        if self.kind == "numbers":
            return value is None or (
                isinstance(value, tuple) and len(value) > 0 and all(map(self._in_bounds, value))
            )
        return self._in_bounds(value)

    def _in_bounds(self, value: object) -> bool:
        kinds = int if self.kind == "integer" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
            return False
        return (
            (self.above is None or value > self.above)
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
        )


def number(
    default: float,
    about: str,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    why: str = "",
) -> Any:
    """A field that is a finite number within bounds."""
    return _field(default, Range("number", about, above, least, most, why=why))


def integer(default: int, about: str, *, least: float | None = None) -> Any:
    """A field that is a whole number."""
    return _field(default, Range("integer", about, least=least))


def choice(default: str | None, choices: tuple[str | None, ...], about: str, why: str = "") -> Any:
    """A field that is one of a few words."""
    return _field(default, Range("choice", about, choices=choices, why=why))


def switch(default: bool, about: str) -> Any:
    """A field that is true or false."""
    return _field(default, Range("switch", about))


def numbers(about: str, *, least: float | None = None) -> Any:
    """A field that is a list of numbers, or None."""
    return _field(None, Range("numbers", about, least=least))


def _field(default: Any, allowed: Range) -> Any:
    return dataclasses.field(default=default, metadata={"range": allowed})


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Base of classes that are chosen by name and have parameters."""

    def __post_init__(self) -> None:
        for name, allowed in self.ranges().items():
            value = getattr(self, name)
            if not allowed.takes(value):
                raise ParameterError(name, value, allowed.expected())
        self.check()

    def check(self) -> None:
        """Check conditions on several parameters; raises ParameterError or ValueError."""

    @classmethod
    def ranges(cls) -> dict[str, Range]:
        """The range of each parameter, in the order of the fields."""
        ranges = {field.name: field.metadata.get("range") for field in dataclasses.fields(cls)}
        return {name: allowed for name, allowed in ranges.items() if allowed is not None}

    def parameters(self) -> dict[str, Any]:
        """name: value of every parameter."""
        return {name: getattr(self, name) for name in self.ranges()}

    @classmethod
    def summary(cls) -> str:
        """The first line of the docstring."""
        return (cls.__doc__ or "").strip().split("\n")[0].rstrip(".")


def find_class(name: object, registry: Mapping[str, type[T]], base: type[T]) -> type[T]:
    """A registered class, or a subclass of ``base`` by ``package.module:Class``; ParameterError."""
    if isinstance(name, str) and name in registry:
        return registry[name]
    if isinstance(name, str) and ":" in name:
        return _imported(name, base)
    near = difflib.get_close_matches(str(name), registry, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ParameterError("type", name, f"one of {', '.join(registry)}, or module:Class{hint}")


def make(cls: type[T], parameters: Mapping[str, Any]) -> T:
    """An instance; ParameterError for an unknown parameter, with the nearest, or a bad value."""
    known = cls.ranges()
    for name in parameters:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f" (did you mean {near[0]}?)" if near else ""
            expected = f"one of the keys {', '.join(known)}{hint}" if known else "no parameters"
            raise ParameterError(name, parameters[name], expected)
    return cls(**{name: known[name].normal(value) for name, value in parameters.items()})


def _imported(name: str, base: type[T]) -> type[T]:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the module does while it is imported
        reason = str(error)
        if not isinstance(error, (ImportError, AttributeError)):
            lines = [f for f in traceback.extract_tb(error.__traceback__) if f.name == "<module>"]
            where = f" ({lines[-1].filename}, line {lines[-1].lineno})" if lines else ""
            reason = " ".join(f"{type(error).__name__}: {error}{where}".split())
        raise ParameterError(
            "type", name, f"module:Class that can be imported: {reason}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ParameterError("type", name, f"a subclass of {base.__module__}.{base.__name__}")
    _check_is_dataclass(name, found, base)
    return found


def _check_is_dataclass(name: str, cls: type, base: type) -> None:
    """Refuse a class whose fields are no parameters, as ``@dataclass`` is missing above it."""
    for owner in cls.__mro__:
        if owner in base.__mro__ or "__dataclass_fields__" in vars(owner):
            continue
        annotations = vars(owner).get("__annotations__", {})
        fields = [key for key, kind in annotations.items() if "ClassVar" not in str(kind)]
        fields += [key for key, value in vars(owner).items() if isinstance(value, Field)]
        if fields:
            raise ParameterError(
                "type",
                name,
                f"@dataclass(frozen=True, kw_only=True) above {place_of(owner)}: without it "
                f"{fields[0]} is no parameter",
            )


def place_of(cls: type) -> str:
    """A class and its file, for messages."""
    module = sys.modules.get(cls.__module__)
    return f"class {cls.__qualname__} of {getattr(module, '__file__', cls.__module__)}"
