"""Question sets for search: published ones, a generated encyclopedia, and demonstrations.

Called by the data command, `--suite qa` and `sg-rlhf tiny search`.
"""
