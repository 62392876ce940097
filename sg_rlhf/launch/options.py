"""The options of ``--dry-run --print KIND``, which prints a job file."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

KINDS = ("sbatch", "kuberay", "skypilot", "dstack", "hfjobs")
#: Option -> the kinds of job file that use it.
USED_BY = {
    "image": KINDS,
    "time": ("sbatch", "kuberay", "dstack", "hfjobs"),
    "partition": ("sbatch",),
    "account": ("sbatch",),
}


class LaunchError(ValueError):
    """Options that do not go together; the message is one line for the user."""


@dataclass(frozen=True)
class Options:
    """The options, "" where not given.

    Attributes:
        kind: of :data:`KINDS`.
        image: container image.
        time: longest time that the job may take, ``HH:MM:SS``.
        partition: SLURM's.
        account: SLURM's.
    """

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
        return ["--print", self.kind, *(w for k, v in given if v for w in (f"--{k}", v))]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options as a group."""
    group = parser.add_argument_group(
        "job file", "print the run as a job file for a cluster (docs/running.md)"
    )
    group.add_argument(
        "--print",
        choices=KINDS,
        metavar="KIND",
        help=f"with --dry-run: print a job file of this kind: {', '.join(KINDS)}",
    )
    group.add_argument(
        "--image",
        metavar="NAME",
        help="container image to run in (default: none; kuberay, hfjobs: our own)",
    )
    group.add_argument(
        "--time",
        metavar="HH:MM:SS",
        help=f"time limit of the job ({', '.join(USED_BY['time'])})",
    )
    group.add_argument("--partition", metavar="NAME", help="SLURM's partition (sbatch)")
    group.add_argument("--account", metavar="NAME", help="SLURM's account (sbatch)")


def options_of(arguments: argparse.Namespace) -> Options | None:
    """The options, checked; None without ``--print``.

    Raises:
        LaunchError: an option without ``--print``, or a value that cannot be in a job file.
    """
    given = {name: getattr(arguments, name) for name in USED_BY if getattr(arguments, name)}
    if not arguments.print:
        if given:
            raise LaunchError(f"--{next(iter(given))}: only with --dry-run --print KIND")
        return None
    if not arguments.dry_run:
        raise LaunchError(f"--print {arguments.print}: only with --dry-run")
    for name, value in given.items():
        if arguments.print not in USED_BY[name]:
            raise LaunchError(f"--{name} {value}: {arguments.print} has no place for it")
        if not re.fullmatch(r"[\w./:@,+-]+", value, re.ASCII):
            raise LaunchError(f"--{name} {value!r}: expected a name without spaces or quotes")
    if "time" in given and not re.fullmatch(r"(\d+-)?\d{1,3}:[0-5]\d:[0-5]\d", given["time"]):
        raise LaunchError(f"--time {given['time']}: expected HH:MM:SS or D-HH:MM:SS")
    options = Options(kind=arguments.print, **given)
    if options.seconds == 0:  # to SLURM it means no limit, to Kubernetes nothing valid
        raise LaunchError(f"--time {options.time}: expected more than no time")
    return options
