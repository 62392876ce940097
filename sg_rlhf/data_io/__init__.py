"""Reading and writing data files: records, prompt sets, downloads, model folders.

Used by the data commands, the domains and the checks before a run. Imports ``common`` alone.
"""
