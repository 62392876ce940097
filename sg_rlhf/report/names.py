"""What runs and groups of runs are called, from their folders and the folders around them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sg_rlhf.report.text import one_line

#: A folder named so says which seed, not which experiment: ``s0-c30b4c32``, ``seed_1``, ``7``.
_SEED_ALONE = re.compile(r"(s|seed)?[-_. ]*\d*([-_. ]+[0-9a-f]{8})?")


def run_names(paths: list[Path]) -> list[str]:
    """The folders' names; below what holds all runs, where a name is not enough.

    Args:
        paths: run directories, resolved.
    """
    names = [path.name for path in paths]
    base = _common_folder(paths)
    return [
        one_line(str(path.relative_to(base)))
        if names.count(path.name) > 1 or _SEED_ALONE.fullmatch(path.name)
        else one_line(path.name) or "run"
        for path in paths
    ]


def group_names(groups: list[list[Path]]) -> list[str]:
    """A name for each group: what its runs' names have in common, or else their folders'.

    Args:
        groups: run directories, resolved, of each group.
    """
    names = [_common_name([path.name for path in paths]) for paths in groups]
    bare = [_SEED_ALONE.fullmatch(name) is not None for name in names]
    if any(bare) or len(set(names)) < len(names):
        folders = _names_of_folders(groups)
        if len(set(folders)) == len(folders):
            names = folders
        else:
            names = [folders[i] if bare[i] else names[i] for i in range(len(names))]
    return _numbered([one_line(name) for name in names])


def _names_of_folders(groups: list[list[Path]]) -> list[str]:
    """The folders that a group's runs share, from the first on that is not everybody's."""
    base = _common_folder([path for paths in groups for path in paths])
    names = []
    for paths in groups:
        parts = zip(*(path.parent.relative_to(base).parts for path in paths), strict=False)
        shared = [part[0] for part in parts if len(set(part)) == 1]
        names.append("/".join(shared) or _common_folder(paths).name)
    return names


def _common_folder(paths: list[Path]) -> Path:
    return Path(os.path.commonpath([path.parent for path in paths]))


def _common_name(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    common = os.path.commonprefix(names)  # noqa: RUF071  (names, not paths)
    common = re.sub(r"([-_. ]+(s|seed)?\d*|\d+)$", "", common)
    return common or names[0]


def _numbered(names: list[str]) -> list[str]:
    """Equal names get a number each."""
    return [
        f"{name} [{names[: index + 1].count(name)}]" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]
