"""Writes the table of docs/doctor.md: what the doctor says of each described machine.

    python docs/make_doctor_table.py [--check]

Rows are the machines of tests/unit/doctor/machines, columns are recipes; a cell is what
``python -m sg_rlhf.doctor --facts MACHINE --config RECIPE`` exits with, and the checks that are not
ok. ``--check`` writes nothing and fails if the page would change.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sg_rlhf.doctor import recipe
from sg_rlhf.doctor.check import FAILED, WARNING, Check, exit_status
from sg_rlhf.doctor.checks import check
from sg_rlhf.doctor.facts import Facts, read
from sg_rlhf.doctor.needs import of_hardware

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "doctor.md"
MACHINES = ROOT / "tests" / "unit" / "doctor" / "machines"
BEGIN, END = "<!-- table: docs/make_doctor_table.py -->", "<!-- end of table -->"
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
    return {file.stem: read(file) for file in sorted(MACHINES.glob("*.json"))}


def judge(facts: Facts, config: str) -> list[Check]:
    """All checks of a machine, in general or for a recipe."""
    if not config:
        return check(facts, of_hardware(""))
    run = recipe.load([str(ROOT / "configs" / config)], [], "runs/first")
    needs, more = recipe.judge(run, facts)
    return [*check(facts, needs), *more]


def cell(checks: list[Check]) -> str:
    """Exit status and the checks that are the reason."""
    worst = {2: FAILED, 1: WARNING}.get(exit_status(checks))
    names = [one.name for one in checks if one.status == worst]
    return ": ".join([str(exit_status(checks)), *([", ".join(names)] if names else [])])


def table() -> str:
    """The table as Markdown."""
    rows = [["machine", *RECIPES], ["---"] * (1 + len(RECIPES))]
    for name, facts in machines().items():
        rows.append([name, *(cell(judge(facts, config)) for config in RECIPES.values())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    """Exit status 1 when the page is not what it should be and --check forbids to write it."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if made == text:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{PAGE}: the table is out of date: python docs/make_doctor_table.py")
        return 1
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
