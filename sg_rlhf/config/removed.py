"""Recipe keys and command-line options that are gone: why, and what to do instead.

A recipe or command that names one is refused with this line.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Key -> reason and remedy.
KEYS: dict[str, str] = {
    "sg.dump_rollout": "no command reads the file; samples.jsonl has tokens, log-probs and weights "
    "of sg.samples_per_step responses",
}

#: Option of `sg-rlhf train` -> reason and remedy.
TRAIN_OPTIONS: dict[str, str] = {
    "--print": "`sg-rlhf launch sbatch|kuberay|skypilot` prints job files",
    **dict.fromkeys(
        ("--image", "--time", "--partition", "--account"),
        "it is an option of `sg-rlhf launch sbatch|kuberay|skypilot`",
    ),
    "--replay": "one update says little; `sg-rlhf measure minibatch-gradients` compares weightings "
    "on the same minibatches",
}


def message(name: str, why: str) -> str:
    """The line that refuses a key or an option."""
    return f"{name}: removed, because {why}"


def option_among(words: Sequence[str], options: dict[str, str]) -> str:
    """The line about the first option that is gone; "" without one."""
    names = (word.partition("=")[0] for word in words)
    return next((message(name, options[name]) for name in names if name in options), "")
