"""Pages and tables that a script writes are as it writes them."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from lab.bench import claims
from sg_rlhf.plan import of_recipe
from sg_rlhf.plan.load import load_for

ROOT = Path(__file__).parents[3]


def check(name: str) -> None:
    """The page, table or picture that ``docs/make_NAME.py`` writes is as it writes it."""
    checked = subprocess.run(
        [sys.executable, f"docs/make_{name}.py", "--check"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr


def load(name: str) -> Any:
    """The module ``docs/make_NAME.py``."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"make_{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name",
    ["configuration", "doctor_table", "grades", "map", "performance", "processes", "scale"],
)
def test_it_is_as_its_script_writes_it(name: str) -> None:
    check(name)


# -- docs/licences.md names every locked package, with the licence that the installed one states --


LOCKED = dict(
    re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements" / "cpu.lock").read_text(), re.M)
)


def test_the_tables_are_as_made() -> None:
    there = {one.metadata["Name"].lower().replace("_", "-") for one in metadata.distributions()}
    other = [name for name in LOCKED if name.lower().replace("_", "-") not in there]
    if other:
        pytest.skip(f"not the environment of requirements/cpu.lock: {other[0]}")
    check("licences")


def test_every_locked_package_has_a_row() -> None:
    page = (ROOT / "docs" / "licences.md").read_text()
    assert not [name for name in LOCKED if f"| {name} | " not in page]


# -- docs/configuration.md has every key of a recipe, as the schemas have it ---------------------


PAGE = (ROOT / "docs" / "configuration.md").read_text()


def test_the_environment_variables_are_those_that_the_code_reads() -> None:
    sources = [
        *(ROOT / "sg_rlhf").rglob("*.py"), *(ROOT / "scripts").glob("*.sh"),
        *(ROOT / "examples" / "scripts").glob("*.sh"),
    ]  # fmt: skip
    code = "".join(file.read_text() for file in sources)
    named = re.findall(r"`(SG_[A-Z_]+)`", PAGE)
    assert named and all(name in code for name in named)


# -- The tables of docs/performance.md are made of the committed results -------------------------


@pytest.fixture(scope="module")
def page() -> Any:
    return load("performance")


def test_a_row_says_what_a_result_says(page: Any, tmp_path: Path) -> None:
    (tmp_path / "kk_generator.json").write_text(json.dumps({"ratio": 12.3}))
    (row,) = [line for line in page.claims(tmp_path) if "12.3x" in line]
    assert "at least 50x" in row and "**not met**" in row and "kk_generator.json" in row
    said = " ".join(page.summary(tmp_path))
    assert said.startswith(
        "**0 of 1 goals are met.** Not met: Knights & Knaves generator, 7 people."
    )
    assert "Not measured yet: GRPO-SG, time of a step;" in said
    (tmp_path / "kk_generator.json").write_text(json.dumps({"ratio": 50}))
    assert page.summary(tmp_path)[0] == "**1 of 1 goals are met.**"


def test_a_result_is_shown_with_its_command_in_todays_folder(page: Any, tmp_path: Path) -> None:
    result = {"command": "python bench/growth.py --repeats 9", "date": "2026-01-02",
              "machine": {"processor": "one", "cores": 3}}  # fmt: skip
    (tmp_path / "growth.json").write_text(json.dumps(result))
    assert page.commands(tmp_path)[2:] == [
        "| growth.json | `python lab/bench/growth.py --repeats 9` | 2026-01-02 | one, 3 cores |"
    ]


def test_make_bench_runs_each_or_says_why_not() -> None:
    for name, bench in claims.BENCHES.items():
        assert bool(bench.quick) != bool(bench.why_not), name


def test_every_bench_is_used_and_has_its_script() -> None:
    assert {claim.bench for claim in claims.CLAIMS} <= set(claims.BENCHES)
    for name, bench in claims.BENCHES.items():
        committed = (claims.RESULTS / bench.result).is_file()
        for command in filter(None, (bench.command, bench.quick) if committed else ()):
            assert (ROOT / command.split()[0]).is_file(), (name, command)


# -- The tables of docs/gpu.md are those that sg_rlhf.plan computes ------------------------------


def test_a_cell_is_the_commands_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    make = load("scale")
    recipe = "configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml"
    for name in make.HARDWARE:
        config, machine = load_for([recipe], (), name)
        plan = of_recipe.plan_of(config, hardware=machine)
        assert plan is not None
        assert make.cell(plan.memory) == make.cell(make.plan_on(recipe, name))
