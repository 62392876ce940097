"""`module:NAME` in a recipe or on a command line: the path of an installed module."""

from __future__ import annotations

import importlib.util

PREFIX = "module:"


def resolve(value: str) -> str:
    """Replace `module:NAME` by the module's file or folder; do not import it.

    Any other value is returned unchanged.

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
