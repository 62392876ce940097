"""Where processes are placed, and which nodes a run has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sg_rlhf.common.environment import versions
from sg_rlhf.config.derived.topology import Group, groups
from sg_rlhf.overlay.cluster import node_check, placement
from sg_rlhf.overlay.cluster.placement import Node, bundles, missing_resources
from sg_rlhf.overlay.settings.lookup import value_of

# -- Which places a run asks a cluster for, and what is said of those that are missing -----------


def run(
    *, all_together: bool = False, actor_ref: bool = False, reward: bool = False,
    kl: float = 0.01, asynchronous: bool = False,
) -> SimpleNamespace:  # fmt: skip
    model = SimpleNamespace(num_nodes=2, num_gpus_per_node=2)
    return SimpleNamespace(
        actor=model,
        ref=model,
        reward=SimpleNamespace(
            num_nodes=1, num_gpus_per_node=3, remote_url=None if reward else "r.py"
        ),
        vllm=SimpleNamespace(num_engines=2, tensor_parallel_size=2),
        algo=SimpleNamespace(kl=SimpleNamespace(init_coef=kl)),
        train=SimpleNamespace(
            colocate_all=all_together,
            colocate_actor_ref=actor_ref,
            async_enable=asynchronous,
            agent_func_path=None,
        ),
    )


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (run(all_together=True), [("policy, reference, engines", 4)]),
        (run(all_together=True, kl=0.0), [("policy, engines", 4)]),
        (run(all_together=True, asynchronous=True), [("policy, reference", 4), ("engines", 4)]),
        (run(all_together=True, reward=True), [("policy, reference, engines, reward", 4)]),
        (run(actor_ref=True), [("policy, reference", 4), ("engines", 4)]),
        (run(), [("engines", 4), ("policy", 4), ("reference", 4)]),
        (run(kl=0.0), [("engines", 4), ("policy", 4)]),
        (run(reward=True), [("engines", 4), ("policy", 4), ("reference", 4), ("reward", 3)]),
        (
            run(actor_ref=True, reward=True),
            [("policy, reference", 4), ("engines", 4), ("reward", 3)],
        ),
    ],
)
def test_models_that_share_their_gpus_are_one_group(
    args: SimpleNamespace, expected: list[tuple[str, int]]
) -> None:
    found = [(", ".join(group.models), group.size) for group in groups(value_of(args))]
    assert found == expected


def test_every_model_finds_its_group_and_its_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller's bundle, the last of the first group, has no GPU."""
    first: Any = SimpleNamespace(bundle_count=5)
    second: Any = SimpleNamespace(bundle_count=4)
    placed = placement.Placement(
        (first, second), (Group(("policy", "engines"), 4), Group(("reference",), 4))
    )
    nodes = {0: "a", 1: "b", 2: "a", 3: "b", 4: "a"}
    monkeypatch.setattr(
        placement, "placement_group_table", lambda _group: {"bundles_to_node_id": nodes}
    )
    assert placed.group_of("policy") is first and placed.group_of("reference") is second
    assert placed.is_shared("engines") and not placed.is_shared("reference")
    assert placed.bundle_indices("engines") == [0, 2, 1, 3]
    assert placed.of_controller().placement_group_bundle_index == 4
    assert placed.nodes() == ["a", "b"]


def test_the_controller_has_a_place_behind_the_first_groups() -> None:
    wanted = [Group(("policy",), 2), Group(("engines",), 1)]
    place = {"GPU": 1.0, "CPU": 1.0}
    assert bundles(0, wanted) == [place, place, {"CPU": 1.0}]
    assert bundles(1, wanted) == [place]


def node(number: int, gpus: float, cpus: float, free_gpus: float, free_cpus: float) -> Node:
    return Node(
        f"10.0.0.{number}", {"GPU": gpus, "CPU": cpus}, {"GPU": free_gpus, "CPU": free_cpus}
    )


def test_what_is_missing() -> None:
    places = bundles(0, [Group(("policy",), 4)])
    there = [node(1, 2, 4, 2, 4), node(2, 1, 2, 0, 1), Node("10.0.0.3", {"CPU": 1.0}, {})]
    assert missing_resources(places, there) == (
        "2 of 4 places of 1 GPU and 1 CPU missing, 1 of them in use (free: 10.0.0.1 "
        "2 of 2 GPU and 4 of 4 CPU, 10.0.0.2 0 of 1 GPU and 1 of 2 CPU, 10.0.0.3 0 of 0 GPU and "
        "0 of 1 CPU)"
    )


def test_the_controller_goes_where_no_gpu_is_waiting_for_a_cpu() -> None:
    places = bundles(0, [Group(("policy",), 2)])
    there = [node(1, 2, 2, 2, 2), Node("10.0.0.2", {"CPU": 1.0}, {"CPU": 1.0})]
    assert "missing" not in missing_resources(places, there)
    assert missing_resources(places, there[:1]).startswith("1 of 1 places of 1 CPU missing (free: ")


def test_nothing_is_missing_but_ray_has_not_given_it_yet() -> None:
    places = bundles(0, [Group(("policy",), 1)])
    assert missing_resources(places, [node(1, 1, 2, 1, 2)]).startswith(
        "all are free, and not given yet"
    )


# -- What is said of machines whose packages are not the driver's --------------------------------


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
