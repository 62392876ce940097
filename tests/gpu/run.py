"""What one GPU can test, in stages of 3 to 15 minutes at most (docs/gpu.md).

    bash tests/gpu.sh              all stages that can run with what is installed
    bash tests/gpu.sh a b          some of them
    PYTHON=python3 bash tests/gpu.sh a b d       without the project's environment
    bash tests/gpu.sh --device cpu a b c d       try the stages' own code without a GPU

One line a stage: passed, failed, or skipped and why. Each runs in a process of its own, so that a
crash or a hang of one ends no other. Results: tests/gpu/results/<stage>_<gpu>.json with the
machine, the versions and every limit; what the stages printed is in out/gpu/.
Exit status: 0, 1 if a stage failed, 2 for wrong usage, 130 interrupted. Without a GPU every stage
is skipped.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The first place, where `python tests/gpu/run.py` puts this folder and its module names.
sys.path[0] = str(ROOT)

from tests.gpu import launch, stages  # noqa: E402

RESULTS = ROOT / "tests" / "gpu" / "results"
LOGS = ROOT / "out" / "gpu"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="tests/gpu.sh", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    letters = "; ".join(f"{s.key}: {s.title}" for s in stages.STAGES)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"[all] {letters}")
    parser.add_argument(
        "--stage", action="append", default=[], metavar="STAGE", help="the same as an option"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda",
        help="cpu tries the stages' own code and says nothing about a GPU [cuda]",
    )  # fmt: skip
    parser.add_argument(
        "--preset", choices=("full", "small"), help="sizes [full on cuda, small on cpu]"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="results [tests/gpu/results; out/gpu for cpu]"
    )
    parser.add_argument(
        "--model",
        metavar="DIR|ID",
        help="stage f: Qwen2.5-3B-Instruct, if it is not on the hub; random: weights of that shape",
    )
    parser.add_argument(
        "--limit", type=int, metavar="SECONDS", help="of each stage, on a slow machine [its own]"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="stages e to g: a key of the recipe, after the stage's own; may be repeated",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="the table of the stages, and stop")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages; returns the exit status."""
    arguments = parse(argv)
    if arguments.list:
        print(stages.table())
        return 0
    try:
        chosen = stages.chosen([*arguments.stages, *arguments.stage])
        options = _options(arguments)
    except ValueError as error:
        print(f"tests/gpu.sh: {error}", file=sys.stderr)
        return 2
    found = launch.probe()
    gpu = found.get("gpu") if options.device == "cuda" else None
    why_none = found["why"] if options.device == "cuda" else None
    if launch.is_software(gpu) and options.out == RESULTS:
        print(
            "tests/gpu.sh: --out: a software GPU has no results of a GPU; name another folder",
            file=sys.stderr,
        )
        return 2
    if gpu:
        print(
            f"{gpu['name']}, {gpu['memory_gib']} GiB, capability {gpu['capability']}, "
            f"driver {gpu['driver']}, CUDA {gpu['cuda']}"
        )
    failed = False
    for stage in chosen:
        why = why_none or stage.missing()
        if stage.key == "f" and not why:
            # Only here: it needs packages of the full environment.
            from tests.gpu import recipe_3b

            recipe_3b.download(options.model or recipe_3b.MODEL)
        outcome = (
            launch.Outcome("skipped", why, 0.0, [])
            if why
            else launch.run_stage(stage, options, gpu)
        )
        failed |= outcome.status == "failed"
        print(line(stage, outcome), flush=True)
        launch.print_details(outcome)
    return 1 if failed else 0


def _options(arguments: argparse.Namespace) -> launch.Options:
    if arguments.limit is not None and arguments.limit < 1:
        raise ValueError(f"--limit {arguments.limit}: expected a number of seconds above 0")
    on_cpu = arguments.device == "cpu"
    out = (arguments.out or (LOGS if on_cpu else RESULTS)).resolve()
    if on_cpu and out == RESULTS:
        raise ValueError(f"--out {arguments.out}: expected another folder with --device cpu")
    flags = []
    for name in ("device", "preset", "model", "limit"):
        value = getattr(arguments, name)
        if value and (name, value) != ("device", "cuda"):
            # Where a model lies on this machine is nobody's concern.
            flags += [f"--{name}", Path(value).name if name == "model" else str(value)]
    flags += [part for override in arguments.set for part in ("--set", override)]
    preset = arguments.preset or ("small" if on_cpu else "full")
    return launch.Options(
        arguments.device,
        preset,
        out,
        LOGS,
        arguments.model,
        shlex.join(flags),
        arguments.limit,
        tuple(arguments.set),
    )


def line(stage: stages.Stage, outcome: launch.Outcome) -> str:
    """``a  losses ...   passed   41 s  614 checks; tests/gpu/results/a_algo_nvidia_h200.json``."""
    took = f"{outcome.seconds:4.0f} s" if outcome.file else " " * 6
    where = ""
    if outcome.file:
        inside = outcome.file.is_relative_to(ROOT)
        where = f"; {outcome.file.relative_to(ROOT) if inside else outcome.file}"
    return f"{stage.key}  {stage.title:<76} {outcome.status:<8}{took}  {outcome.note}{where}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("tests/gpu.sh: interrupted", file=sys.stderr)
        sys.exit(130)
