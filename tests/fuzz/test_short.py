"""The short profile: some inputs for each target, in `make test`; `make fuzz` has the long one."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.targets import TARGETS

EXAMPLES = 60


@pytest.mark.parametrize("name", TARGETS)
def test_only_documented_errors_in_time_and_in_range(name: str) -> None:
    target, inputs, slowness = TARGETS[name]
    given(inputs)(
        settings(
            max_examples=max(8, EXAMPLES // slowness), database=None, deadline=None,
            suppress_health_check=list(HealthCheck),
        )(target)
    )()  # fmt: skip
