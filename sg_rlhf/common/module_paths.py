"""`module:NAME`: the file or folder of an installed module, wherever it is installed."""

from __future__ import annotations

import importlib.util

PREFIX = "module:"


def place_of(value: str) -> str:
    """`value`, or for `module:NAME` the module's file or folder, without importing it.

    Raises:
        ModuleNotFoundError: no such module is installed.
    """
    if not value.startswith(PREFIX):
        return value
    name = value.removeprefix(PREFIX)
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(name)
    if spec.origin and not spec.origin.endswith("__init__.py"):
        return spec.origin
    return str(next(iter(spec.submodule_search_locations or [])))
