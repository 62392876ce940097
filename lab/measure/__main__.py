"""Measure checkpoints.

    python -m lab.measure accuracy             how often they answer correctly, without an engine
    python -m lab.measure sharpness            how far the loss rises around them (Eq. 14)
    python -m lab.measure token-gradients      gradient norms of tokens, and the paper's w (1 - p)
    python -m lab.measure minibatch-gradients  gradients of several weightings, same minibatches

Each has --help.
"""

import importlib
import sys
from collections.abc import Sequence

NAMES = ("accuracy", "sharpness", "token-gradients", "minibatch-gradients")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: the measurement's; 2 for one that does not exist."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("-h", "--help"):
        print(__doc__, end="")
        return 0
    if name not in NAMES:
        print(f"lab.measure {name}: expected one of {', '.join(NAMES)}", file=sys.stderr)
        return 2
    return int(importlib.import_module(f"lab.measure.{name.replace('-', '_')}").main(rest))


if __name__ == "__main__":
    raise SystemExit(main())
