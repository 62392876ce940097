"""Upstream as workers import it, but for the CPU platform: CUDA's calls keep their meaning here.

OpenRLHF imports flash_attn at module level; where it is absent the stand-in satisfies it.
"""

from typing import Any

import pytest

from sg_rlhf.overlay.cpu import platform
from sg_rlhf.overlay.patches import flash_attn_shim, table

flash_attn_shim.install()
table.apply_at_import(
    patch for patch in table.PATCHES if patch.when not in (platform.is_cpu, platform.emulates_bf16)
)


@pytest.fixture
def policy_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The only rank of a policy, before its model is loaded."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # what its constructor sets ends with the test
    from sg_rlhf.overlay.learner.actor import SGPolicyModelActor

    return SGPolicyModelActor(1, 0, "127.0.0.1", 1)
