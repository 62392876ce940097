"""The weight sync in buckets with a real engine: what it loads, and how it fails."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.integration.conftest import ROOT, environment, forked_python

pytestmark = [pytest.mark.integration, pytest.mark.full]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("sync") / "found.json"
    script = ROOT / "tests" / "integration" / "weight_sync_faults.py"
    subprocess.run(
        [forked_python(), str(script), str(out), forked_python()],
        cwd=ROOT, env={**environment(), "PYTHONPATH": str(ROOT)}, check=True, timeout=1800,
    )  # fmt: skip
    return dict(json.loads(out.read_text()))


def test_the_engine_has_the_trainers_weights_to_the_bit_of_upstreams_way(found: Any) -> None:
    """The output head is tied to the embedding, and packed again."""
    first, changed, by_upstream, trainers = found["log_probs"]
    assert found["messages"]["none"].startswith("sent 2 buckets")
    assert first != changed == by_upstream
    assert changed == pytest.approx(trainers, abs=1e-3)


def test_the_engine_has_the_trainers_experts(found: Any) -> None:
    """The trainer stacks them, and a checkpoint does not."""
    assert len(found["experts"]) == 2
    for loaded, same, changed in found["experts"]:
        assert max(loaded, same, changed) < 1e-5


def test_a_weight_in_a_wrong_layout_ends_the_run_at_the_log_prob_check(found: Any) -> None:
    """All bytes arrive and no error is raised: only the log-probs show it."""
    check = found["check"]
    assert check["right"]["sync/log_prob_diff_mean"] < 1e-3
    assert check["sent"].startswith("sent 2 buckets")
    line = check["wrong"]
    assert line.startswith("after weight sync 3 the rollout engine's log-probs differ from the tr")
    assert "the engine has other weights than the trainer" in line and "\n" not in line


def test_a_turned_bit_is_one_line(found: Any) -> None:
    line = found["messages"]["damaged"]
    assert line.startswith("weight sync: engine 0 did not take bucket 2 of 2 (model.layers.")
    assert ": other bytes than were sent (by the checksum)" in line and "\n" not in line


def test_who_waits_for_a_core_that_dies_hears_of_it(found: Any) -> None:
    """vLLM leaves a call that was sent without an answer for ever."""
    assert found["messages"]["dead core"] == "lost"


def test_a_stopped_engine_ends_the_sync_at_its_deadline(found: Any) -> None:
    line = found["messages"]["stopped"]
    assert "weight sync: engine 0 did not take bucket 1 of 2 (model.embed" in line
    assert " within 3 s: stopped, " in line and "\n" not in line
    assert found["seconds"]["stopped"] > 2.9


def test_a_killed_engine_ends_it(found: Any) -> None:
    line = found["messages"]["killed"]
    assert line.startswith("weight sync: engine 0 did not take bucket 1 of 2 (model.embed")
    assert line.endswith("): it is lost (killed, or crashed)")
