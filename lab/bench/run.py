"""The benchmarks that fit into ten minutes on two cores, and their ratios beside the committed.

    python lab/bench/run.py --out out/bench            # what `make bench` does
    python lab/bench/run.py --out out/bench --only kk_generator growth

Each has a process of its own and a result in the folder, whose older results go first. A benchmark
that fails, or exits with status 77 because something it needs cannot be had here, ends no other.
Exit status 1 if one failed or a ratio got worse (``compare.py``).
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.bench import compare
from lab.bench.claims import BENCHES

ROOT = Path(__file__).parents[2]
#: Seconds after which one is ended; all of them together take less than ten minutes.
LIMIT = 480
#: Exit status of a benchmark that cannot run here, and says why.
SKIPPED = 77


def run(name: str, out: Path) -> str:
    """One benchmark: "done", or why there is no result."""
    bench = BENCHES[name]
    result, log = out / bench.result, out / f"{name}.log"
    command = [sys.executable, *shlex.split(bench.quick), "--out", str(result)]
    with log.open("w") as written:
        try:
            done = subprocess.run(
                command, cwd=ROOT, stdout=written, stderr=subprocess.STDOUT, timeout=LIMIT
            )
        except subprocess.TimeoutExpired:
            return f"failed: not done after {LIMIT} s, see {log}"
    if done.returncode == 0:
        return "done"
    said = (log.read_text().strip().splitlines() or ["no word"])[-1]
    if done.returncode == SKIPPED:
        return f"skipped: {said}"
    return f"failed: {said[:200]}, see {log}"


def main(argv: list[str] | None = None) -> int:
    """The command."""
    quick = [
        name for name, of in BENCHES.items() if of.quick and (ROOT / of.quick.split()[0]).is_file()
    ]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--only", nargs="+", choices=quick, default=quick, metavar="NAME",
                        help=f"of {', '.join(quick)}")  # fmt: skip
    arguments = parser.parse_args(argv)
    out = arguments.out.resolve()
    if out.exists() and not out.is_dir():
        parser.error(f"--out {out}: not a folder")
    out.mkdir(parents=True, exist_ok=True)
    for name in quick:
        (out / BENCHES[name].result).unlink(missing_ok=True)
    failed = False
    for name in arguments.only:
        started = time.monotonic()
        print(f"{name:<16} ", end="", flush=True)
        said = run(name, out)
        print(f"{time.monotonic() - started:4.0f} s  {said}", flush=True)
        failed |= said.startswith("failed")
    for name, bench in BENCHES.items():
        if bench.why_not:
            print(f"{name:<16}    -    {bench.why_not}: python {bench.command}")
    return max(compare.report(out), int(failed))


if __name__ == "__main__":
    raise SystemExit(main())
