"""`python -m sg_rlhf.measure NAME ...` is `sg-rlhf measure NAME ...`."""

import sys

from sg_rlhf.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main(["measure", *(sys.argv[1:] or ["--help"])]))
