"""Runs that are submitted to clusters of two and four machines: stopped, gone on with, refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sg_rlhf.overlay.cluster import locations
from sg_rlhf.run_dir import jsonl_log
from tests.clusters import Cluster, Submitted, cluster, own_mounts
from tests.integration.conftest import Data, command, environment

pytestmark = [pytest.mark.integration, pytest.mark.full]

#: The policy and its reference on one machine, the engine on the other.
APART = ("train.colocate_all=false", "train.colocate_actor_ref=true", "train.num_episodes=20")
ROLLOUTS = 40


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("two"), environment(), 1, 1) as made:
        yield made


def train(run_dir: Path, data: Data, *overrides: str) -> list[str]:
    return command(run_dir, data, *APART, *overrides)[3:]


def test_a_job_that_is_stopped_saves_and_goes_on(two: Cluster, tmp_path: Path, data: Data) -> None:
    run_dir = tmp_path / "run"
    first = Submitted(two, train(run_dir, data, "ckpt.save_steps=1000"))
    first.await_file(run_dir / jsonl_log.METRICS, 2)
    first.stop()
    assert first.finish() == 0, first.output  # Ray's status for a job that was stopped
    assert "terminated by SIGTERM, after rollout " in first.output
    done = jsonl_log.read(run_dir / jsonl_log.METRICS)[-1]["global_step"]
    assert f"resumes from the last checkpoint, global_step{done}" in first.output
    assert done < ROLLOUTS

    places = json.loads((run_dir / locations.FILE).read_text())[locations.KEY]
    homes = {who: at for at, machine in places.items() for who in machine}
    assert len(places) == 2 and homes["policy rank"] == homes["reference rank"]
    assert homes["rollout engine"] != homes["policy rank"]
    for line in locations.format_lines(places):
        assert line in first.output

    again = Submitted(two, train(run_dir, data, "train.num_episodes=2"))
    assert again.finish() == 1, again.output  # another setting than the run was started with
    assert "was started with other settings: train.num_episodes" in again.output

    again = Submitted(two, train(run_dir, data, "ckpt.save_steps=1000"))
    assert again.finish() == 0, again.output
    assert f"resuming from global_step{done} in " in again.output
    steps = [row["global_step"] for row in jsonl_log.read(run_dir / jsonl_log.METRICS)]
    assert steps == [*range(1, ROLLOUTS + 1)]


@pytest.mark.skipif(not own_mounts(), reason="machines cannot have disks of their own here")
def test_a_run_directory_that_one_machine_has_alone_is_refused(two: Cluster, data: Data) -> None:
    run_dir = two.disk / "run"
    refused = Submitted(two, train(run_dir, data))
    assert refused.finish() == 1, refused.output
    assert "failed with exit code 2" in refused.output
    assert f"error: --run-dir {run_dir}: " in refused.output
    assert "give a path on a file system that all of them share" in refused.output


def test_a_machine_with_another_version_of_a_package_is_named(
    two: Cluster, tmp_path: Path, data: Data
) -> None:
    other = tmp_path / "other" / "hjson-9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: hjson\nVersion: 9.9\n")
    machine = two.add(1, 3, PYTHONPATH=str(other.parent))
    try:
        refused = Submitted(two, train(tmp_path / "run", data, "vllm.num_engines=2"))
        assert refused.finish() == 1, refused.output
    finally:
        machine.kill()
    assert (
        f"error: machine {machine.address} has other packages: hjson 9.9 (here " in refused.output
    )
    assert not (tmp_path / "run" / jsonl_log.METRICS).exists()


def test_ranks_and_engines_over_four_machines(tmp_path: Path, data: Data) -> None:
    """Two ranks and two engines, each on a machine of its own."""
    run_dir = tmp_path / "run"
    spread = (
        "actor.num_nodes=2", "actor.num_gpus_per_node=1", "ref.num_nodes=2",
        "ref.num_gpus_per_node=1", "vllm.num_engines=2", "train.num_episodes=1",
    )  # fmt: skip
    with cluster(tmp_path / "four", environment(), 1, 1, 1, 1) as four:
        done = Submitted(four, train(run_dir, data, *spread))
        assert done.finish() == 0, done.output
    places = json.loads((run_dir / locations.FILE).read_text())[locations.KEY]
    assert len(places) == 4
    numbers = {
        who: sorted(int(n) for machine in places.values() for n in machine.get(who, {}))
        for who in ("policy rank", "reference rank", "rollout engine")
    }
    assert all(found == [0, 1] for found in numbers.values()), numbers
    rows = jsonl_log.read(run_dir / jsonl_log.METRICS)
    assert [row["global_step"] for row in rows] == [1, 2]
