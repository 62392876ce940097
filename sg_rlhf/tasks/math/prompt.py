"""The mathematics prompt of the reference runs: the problem and one sentence, no chat template.

The sentence is part of the published parquet files, so a problem is what stands before it.
"""

from __future__ import annotations

# Changes whenever the text of a prompt does; written to every data set's manifest.
PROMPT_VERSION = "dsr-1"

# The space in front is part of it, also after a problem that ends in white space.
SUFFIX = " Let's think step by step and output the final answer within \\boxed{}."


def prompt_of(problem: str) -> str:
    """The prompt of a bare problem, byte for byte as in the published files."""
    return problem + SUFFIX


def problem_of(prompt: str) -> str:
    """The bare problem of a prompt; one that does not end in `SUFFIX`: `ValueError`."""
    if not prompt.endswith(SUFFIX):
        raise ValueError(f"{prompt[-80:]!r}, expected a prompt that ends in {SUFFIX!r}")
    return prompt[: -len(SUFFIX)]
