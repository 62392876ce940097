"""Replaced names of upstream packages, with a reason each (``table``).

Applied at import in every process of a run through Ray's worker setup hook. The other modules are
the replacements that belong to no part of the trainer. No other file assigns to a foreign name.
"""
