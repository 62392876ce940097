"""A machine of a cluster is killed mid-run: the run ends in time, and goes on to the same end."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from sg_rlhf.overlay.cluster import locations
from sg_rlhf.run_dir import jsonl_log
from tests.clusters import Cluster, Submitted, cluster
from tests.faults import kill_matrix
from tests.integration.conftest import Data, command, data, environment

__all__ = ["data"]  # the fixture

pytestmark = [pytest.mark.integration, pytest.mark.full]

APART = ("train.colocate_all=false", "train.colocate_actor_ref=true", "train.num_episodes=20")
#: Ray notices within 15 s that a machine is gone; an engine may look for another place for 20.
DEADLINE_SECONDS = 90.0


def train(run_dir: Path, data: Data) -> list[str]:
    return command(run_dir, data, *kill_matrix.OVERRIDES, *APART)[3:]


def kill_the_engines(made: Cluster, run_dir: Path) -> str:
    """Kill the machine of the engine; its address."""
    places = json.loads((run_dir / locations.FILE).read_text())[locations.KEY]
    (address,) = [at for at, machine in places.items() if "rollout engine" in machine]
    (machine,) = [one for one in made.machines if one.address == address]
    machine.kill()
    return address


def test_the_engines_machine_dies_and_another_comes(tmp_path: Path, data: Data) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    # The head has no GPU, so it is none of the run's machines.
    with cluster(tmp_path / "cluster", environment(), 0, 1, 1) as made:
        run = Submitted(made, train(whole, data))
        assert run.finish() == 0, run.output

        run = Submitted(made, train(killed, data))
        run.await_file(killed / jsonl_log.METRICS, 3)
        address = kill_the_engines(made, killed)
        began = time.monotonic()
        assert run.finish(DEADLINE_SECONDS) == 1, run.output
        print(f"ended after {time.monotonic() - began:.0f} s")
        assert f"rollout engine 0 is lost with its machine {address}, and no other" in run.output
        assert "the same command resumes from the last checkpoint, global_step" in run.output

        made.add(1, 3)
        run = Submitted(made, train(killed, data))
        assert run.finish() == 0, run.output
        assert "resuming from global_step" in run.output
    assert not kill_matrix.differences(whole, killed)
