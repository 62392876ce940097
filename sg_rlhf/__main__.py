"""GRPO-SG (arXiv 2511.00066) on an unmodified OpenRLHF: train, evaluate, look at what came out.

`python -m sg_rlhf COMMAND` is the same as `sg-rlhf COMMAND`.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from sg_rlhf.common import home
from sg_rlhf.common.environment import with_packages
from sg_rlhf.common.text import removed


class Command(NamedTuple):
    """One command.

    Attributes:
        summary: one line for the help.
        module: has its ``main``.
        extra: which of setup.cfg's extras it needs, if any.
    """

    summary: str
    module: str
    extra: str = ""


#: In the order of the help.
COMMANDS = {
    "train": Command("train a recipe; the same command resumes the run", "sg_rlhf.train"),
    "run": Command(
        "train a domain on this machine: data, training and report",
        "sg_rlhf.run.command",
        extra="plots",
    ),
    "launch": Command(
        "print the job file of a recipe for SLURM, KubeRay or SkyPilot",
        "sg_rlhf.launch.command",
    ),
    "recipes": Command(
        "list the shipped recipes: models, algorithms and hardware", "sg_rlhf.config.recipe_listing"
    ),
    "data": Command(
        "generate, convert and check the data sets that training reads",
        "sg_rlhf.data.command",
    ),
    "doctor": Command(
        "check whether this machine can run sg_rlhf, in general or for a recipe",
        "sg_rlhf.doctor.command",
    ),
    "eval": Command(
        "evaluate a model on the paper's benchmarks (--list shows them)", "sg_rlhf.eval.run"
    ),
    "report": Command(
        "write one HTML page of figures and samples about one or several runs",
        "sg_rlhf.report.command",
        extra="plots",
    ),
    "summary": Command(
        "print a run on one screen, and write two pictures", "sg_rlhf.report.summary", extra="plots"
    ),
    "push": Command(
        "upload a finished run's model and its model card to the Hugging Face hub",
        "sg_rlhf.publish.push",
        extra="models",
    ),
    "merge": Command(
        "merge LoRA adapters with their base model into a Hugging Face folder",
        "sg_rlhf.data_io.merge_adapters",
        extra="models",
    ),
    "weights": Command(
        "show a recipe's token weighting: curve, range, dead zone",
        "sg_rlhf.weights.command",
        extra="plots",
    ),
    "plan": Command(
        "estimate whether a recipe fits on a machine, and how long a rollout step takes",
        "sg_rlhf.plan.command",
    ),
    "tiny": Command(
        "build a small model that learns on a laptop's CPU", "sg_rlhf.tiny.command", extra="models"
    ),
    "index": Command(
        "build a search index of a corpus: BM25 or dense",
        "sg_rlhf.retrieval.index",
        extra="search",
    ),
    "verify-index": Command(
        "check every byte of a search index and its corpus",
        "sg_rlhf.retrieval.verify",
        extra="search",
    ),
    "serve": Command(
        "serve a search index over HTTP, for training and evaluation",
        "sg_rlhf.retrieval.server",
        extra="search",
    ),
    "serve-env": Command(
        "serve a domain as an OpenEnv environment for other trainers",
        "sg_rlhf.environments.command",
        extra="openenv",
    ),
}

_TO_THE_LAB = (
    "it is not part of the package: in the repository, run `python -m lab.{}` (lab/README.md)"
)
#: Commands that are gone, and why.
REMOVED = {
    "completion": "`sg-rlhf --help` lists the commands, `sg-rlhf COMMAND --help` the options",
    "study": _TO_THE_LAB.format("study"),
    "measure": _TO_THE_LAB.format("measure"),
    "serve-replicas": "several servers need a load balancer: start `sg-rlhf serve` once per port",
}

EXAMPLES = """\
examples:
  make puzzles, train the recipe for this machine, write the report
    sg-rlhf run kk
  see what a model with an algorithm would run on 8 GPUs, and what its weights do
    sg-rlhf train --config configs/kk/grpo_qwen2.5-3b-instruct.yaml --algorithm grpo_sg --dry-run
    sg-rlhf weights --algorithm grpo_sg
  two runs on one page
    sg-rlhf report runs/kk_grpo_sg_tiny_cpu runs/kk_grpo_tiny_cpu --out comparison.html

`sg-rlhf COMMAND --help` has the options and examples of a command. In the repository:
docs/commands.md (every command), docs/method.md (the algorithm), docs/running.md (running it).
"""


def usage() -> str:
    """The help text."""
    width = max(map(len, COMMANDS)) + 2
    listed = "".join(f"  {name:<{width}}{command.summary}\n" for name, command in COMMANDS.items())
    return f"usage: sg-rlhf COMMAND ...\n\n{__doc__}\ncommands:\n{listed}\n{EXAMPLES}"


def run(name: str, argv: list[str]) -> int:
    """Call a command's ``main``.

    Returns:
        The exit status: the command's, 2 where a package that it needs is not installed, or 141,
        a shell's number for it, where what reads the output has ended (``| head``).
    """
    try:
        main = importlib.import_module(COMMANDS[name].module).main
        try:
            return int(main(argv) or 0)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "sg_rlhf"):
            raise
        extra = COMMANDS[name].extra
        by_pip = f"pip install '.[{extra}]' in the repository, or " if extra else ""
        remedy = with_packages(["-m", "sg_rlhf", name, *argv])
        print(
            f"error: sg-rlhf {name}: {missing} is not installed; {by_pip}{remedy}", file=sys.stderr
        )
        return 2


def _find_modules_here() -> None:
    """Have `sg-rlhf X` find modules of the current folder, as `python -m sg_rlhf.X` does."""
    here = os.getcwd()
    if not sys.flags.safe_path and not {"", here} & {*sys.path}:
        sys.path.insert(0, here)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: the command's; 2 for one that does not exist."""
    words = list(sys.argv[1:] if argv is None else argv)
    _find_modules_here()
    name = words[0] if words else ""
    if name in COMMANDS:
        home.ensure()
        return run(name, words[1:])
    if name in ("", "-h", "--help"):
        print(usage(), end="", file=sys.stdout if name else sys.stderr)
        return 0 if name else 2
    if name == "--version":
        from sg_rlhf import __version__

        print(f"sg-rlhf {__version__}")
        return 0
    if name in REMOVED:
        print(f"error: {removed(f'sg-rlhf {name}', REMOVED[name])}", file=sys.stderr)
        return 2
    near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(sorted(COMMANDS))}"
    print(f"error: sg-rlhf {name}: no such command; {hint}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
