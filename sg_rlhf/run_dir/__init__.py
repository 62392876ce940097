"""The files of a run directory: JSON lines, the lock, timing keys, weight versions, final model.

Written by training; read by reports, sweeps and evaluation.
"""

#: Seconds after SIGTERM in which a run may finish its rollout and save a checkpoint.
GRACE_SECONDS = 240.0
