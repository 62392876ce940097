"""The data command: `python -m sg_rlhf.data`."""
