"""The options of ``sg-rlhf launch``, which a job file takes."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

KINDS = ("sbatch", "kuberay", "skypilot")
#: Option -> the kinds of job file that use it.
USED_BY = {
    "image": KINDS,
    "time": ("sbatch", "kuberay"),
    "partition": ("sbatch",),
    "account": ("sbatch",),
}


class LaunchError(ValueError):
    """Options that do not go together; the message is one line for the user."""


@dataclass(frozen=True)
class Options:
    """The options, "" where not given; ``kind`` is one of :data:`KINDS`."""

    kind: str
    image: str = ""
    time: str = ""
    partition: str = ""
    account: str = ""

    @property
    def seconds(self) -> int | None:
        """The time in seconds; None without."""
        if not self.time:
            return None
        days, _, clock = self.time.rpartition("-")
        hours, minutes, seconds = map(int, clock.split(":"))
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds

    def words(self) -> list[str]:
        """The same options as command-line words."""
        given = [(name, getattr(self, name)) for name in USED_BY]
        return [w for k, v in given if v for w in (f"--{k}", v)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the kind and the options."""
    parser.add_argument("kind", choices=KINDS, help=", ".join(KINDS))
    parser.add_argument(
        "--image", metavar="NAME",
        help="container image to run in (default: none; kuberay: our own)",
    )  # fmt: skip
    parser.add_argument("--time", metavar="HH:MM:SS", help="time limit (sbatch, kuberay)")
    parser.add_argument("--partition", metavar="NAME", help="SLURM's partition (sbatch)")
    parser.add_argument("--account", metavar="NAME", help="SLURM's account (sbatch)")


def options_of(arguments: argparse.Namespace) -> Options:
    """The options, checked.

    Raises:
        LaunchError: a value that cannot be in this job file.
    """
    given = {name: getattr(arguments, name) for name in USED_BY if getattr(arguments, name)}
    for name, value in given.items():
        if arguments.kind not in USED_BY[name]:
            raise LaunchError(f"--{name} {value}: {arguments.kind} has no place for it")
        if not re.fullmatch(r"[\w./:@,+-]+", value, re.ASCII):
            raise LaunchError(f"--{name} {value!r}: expected a name without spaces or quotes")
    if "time" in given and not re.fullmatch(r"(\d+-)?\d{1,3}:[0-5]\d:[0-5]\d", given["time"]):
        raise LaunchError(f"--time {given['time']}: expected HH:MM:SS or D-HH:MM:SS")
    options = Options(kind=arguments.kind, **given)
    if options.seconds == 0:  # to SLURM it means no limit, to Kubernetes nothing valid
        raise LaunchError(f"--time {options.time}: expected more than no time")
    return options
