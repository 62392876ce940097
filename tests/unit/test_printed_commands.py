"""Commands that are printed for the user run as printed, in a shell without the environment too."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sg_rlhf.common.environment import as_typed, script

ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(sys.executable).parent


@pytest.mark.parametrize("words", [["-m", "sg_rlhf", "train"], ["-m", "eval.run"]])
def test_a_python_without_the_packages_names_the_command_that_works(words: list[str]) -> None:
    bare = [sys._base_executable, "-S", "-E"]  # type: ignore[attr-defined]
    done = subprocess.run([*bare, *words, "--out", "a b"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    name = "eval" if words[1] == "eval.run" else "train"
    assert re.match(rf"error: sg-rlhf {name}: \w+ is not installed; ", line)
    assert line.endswith(f".venv/bin/python -m sg_rlhf {name} --out 'a b'")


def test_commands_are_those_of_this_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = (
        "make it with `python -m sg_rlhf.data`; `sg-rlhf serve` or python -m eval.run, python -m x"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(ENVIRONMENT))
    assert as_typed(text) == text and script("no-such-program") == "no-such-program"
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    given = f"make it with `{ENVIRONMENT}/python -m sg_rlhf.data`; "
    given += f"`{ENVIRONMENT}/sg-rlhf serve` or {ENVIRONMENT}/python -m eval.run, python -m x"
    assert as_typed(text) == given
    assert as_typed(given) == given
    monkeypatch.chdir(ENVIRONMENT.parent.parent)
    assert as_typed("python -m eval.run") == f"{ENVIRONMENT.parent.name}/bin/python -m eval.run"


@pytest.mark.parametrize("activated", [True, False])
def test_the_next_command_of_data_runs_as_printed(tmp_path: Path, activated: bool) -> None:
    path = f"{ENVIRONMENT}:/usr/bin:/bin" if activated else "/usr/bin:/bin"
    environment = os.environ | {"PATH": path}
    out = tmp_path / "made"
    made = subprocess.run(
        [sys.executable, "-m", "sg_rlhf", "data", "kk", "--out", out, "--generate", "people=2",
         "per_size=16", "test_per_size=4", "seed=0"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    (command,) = re.findall(r"^Next: (.*)$", made.stdout, re.MULTILINE)
    assert (shlex.split(command)[0] == "sg-rlhf") == activated
    done = subprocess.run(
        ["bash", "-c", f"{command} --dry-run"],
        cwd=ROOT, env=environment | {"SG_PLATFORM": "cpu"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"prompt_dataset: {out}/train.jsonl" in done.stdout
