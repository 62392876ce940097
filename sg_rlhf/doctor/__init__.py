"""Check a machine before anything is downloaded: what it has and what a run needs.

`sg_rlhf.machine.gather` collects what it has, `recipe` what a recipe needs; `checks` compares them;
`command` prints one line per check. `preflight` runs before anything is installed, with Python 3.8
alone.
"""
