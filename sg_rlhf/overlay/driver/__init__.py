"""The process that the user starts: argument parsing, the Ray session, and the end of a run.

``run`` is the entry point. It opens the Ray session (``ray_session``), calls ``train.train`` and
reports how it ended. Called by :mod:`sg_rlhf.train`.
"""
