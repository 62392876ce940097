"""GRPO-SG (arXiv 2511.00066) on an unmodified OpenRLHF: train, evaluate, look at what came out.

Every command is also a module, with the same arguments, output and exit status: what
``sg-rlhf train`` does is ``python -m sg_rlhf.train``.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """A command: the module that ``python -m`` runs, where its ``main`` is, and one line."""

    module: str
    main: str
    summary: str


_MEASURE = "sg_rlhf.measure"
_RETRIEVAL = "sg_rlhf.retrieval"

#: A group's commands have its name before theirs.
COMMANDS = {
    "train": Command("sg_rlhf.train", "sg_rlhf.train",
                     "one training run of a recipe; the same command resumes it"),
    "data": Command("sg_rlhf.data", "sg_rlhf.data.command",
                    "generate, convert and check the data sets that training reads"),
    "eval": Command("eval.run", "eval.run",
                    "evaluate a model on the paper's benchmarks (--list shows them)"),
    "report": Command("sg_rlhf.report", "sg_rlhf.report.__main__",
                      "one HTML page of figures and samples about one or several runs"),
    "summary": Command("sg_rlhf.report.summary", "sg_rlhf.report.summary",
                       "a run in a few lines and two pictures"),
    "weights": Command("sg_rlhf.weights", "sg_rlhf.weights.command",
                       "what a recipe's token weighting does: curve, range, dead zone"),
    "study": Command("sg_rlhf.studies", "sg_rlhf.studies.command",
                     "many runs by a plan, and their tables and pictures"),
    "measure accuracy": Command(f"{_MEASURE}.accuracy", f"{_MEASURE}.accuracy",
                                "how often checkpoints answer correctly, without an engine"),
    "measure sharpness": Command(f"{_MEASURE}.sharpness", f"{_MEASURE}.sharpness",
                                 "the loss around a checkpoint"),
    "measure token_gradients": Command(f"{_MEASURE}.token_gradients",
                                       f"{_MEASURE}.token_gradients",
                                       "which tokens a checkpoint's gradient comes from"),
    "measure minibatch_gradients": Command(f"{_MEASURE}.minibatch_gradients",
                                           f"{_MEASURE}.minibatch_gradients",
                                           "how far apart two weightings' updates are"),
    "tiny": Command("sg_rlhf.tiny.build", "sg_rlhf.tiny.build",
                    "build a small model that learns on a laptop's CPU"),
    "index": Command(f"{_RETRIEVAL}.index", f"{_RETRIEVAL}.index",
                     "build a search index of a corpus, lexical or dense"),
    "serve": Command(f"{_RETRIEVAL}.server", f"{_RETRIEVAL}.server",
                     "serve an index to training and evaluation over HTTP"),
    "serve-replicas": Command(f"{_RETRIEVAL}.replicas", f"{_RETRIEVAL}.replicas",
                              "the same from several processes, on a Ray cluster too"),
    "completion": Command("sg_rlhf.config.completion", "sg_rlhf.config.completion",
                          "print the completion script of bash or zsh"),
}  # fmt: skip

EXAMPLES = """\
examples:
  train the small model on this machine's CPU, after making its data
    sg-rlhf data kk --out data/kk_tiny --generate people=2-3 per_size=160 test_per_size=100 seed=0
    sg-rlhf train --config configs/kk/grpo_sg_tiny_cpu.yaml
  see what a recipe would run on 8 GPUs, and what its weights do, without running it
    sg-rlhf train --config configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml --dry-run
    sg-rlhf weights --config configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml
  two runs on one page
    sg-rlhf report runs/grpo_sg_tiny_cpu runs/grpo_tiny_cpu --out comparison.html

`sg-rlhf COMMAND --help` has the options and examples of a command. In the repository:
docs/commands.md (every command), docs/method.md (the algorithm), docs/operations.md (running it).
"""


def usage(group: str = "") -> str:
    """The help text of the whole, or of a group's commands."""
    names = [name for name in COMMANDS if name.startswith(group)]
    width = max(map(len, names)) + 2
    listed = "".join(f"  {name:<{width}}{COMMANDS[name].summary}\n" for name in names)
    if group:
        return f"usage: sg-rlhf {group}COMMAND ...\n\ncommands:\n{listed}"
    return f"usage: sg-rlhf COMMAND ...\n\n{__doc__}\ncommands:\n{listed}\n{EXAMPLES}"


def split(words: Sequence[str]) -> tuple[str, list[str]]:
    """The command's name, or a group's with a space behind it, or ""; and what follows."""
    for count in (2, 1):
        name = " ".join(words[:count])
        if name in COMMANDS and len(words) >= count:
            return name, list(words[count:])
    group = f"{words[0]} " if words else ""
    if group and any(name.startswith(group) for name in COMMANDS):
        return group, list(words[1:])
    return "", list(words)


def names_behind(group: str = "") -> list[str]:
    """The commands and groups of a group, or of the whole."""
    return sorted({c.removeprefix(group).split(" ")[0] for c in COMMANDS if c.startswith(group)})


def run(name: str, argv: list[str]) -> int:
    """A command's own ``main``; help in the words of ``sg-rlhf``.

    Returns:
        The exit status: the command's, or 2 where a package that it needs is not installed.
    """
    try:
        main = importlib.import_module(COMMANDS[name].main).main
        if not {"-h", "--help"} & set(argv):
            return int(main(argv) or 0)
        text = io.StringIO()
        try:
            with contextlib.redirect_stdout(text):
                return int(main(argv) or 0)
        finally:
            print(in_our_words(text.getvalue()), end="")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "sg_rlhf", "eval"):
            raise
        print(
            f"error: sg-rlhf {name}: {missing} is not installed; docs/commands.md names what each "
            "command needs, and scripts/bootstrap.sh of the repository installs all of it",
            file=sys.stderr,
        )
        return 2


def in_our_words(help_text: str) -> str:
    """``sg-rlhf NAME`` for every ``python -m MODULE`` that is a command."""
    names = {command.module: name for name, command in COMMANDS.items()}

    def named(match: re.Match[str]) -> str:
        return f"sg-rlhf {names[match[1]]}" if match[1] in names else match[0]

    renamed = re.sub(r"python -m (\w+(?:\.\w+)*)", named, help_text)
    # The usage's later lines stand under the end of the name.
    before, _, _ = help_text.partition("\n")
    now, _, _ = renamed.partition("\n")
    head, _, rest = renamed.partition("\n\n")
    return head.replace("\n" + " " * (len(before) - len(now)), "\n") + "\n\n" + rest


def _complete(line: str) -> None:
    """Answer a shell that completes this line."""
    from sg_rlhf.config import completion

    words = line.split()[1:]
    finished = words if line[-1:].isspace() else words[:-1]
    name, _ = split(finished)
    module = COMMANDS[name].main if name in COMMANDS else None
    completion.complete(name.split(), module, names_behind(name))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: the command's; 2 for one that does not exist."""
    if "_ARGCOMPLETE" in os.environ:
        _complete(os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])])
    words = list(sys.argv[1:] if argv is None else argv)
    name, rest = split(words)
    if name in COMMANDS:
        return run(name, rest)
    if not rest or rest[0] in ("-h", "--help"):
        print(usage(name), end="", file=sys.stdout if rest else sys.stderr)
        return 0 if rest else 2
    if rest[0] == "--version" and not name:
        from sg_rlhf import __version__

        print(f"sg-rlhf {__version__}")
        return 0
    known = names_behind(name)
    near = difflib.get_close_matches(rest[0], known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
    print(f"error: sg-rlhf {name}{rest[0]}: no such command; {hint}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
