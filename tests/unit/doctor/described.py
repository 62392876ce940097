"""Machines that JSON files describe."""

from __future__ import annotations

from pathlib import Path

from sg_rlhf.machine.facts import Facts

MACHINES = Path(__file__).parent / "machines"
NAMES = sorted(file.stem for file in MACHINES.glob("*.json"))


def described(name: str) -> Facts:
    return Facts.model_validate_json((MACHINES / f"{name}.json").read_text())
