"""What a machine has and what a run needs of it, a line a check, before anything is downloaded.

Any Python of 3.8 or later runs all of it but `recipe` and `before_run`, with its standard library
alone: the doctor speaks when nothing is installed yet.
"""
