"""A tutorial of docs/ as a person would follow it: its files, its commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "first_weighting.md"
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def blocks(page: Path = PAGE) -> tuple[dict[str, str], list[str]]:
    """(name: text of the files that the page has one write, its shell blocks)."""
    files, commands = {}, []
    for language, title, body in _BLOCK.findall(page.read_text()):
        if title:
            files[title] = body
        elif language == "bash":
            commands.append(body)
    return files, commands


def follow(folder: Path, training: bool, page: Path = PAGE) -> subprocess.CompletedProcess[str]:
    """Do what the page says in a folder that has the recipes; without training only look."""
    files, commands = blocks(page)
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "configs").symlink_to(ROOT / "configs")
    # "python" is that of the activated environment.
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    script = "".join(commands)
    assert "python -m sg_rlhf.train " in script
    if not training:
        script = script.replace("sg_rlhf.train ", "sg_rlhf.train --dry-run ")
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=False,
    )
