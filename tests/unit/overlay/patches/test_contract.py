"""The contract holds for the installed upstream, and names what moved when it breaks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sg_rlhf.config.upstream_flags import UpstreamChanged, upstream_root
from sg_rlhf.overlay.patches import contract


def test_installed_upstream_keeps_the_contract() -> None:
    assert contract.SIGNATURES and contract.CALL_ORDER
    contract.check()


def test_another_version_is_refused() -> None:
    with pytest.raises(UpstreamChanged, match=r"OpenRLHF 0\.12\.0 is installed.*0\.11\.2"):
        contract.check(version="0.12.0")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    root = tmp_path / "openrlhf"
    shutil.copytree(upstream_root(), root, ignore=shutil.ignore_patterns("__pycache__"))
    return root


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "models/loss.py",
            "rollout_log_probs: Optional[torch.Tensor] = None,\n        dp_size",
            "behaviour_log_probs: Optional[torch.Tensor] = None,\n        dp_size",
            r"models/loss\.py: PolicyLoss\.forward takes \(.*behaviour_log_probs.*expects",
        ),
        (
            "trainer/ray/ppo_actor.py",
            "def training_step(",
            "def train_micro_batch(",
            r"ActorPPOTrainer\.training_step is gone",
        ),
        (
            "trainer/ray/ppo_actor.py",
            "kl = compute_approx_kl(",
            "kl = approximate_kl(",
            r"ActorPPOTrainer\.training_step no longer uses compute_approx_kl after actor_loss_fn",
        ),
        (
            "trainer/ppo_trainer.py",
            "def _compute_rollout_stats(self, experiences)",
            "def _compute_rollout_stats(self, experiences, mode)",
            r"_compute_rollout_stats takes \(self, experiences, mode\)",
        ),
    ],
)
def test_a_moved_seam_is_named(copy: Path, file: str, old: str, new: str, message: str) -> None:
    path = copy / file
    source = path.read_text()
    assert source.count(old) == 1
    path.write_text(source.replace(old, new))
    with pytest.raises(UpstreamChanged, match=message) as error:
        contract.check(root=copy)
    assert "\n" not in str(error.value)
