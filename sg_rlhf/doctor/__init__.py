"""Check a machine before anything is downloaded: what it has and what a run needs.

`gather` collects the facts; `checks` compares them with the needs; `report` prints one line per
check. Python 3.8 with its standard library runs all of it except `recipe` and `before_run`, because
the doctor runs before anything is installed.
"""
