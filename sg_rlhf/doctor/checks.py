"""All checks of facts against needs, in the order of the report. Looks at nothing itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sg_rlhf.doctor import gpu_checks, host_checks, run_checks
from sg_rlhf.doctor.check import SKIPPED, Check

if TYPE_CHECKING:
    from sg_rlhf.doctor.facts import Facts
    from sg_rlhf.doctor.needs import Needs


def check(facts: Facts, needs: Needs) -> list[Check]:
    """Every check that applies to these needs."""
    if needs.install:
        return gpu_checks.before_installing(facts, needs)
    if facts.ray_address and needs.recipe:
        elsewhere = Check(
            "machine",
            SKIPPED,
            f"RAY_ADDRESS={facts.ray_address}",
            remedy="the cluster's nodes were not looked at: run the doctor on one of them",
        )
        return [elsewhere, *run_checks.checks(facts, needs)]
    return [
        *gpu_checks.checks(facts, needs),
        *host_checks.checks(facts, needs),
        *run_checks.checks(facts, needs),
    ]
