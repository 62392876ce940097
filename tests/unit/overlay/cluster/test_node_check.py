"""What is said of machines whose packages are not the driver's."""

from __future__ import annotations

from sg_rlhf.common.environment import versions
from sg_rlhf.overlay.cluster import node_check


def test_what_the_workers_need_is_found_with_all_that_it_needs() -> None:
    names = node_check.dependency_closure()
    assert {"openrlhf", "ray", "torch", "transformers", "tokenizers", "numpy"} <= {*names}
    assert "ruff" not in names and "pytest" not in names  # tools may be other ones
    assert versions(names).keys() == {*names}


def test_equal_machines_have_nothing_said_of_them() -> None:
    here = {"ray": "2.60.0", "torch": "2.13.0"}
    assert node_check.diff("10.0.0.2", here, {**here, "more": "1"}) == ""


def test_other_versions_and_missing_packages_are_named() -> None:
    here = dict.fromkeys("abcdefg", "1")
    said = node_check.diff("10.0.0.2", here, {"a": "1", "b": "2"})
    assert said.startswith(
        "machine 10.0.0.2 has other packages: b 2 (here 1), c missing (here 1), "
        "d missing (here 1), e missing (here 1) and 2 more; "
    )
