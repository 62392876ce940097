"""Files of other projects, each at one commit and checked: the cache, `--from` and the command."""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from sg_rlhf.data_io.pinned_download import Origin, download
from sg_rlhf.data_io.records import DataError


def fetched(origin: Origin, path: Path, given: Mapping[str, Path], name: str) -> Path:
    """A file in the cache, checked: from a folder that was given, as it is there, or downloaded.

    Args:
        path: in the cache.
        given: folders that have files under their paths, by name.
        name: of this file's folder.

    Raises:
        DataError: the file is missing, another one than pinned, or cannot be downloaded.
    """
    source = given[name] / origin.path if name in given else None
    if source is not None and not source.is_file():
        raise DataError(f"--from {name}={given[name]}: has no {origin.path}")
    if source is not None:
        origin.check(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)
    elif path.is_file():
        origin.check(path)
    else:
        download(origin, path.parent, path.name)
    return path


def add_options(
    parser: argparse.ArgumentParser, cache: Path, names: Collection[str], kind: str
) -> None:
    """`--cache` and `--from KIND=FOLDER`, where KIND is one of the names."""
    parser.add_argument("--cache", type=Path, default=cache, metavar="DIR")
    parser.add_argument(
        "--from", dest="given", action="append", default=[], metavar=f"{kind}=FOLDER",
        type=functools.partial(_given, names=names, kind=kind),
    )  # fmt: skip


def _given(text: str, *, names: Collection[str], kind: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if name not in names or not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(
            f"{text}: expected {kind}=FOLDER, {kind} one of {', '.join(names)}"
        )
    return name, Path(folder)


def command(
    module: str,
    about: str | None,
    options: Callable[[argparse.ArgumentParser], None],
    lines: Callable[[Path, dict[str, Path]], Iterable[str]],
    argv: Sequence[str] | None,
) -> int:
    """Fetch and say what is there. Exit status 0, or 2 with one line.

    Args:
        module: that is run.
        about: its docstring.
        options: adds `--cache` and `--from`.
        lines: fetches, and says what.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options(parser)
    args = parser.parse_args(argv)
    try:
        said = list(lines(args.cache, dict(args.given)))
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*said, sep="\n")
    return 0
