"""Writes the tables of docs/configuration.md from the settings' schemas.

    python docs/make_configuration.py [--check]

Keys of ours come from ``sg_rlhf.config.sg_settings`` and the domains' settings, OpenRLHF's from
``sg_rlhf/config/upstream_flags.json``, and other trainers' names from
``sg_rlhf.config.old_names``. ``--check`` writes nothing and fails if the page would change.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from made_tables import main
from pydantic import BaseModel

from sg_rlhf.common.text import table_head, table_row
from sg_rlhf.config import load_config
from sg_rlhf.config.old_names import OLD_NAMES
from sg_rlhf.config.sg_settings import SGSettings
from sg_rlhf.config.upstream_flags import BOUNDS, flags
from sg_rlhf.tasks.search.settings import SearchSettings

ROOT = Path(__file__).parents[1]
#: Set by the run itself, or a section with tables of its own.
NOT_LISTED = ("run_dir", "domains")
HEAD = ("key", "default", "values", "meaning")


def code(value: Any) -> str:
    """A value as a recipe has it."""
    if value in (None, float("inf")):
        return "`null`" if value is None else "no limit"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def kind(annotation: Any) -> str:
    """The values of a field's type, in words."""
    if get_origin(annotation) is Literal:
        return ", ".join(code(value) for value in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        parts = [kind(part) for part in get_args(annotation) if part is not type(None)]
        return " or ".join([*parts, "`null`"])
    names = {bool: "`true`, `false`", int: "integer", float: "number", str: "text"}
    return names.get(annotation, "list" if get_origin(annotation) is list else "mapping")


def of_schema(schema: type[BaseModel], prefix: str) -> list[str]:
    """The table of a schema of ours."""
    lines = table_head(HEAD)
    for name, field in schema.model_fields.items():
        if name in NOT_LISTED:
            continue
        words = [
            text.format(getattr(bound, key))
            for bound in field.metadata
            for key, text in BOUNDS.items()
            if hasattr(bound, key)
        ]
        values = ", ".join([kind(field.annotation), *words])
        lines.append(
            table_row([f"`{prefix}.{name}`", code(field.default), values, field.description])
        )
    return lines


def of_upstream(section: str) -> list[str]:
    """The table of one section of OpenRLHF's keys; ``""`` for those without a section."""
    base = load_config(ROOT / "configs" / "base.yaml").values
    lines = table_head(["key", "OpenRLHF's default", "`base.yaml`", "values", "meaning"])
    for key, flag in sorted(flags().items()):
        if (key.split(".")[0] if "." in key else "") != section:
            continue
        in_base = code(base[key]) if key in base else ""
        lines.append(
            table_row([f"`{key}`", code(flag.default), in_base, flag.describe(), flag.help])
        )
    return lines


def of_other_trainers() -> list[str]:
    """Names of other trainers with ours."""
    lines = table_head(["there", "here"])
    for name, ours in OLD_NAMES.items():
        lines.append(table_row([f"`{name}`", ", ".join(f"`{key}`" for key in ours)]))
    return lines


def sections() -> list[str]:
    """The sections of OpenRLHF's keys, in the page's order."""
    return sorted({key.split(".")[0] for key in flags() if "." in key})


def tables() -> Mapping[str, Any]:
    """Every table of the page by its name."""
    return {
        "sg": partial(of_schema, SGSettings, "sg"),
        "search": partial(of_schema, SearchSettings, "sg.search"),
        **{name: partial(of_upstream, name) for name in sections()},
        "others": partial(of_upstream, ""),
        "other trainers": of_other_trainers,
    }


if __name__ == "__main__":
    raise SystemExit(main(ROOT / "docs" / "configuration.md", tables()))
