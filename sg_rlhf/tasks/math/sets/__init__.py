"""The mathematics data sets.

`published` and `competitions` read published files, `arithmetic` makes problems from a seed,
`preparation` chooses rows, `contamination` lists which models have seen a set.
Called by the data command and by `--suite math`.
"""
