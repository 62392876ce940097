"""Settings for every test: no network, no noise, the same random examples each time."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import host

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "disabled")

# No deadline: a busy machine is not a bug. Derandomized: a red run is red again.
settings.register_profile("repository", deadline=None, derandomize=True)
settings.load_profile("repository")


@pytest.fixture(autouse=True)
def process_stays_as_it_was() -> Iterator[None]:
    """A command that a test calls in this process sets variables and signal handlers."""
    before = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def pytest_report_header() -> list[str]:
    why = host.why_no_engine()
    return [f"tests/integration: most are skipped: {why}"] if why else []


#: Seconds for a test that trains or starts servers, its fixtures included: for one that hangs.
LONGEST = 3600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    integration, faults = (Path(__file__).parent / name for name in ("integration", "faults"))
    why = host.why_no_engine()
    for item in items:
        if {integration, faults} & {*item.path.parents} and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONGEST))
        if integration in item.path.parents:
            item.add_marker(pytest.mark.integration)
            if why and item.path.name not in host.WITHOUT_ENGINE:
                item.add_marker(pytest.mark.skip(reason=why))
    # After pytest-randomly's shuffle: the longest files should not be the last to begin.
    items.sort(key=lambda item: integration not in item.path.parents)
