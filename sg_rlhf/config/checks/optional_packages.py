"""Settings that need a package which the locked environments lack.

Upstream would import it in a worker, minutes after the start. ``bitsandbytes`` is in the CUDA lock;
without CUDA its setting is refused anyway.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple


class Need(NamedTuple):
    """A setting that needs packages."""

    key: str  # upstream's
    used: Callable[[Any], bool]  # whether a value of it needs them
    modules: tuple[str, ...]  # that are imported then
    install: str  # command that installs versions which fit the locked ones
    instead: str  # a value that needs none


NEEDS = (
    # openrlhf/models/actor.py; its fused loss also passes our token weights by.
    Need("ds.use_liger_kernel", bool, ("liger_kernel",), "pip install liger-kernel==0.8.5",
         "false"),
    # openrlhf/models/actor.py, through transformers.
    Need("ds.load_in_4bit", bool, ("bitsandbytes",), "pip install bitsandbytes==0.50.2", "false"),
    # transformers/integrations/deepgemm.py loads the kernel with it from the hub.
    Need("ds.experts_implementation", lambda value: value == "deepgemm", ("kernels",),
         "pip install 'kernels>=0.16,<0.17'", "grouped_mm"),
    # openrlhf/cli/train_ppo_ray.py and datasets/utils.py: models and data of another hub.
    Need("use_ms", bool, ("modelscope",), "pip install modelscope", "false"),
)  # fmt: skip


def missing(
    value: Callable[[str], Any], installed: Callable[[str], bool] | None = None
) -> list[str]:
    """One sentence for each setting whose package is not installed."""
    has = installed or is_installed
    problems = []
    for need in NEEDS:
        given = value(need.key)
        lacking = [name for name in need.modules if not has(name)] if need.used(given) else []
        if lacking:
            shown = str(given).lower() if isinstance(given, bool) else given
            problems.append(
                f"{need.key}={shown}: needs {' and '.join(lacking)}, not "
                f"installed: {need.install}; or set {need.key}={need.instead}"
            )
    return problems


def is_installed(module: str) -> bool:
    """Whether a module is installed; our shim of flash-attn does not count."""
    found = importlib.util.find_spec(module)
    return found is not None and found.loader is not None
