"""Evaluate a model: ``python -m eval.run`` is ``sg-rlhf eval``."""

import sys

from sg_rlhf.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main(["eval", *sys.argv[1:]]))
