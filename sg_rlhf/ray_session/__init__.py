"""Joining or starting a Ray cluster, and its authentication token.

Used by training, sweeps and the launch commands.
"""
