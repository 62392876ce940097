"""What the tests of the device share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.software_gpu.children import Machine


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A machine of its own; its devices have 4 GiB."""
    made = Machine(SOFTWARE_GPU_GIB="4")
    yield made
    made.close()
