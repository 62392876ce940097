"""Write the table of docs/troubleshooting.md with the doctor's verdict on described machines.

    python docs/make_doctor_table.py [--check]

Rows are the machines of tests/unit/doctor/machines, columns are recipes. A cell has the exit status
of ``sg-rlhf doctor --config RECIPE`` on that machine and the checks that caused it.
``--check`` writes nothing and fails if the table is out of date.
"""

from __future__ import annotations

from pathlib import Path

from made_tables import main

from sg_rlhf.doctor import recipe
from sg_rlhf.doctor.check import FAILED, WARNING, Check, exit_status
from sg_rlhf.doctor.checks import check, of_hardware
from sg_rlhf.machine.facts import Facts
from sg_rlhf.plan.load import load_fitted

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
MACHINES = ROOT / "tests" / "unit" / "doctor" / "machines"
RECIPES = {
    "in general": "",
    "K&K 3B": "kk/grpo_sg_qwen2.5-3b-instruct.yaml",
    "K&K 7B-1M": "kk/grpo_sg_qwen2.5-7b-instruct-1m.yaml",
    "search 3B": "search/grpo_sg_qwen2.5-3b.yaml",
    "one GPU": "kk/grpo_sg_1xgpu.yaml",
    "CPU": "kk/grpo_sg_tiny_cpu.yaml",
}


def machines() -> dict[str, Facts]:
    """The described machines, by name."""
    files = sorted(MACHINES.glob("*.json"))
    return {file.stem: Facts.model_validate_json(file.read_text()) for file in files}


def judge(facts: Facts, config: str) -> list[Check]:
    """All checks of a machine, in general or for a recipe."""
    if not config:
        return check(facts, of_hardware(""))
    run = load_fitted([str(ROOT / "configs" / config)])
    needs, more = recipe.judge(run, facts, cached=False)
    return [*check(facts, needs), *more]


def cell(checks: list[Check]) -> str:
    """Exit status and the checks that are the reason."""
    worst = {2: FAILED, 1: WARNING}.get(exit_status(checks))
    names = [one.name for one in checks if one.status == worst]
    return ": ".join([str(exit_status(checks)), *([", ".join(names)] if names else [])])


def table() -> list[str]:
    """The table as Markdown."""
    rows = [["machine", *RECIPES], ["---"] * (1 + len(RECIPES))]
    for name, facts in machines().items():
        rows.append([name, *(cell(judge(facts, config)) for config in RECIPES.values())])
    return [f"| {' | '.join(row)} |" for row in rows]


if __name__ == "__main__":
    raise SystemExit(main(PAGE, {"machines": table}))
