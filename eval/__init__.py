"""The command ``python -m eval.run`` of a checkout. The code is in `sg_rlhf.eval`."""
