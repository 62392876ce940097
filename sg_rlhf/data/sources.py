"""Where the rows of a data set come from: files, the hub, a published file, or a generator."""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from sg_rlhf.common.argument_types import progress_bar
from sg_rlhf.data_io.command_options import file_entry, generate_options
from sg_rlhf.data_io.dataset_writer import Records, UsageError
from sg_rlhf.data_io.hf_hub import download_from_hub
from sg_rlhf.data_io.pinned_download import Origin, download
from sg_rlhf.tasks.data_source import DataSource, Generator, HubFile

#: Train rows, test rows (None: hold out a fraction), further files.
Rows: TypeAlias = tuple[list[Any], list[Any] | None, Mapping[str, Records]]

HUB = "hub:OWNER/NAME:FILE"


@dataclass(frozen=True)
class Source:
    """Rows, when they are called for.

    Attributes:
        entry: for the manifest.
        test_fraction: share to hold out, where the source has no test rows of its own.
    """

    entry: Mapping[str, Any]
    read: Callable[[], Rows]
    test_fraction: float = 0.0


def find_source(data: DataSource[Any], args: argparse.Namespace) -> Source:
    """The source that the flags name, checked as far as that needs no rows.

    Raises:
        ValueError: flags contradict each other, or a file is missing; one line for the user.
    """
    names: list[str] = list(args.source or ())
    can_read = data.read is not None
    if data.generator is not None and not names and (args.generate is not None or not can_read):
        names = [data.generator.name]
    if not names:
        raise UsageError("give one of --generate KEY=VALUE ... and --source SOURCE ...")
    if data.generator is not None and names == [data.generator.name]:
        return _generated(data.generator, args)
    if args.generate is not None:
        made = "" if data.generator is None else f" {data.generator.name}"
        raise UsageError(f"--generate belongs to --source{made}; give one of the two")
    if args.test_file and args.test_fraction is not None:
        raise UsageError("--test-file and --test-fraction exclude each other")
    test_fraction = data.test_fraction if args.test_fraction is None else args.test_fraction
    if args.seed is not None and (args.test_file or not test_fraction):
        raise UsageError("--seed needs --test-fraction; with --test-file they exclude each other")
    entry, read_train = _rows_of(data, names, args)
    if not args.test_file:
        drawn = {"test_fraction": test_fraction, "seed": args.seed or 0} if test_fraction else {}
        return Source({**entry, **drawn}, lambda: (read_train(), None, {}), test_fraction)
    test = [file_entry(path, data.files) for path in args.test_file]
    return Source({**entry, "test": test}, lambda: (read_train(), _read(data, args.test_file), {}))


def _generated(generator: Generator[Any], args: argparse.Namespace) -> Source:
    for name in ("revision", "test_file", "test_fraction", "seed"):
        if getattr(args, name) not in (None, ()):
            raise UsageError(
                f"--{name.replace('_', '-')} does not go with --source {generator.name}; "
                f"--generate has the keys {', '.join(generator.defaults)}"
            )
    options = generate_options(args.generate or (), generator.defaults, generator.readers)

    def make() -> Rows:
        try:
            return generator.make(**options)
        except ValueError as error:
            raise UsageError(f"--generate {error}") from None

    return Source({"kind": "generated", "name": generator.name, **options}, make)


def _rows_of(
    data: DataSource[Any], names: Sequence[str], args: argparse.Namespace
) -> tuple[dict[str, Any], Callable[[], list[Any]]]:
    """The manifest's entry of what is named, and the function that reads it."""
    published = data.published()
    others = [*published, *([data.generator.name] if data.generator else ())]
    named = [name for name in names if name in others or name.startswith("hub:")]
    if named and len(names) > 1:
        raise UsageError(f"--source {' '.join(names)}: {named[0]} cannot be mixed with others")
    origin = published.get(names[0])
    if isinstance(origin, HubFile) or names[0].startswith("hub:"):
        known = origin if isinstance(origin, HubFile) else None
        return _on_the_hub(data, names[0], known, args)
    if args.revision is not None:
        raise UsageError(f"--revision belongs to --source {HUB}")
    if origin is not None:
        return _pinned(data, names[0], origin)
    paths = [Path(name) for name in names]
    expected = f"{data.files}, one of the sources {', '.join(others)}, or {HUB}"
    files = [file_entry(path, expected) for path in paths]
    return {"kind": "files", "train": files}, lambda: _read(data, paths)


def _pinned(
    data: DataSource[Any], name: str, origin: Origin
) -> tuple[dict[str, Any], Callable[[], list[Any]]]:
    def read() -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = download(
                origin, Path(folder), Path(origin.path).name, by_hand="give it as --source FILE"
            )
            return _read(data, [path], name)

    checksum = {"sha256": origin.sha256} if origin.sha256 else {"git_blob": origin.git_blob}
    return {"kind": "published", "name": name, "url": origin.url, **checksum}, read


def _on_the_hub(
    data: DataSource[Any], name: str, known: HubFile | None, args: argparse.Namespace
) -> tuple[dict[str, Any], Callable[[], list[Any]]]:
    parts = re.fullmatch(r"hub:([\w.-]+/[\w.-]+):(.+)", name)
    if known is None and parts is None:
        raise UsageError(f"--source {name}: expected {HUB}")
    repository, file = (known.repository, known.file) if known else parts.groups()  # type: ignore[union-attr]
    if args.revision is None:
        raise UsageError(
            f"--source {name}: needs --revision COMMIT, 40 hex digits: no commit is pinned, "
            f"and a branch can change (https://huggingface.co/datasets/{repository}/commits/main)"
        )

    def read() -> list[Any]:
        path = download_from_hub(
            repository, file, args.revision, skip_room_check=args.skip_room_check
        )
        return _read(data, [path], repository.rpartition("/")[2])

    entry = {"kind": "hub", "repository": repository, "file": file, "revision": args.revision}
    return entry, read


def _read(data: DataSource[Any], paths: Iterable[Path], source: str | None = None) -> list[Any]:
    assert data.read is not None
    rows: list[Any] = []
    for path in paths:
        with progress_bar(f"reading {path.name}", "rows") as bar:
            rows += data.read(path, source, bar.update)
    return rows
