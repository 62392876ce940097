"""The version of OpenRLHF that the overlay works with.

The overlay subclasses upstream and replaces names in it (:mod:`sg_rlhf.overlay.patches.table`), so
it fits one version. tests/unit/overlay/patches/test_upstream_contract.py lists and checks the
signatures and the call order that it relies on. Run that test to port the overlay.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from pathlib import Path

UPSTREAM_VERSION = "0.11.2"
#: OpenRLHF publishes a wheel for this Python alone. The rest of the package runs on newer ones.
PIPELINE_PYTHON = (3, 11)


class UpstreamChanged(RuntimeError):
    """Upstream's source no longer has the shape that the overlay relies on."""


class UpstreamMissing(UpstreamChanged):
    """OpenRLHF is not installed."""


def upstream_root() -> Path:
    """Directory of the installed ``openrlhf`` package (not imported)."""
    spec = importlib.util.find_spec("openrlhf")
    if spec is None or not spec.submodule_search_locations:
        if sys.version_info[:2] != PIPELINE_PYTHON:
            raise UpstreamMissing(
                f"training needs Python 3.11, the only one with a wheel of OpenRLHF; this is "
                f"{sys.version_info[0]}.{sys.version_info[1]}. Run scripts/bootstrap.sh in a clone"
            )
        raise UpstreamMissing("OpenRLHF is not installed; run scripts/bootstrap.sh in a clone")
    return Path(next(iter(spec.submodule_search_locations)))


def check_version(version: str | None = None) -> None:
    """Raise UpstreamMissing or UpstreamChanged unless OpenRLHF is exactly the pinned version."""
    if version is None:
        upstream_root()
        version = metadata.version("openrlhf")
    if version != UPSTREAM_VERSION:
        raise UpstreamChanged(
            f"OpenRLHF {version} is installed, but the overlay is written against "
            f"{UPSTREAM_VERSION}; run scripts/bootstrap.sh, or port sg_rlhf/overlay"
        )
