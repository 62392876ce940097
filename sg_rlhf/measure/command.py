"""`python -m sg_rlhf.measure NAME ...`: the four measurements of checkpoints under one command."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

PROG = "sg_rlhf.measure"
#: name -> what it measures. Each is a module of this package, imported when it is used.
MEASUREMENTS = {
    "accuracy": "accuracy on prompts, from many responses to each, with paired differences",
    "sharpness": "how far the loss rises within a ball around the parameters (Eq. 14)",
    "token-gradients": "each token's gradient norm compared with the paper's w (1 - p) (Eq. 16)",
    "minibatch-gradients": "each algorithm's gradient and AdamW step on the same minibatches",
}


def listing() -> str:
    """The help text."""
    lines = [f"  {name:<22}{what}" for name, what in MEASUREMENTS.items()]
    return "\n".join(
        [
            f"usage: python -m {PROG} MEASUREMENT [arguments]",
            "",
            "Measurements of checkpoints (folders, hub ids or module:NAME), without an engine:",
            "",
            *lines,
            "",
            f"`python -m {PROG} MEASUREMENT --help` explains one and gives examples; `python -m",
            f"{PROG}.accuracy` and so on are the same commands. docs/results.md explains how to",
            "read the numbers.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The named measurement's exit status; 2 after one line on stderr without one."""
    given = sys.argv[1:] if argv is None else list(argv)
    if given and given[0] in ("-h", "--help"):
        print(listing())
        return 0
    name = given[0].replace("_", "-") if given else ""
    if name not in MEASUREMENTS:
        near = difflib.get_close_matches(name, MEASUREMENTS, 1)
        guess = f"did you mean {near[0]}? " if near else ""
        what = f"{given[0]!r}: no such measurement; {guess}" if given else "which measurement? "
        print(
            f"{PROG}: {what}expected one of {', '.join(MEASUREMENTS)}; see --help", file=sys.stderr
        )
        return 2
    module = importlib.import_module(f"{PROG}.{name.replace('-', '_')}")
    status: int = module.main(given[1:])
    return status
