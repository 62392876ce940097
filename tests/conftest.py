"""Settings for every test: no network, no noise, the same random examples each time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "disabled")

# No deadline: a busy machine is not a bug. Derandomized: a red run is red again.
settings.register_profile("repository", deadline=None, derandomize=True)
settings.load_profile("repository")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    integration = Path(__file__).parent / "integration"
    for item in items:
        if integration in item.path.parents:
            item.add_marker(pytest.mark.integration)
