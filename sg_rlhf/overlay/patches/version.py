"""The version of OpenRLHF that the overlay works with.

The overlay subclasses upstream and replaces names in it (:mod:`sg_rlhf.overlay.patches.table`), so
it fits one version. tests/unit/overlay/patches/test_upstream_contract.py lists and checks the
signatures and the call order that it relies on. Run that test to port the overlay.
"""

from __future__ import annotations

from importlib import metadata

from sg_rlhf.config.upstream_flags import UpstreamChanged, upstream_root

UPSTREAM_VERSION = "0.11.2"


def check_version(version: str | None = None) -> None:
    """Raise unless the installed OpenRLHF is exactly the pinned version.

    Args:
        version: OpenRLHF's version; that of the installed distribution if None.

    Raises:
        UpstreamMissing: OpenRLHF is not installed.
        UpstreamChanged: another version is installed.
    """
    if version is None:
        upstream_root()
        version = metadata.version("openrlhf")
    if version != UPSTREAM_VERSION:
        raise UpstreamChanged(
            f"OpenRLHF {version} is installed, but the overlay is written against "
            f"{UPSTREAM_VERSION}; run scripts/bootstrap.sh, or port sg_rlhf/overlay"
        )
