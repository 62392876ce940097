"""Where the recipes are that come with the project.

``sg_rlhf/configs`` is a link to the repository's ``configs`` in a checkout, and a folder of its own
in an installed package.
"""

from __future__ import annotations

from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "configs"


def recipe_path(given: str | Path) -> Path:
    """A recipe's file as named, or, where there is none, the shipped one of this name.

    The name is that in a checkout: ``configs/kk/grpo_sg_tiny_cpu.yaml``.
    """
    path = Path(given)
    if path.exists() or path.is_absolute() or path.parts[:1] != ("configs",):
        return path
    shipped = CONFIGS.joinpath(*path.parts[1:])
    return shipped if shipped.is_file() else path
