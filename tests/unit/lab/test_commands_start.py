"""Every module of the laboratory can be imported, and every command of it answers --help."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
#: It runs in an environment with TRL.
ELSEWHERE = {"lab.experiments.smollm2_135m.train_with_trl"}
_PARSES = re.compile(r"Parser\(|new_parser\(|pinned_files\.command\(|__doc__, end=")

ASK = """
import contextlib, importlib, io, sys
commands = set(sys.argv[2].split())
sys.argv[1:], names = ["--help"], sys.argv[1].split()
for name in names:
    module = importlib.import_module(name)
    if name not in commands:
        continue
    said, status = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(said):
            status = module.main()
    except SystemExit as ended:
        status = ended.code
    assert status in (0, None) and len(said.getvalue()) > 100, (name, status, said.getvalue())
    print(name)
"""


def test_every_module_imports_and_every_command_answers_help() -> None:
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text()
        for path in sorted((ROOT / "lab").rglob("*.py"))
    }
    names = [name for name in files if name not in ELSEWHERE]
    commands = [
        name for name in names if "\ndef main(" in files[name] and _PARSES.search(files[name])
    ]
    assert len(commands) > 40
    done = subprocess.run(
        [sys.executable, "-c", ASK, " ".join(names), " ".join(commands)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == commands
