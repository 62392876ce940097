"""A domain's part of the data command: where its rows come from, and how they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from sg_rlhf.data_io.dataset_writer import Records
from sg_rlhf.data_io.pinned_download import Origin
from sg_rlhf.data_io.records import ProgressCallback, mixed

Row = TypeVar("Row")

#: The values of a domain's own flags, by name without dashes, and those that all domains have:
#: `test_fraction` (None: nothing was said) and `seed`.
Options: TypeAlias = Mapping[str, Any]
#: Model id or folder -> its tokenizer; passed in because the tasks do not import transformers.
LoadTokenizer: TypeAlias = Callable[[str], Any]


@dataclass(frozen=True)
class DataFiles:
    """What was read or generated.

    Attributes:
        files: file name -> records; `train.jsonl` and `test.jsonl` hold `input`, `answer` and
            `datasource`.
        facts: for the manifest and the report. `counts` is a number per split and group,
            `{"train": {group: rows}, "test": ...}`, or numbers by name; other numbers are printed.
    """

    files: Mapping[str, Records]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class BuildPlan(Generic[Row]):
    """What becomes of the rows, under the given flags.

    Attributes:
        request: for the manifest; the same request on the same inputs is not built again.
        make: (train rows, test rows or None) -> the data set. None: hold out `test_fraction`.
    """

    request: Mapping[str, Any]
    make: Callable[[list[Row], list[Row] | None], DataFiles]


@dataclass(frozen=True)
class Generator(Generic[Row]):
    """Makes rows instead of reading them.

    Attributes:
        defaults: the keys of `--generate`.
        make: the keys -> train rows, test rows, and further files by name.
        readers: key -> function from text to value, where the default's type is not enough.
    """

    name: str
    defaults: Mapping[str, Any]
    make: Callable[..., tuple[list[Row], list[Row], Mapping[str, Records]]]
    readers: Mapping[str, Callable[[str], Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class HubFile:
    """A file of a data set on the Hugging Face hub; the user names the commit."""

    repository: str
    file: str


@dataclass(frozen=True)
class DataSource(Generic[Row]):
    """A domain's part of `sg-rlhf data NAME`.

    Attributes:
        description: of `--help`; begins with what the command does and shows examples.
        files: what a file of rows is, for messages.
        read: (file, name of its data set or None, progress) -> its rows, checked. None: no files.
        generator: None: the domain only reads.
        published: name as `--source` takes it -> where the file is; or a function that gives these.
        flags: flag -> argparse's keyword arguments, for flags of this domain alone.
        report: lines about the manifest, beside the numbers that are printed for every domain.
        next_step: (folder, manifest) -> the command that comes next.
    """

    description: str
    files: str
    plan: Callable[[Options, LoadTokenizer], BuildPlan[Row]]
    read: Callable[[Path, str | None, ProgressCallback], list[Row]] | None = None
    generator: Generator[Row] | None = None
    published: Callable[[], Mapping[str, Origin | HubFile]] = dict
    test_fraction: float = 0.0
    flags: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    report: Callable[[Mapping[str, Any]], Iterable[str]] | None = None
    next_step: Callable[[Path, Mapping[str, Any]], str] | None = None


def counts_of(groups: Sequence[Any]) -> dict[str, int]:
    """Rows per group, by group."""
    return {str(group): groups.count(group) for group in sorted(set(groups))}


def data_files(
    train: list[Row],
    test: list[Row],
    records: Callable[[list[Row]], Records],
    group: Callable[[Row], Any],
    facts: Mapping[str, Any] | None = None,
    order: str | None = None,
) -> DataFiles:
    """The two files, with rows per group in `counts`, written in an order by the seed `order`."""
    splits = {"train": train, "test": test}
    counts = {name: counts_of([group(row) for row in rows]) for name, rows in splits.items()}
    if order is not None:
        splits = {name: mixed(rows, order) for name, rows in splits.items()}
    files = {f"{name}.jsonl": records(rows) for name, rows in splits.items()}
    return DataFiles(files, {"counts": counts, **(facts or {})})


def generated_records(
    description: str, generator: Generator[Mapping[str, Any]]
) -> DataSource[Mapping[str, Any]]:
    """The data of a domain whose generator makes records: `input`, `answer`, `datasource`."""

    def make(train: list[Mapping[str, Any]], test: list[Mapping[str, Any]] | None) -> DataFiles:
        return data_files(train, test or [], lambda rows: rows, lambda row: row["datasource"])

    return DataSource(
        description,
        "a generated data set",
        lambda options, load_tokenizer: BuildPlan({}, make),
        generator=generator,
    )
