"""The files of a run directory: JSON lines, the lock, timing keys, weight versions, final model.

Written by training; read by reports, sweeps and evaluation.
"""
