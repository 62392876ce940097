"""Evaluate a model: the same as ``python -m sg_rlhf.eval.run``, which needs no checkout."""

from sg_rlhf.eval.run import main

if __name__ == "__main__":
    raise SystemExit(main())
