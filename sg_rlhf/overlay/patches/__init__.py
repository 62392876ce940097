"""The table of replaced names in other packages (``table``), and the pinned version (``version``).

The table is applied at import in every process of a run, through Ray's worker setup hook. The other
modules are replacements that belong to no part of the trainer.
"""
