"""What a domain's subcommand of `python -m sg_rlhf.data` is made of.

The command itself (`sg_rlhf.data.command`) does what all have in common: is the folder up to date,
may it be written, writing it whole with its manifest, printing.
"""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from sg_rlhf.common.resources import Requirements
from sg_rlhf.data_io.dataset_writer import Records

#: Model id or folder -> its tokenizer; passed in because the tasks do not import transformers.
LoadTokenizer: TypeAlias = Callable[[str], Any]


@dataclass(frozen=True)
class Made:
    """What was read or generated.

    Attributes:
        files: file name -> records; `train.jsonl` and `test.jsonl` hold `input`, `answer` and
            `datasource`, which OpenRLHF's loader reads, and what else the domain wants.
        facts: what came out (counts and the like), for the manifest and the report.
    """

    files: Mapping[str, Records]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """A checked request.

    Attributes:
        request: what was asked for, for the manifest: the prompt's version, the source with its
            checksums or seed, the options. The same request on the same inputs is done at once.
        make: reads or generates everything.
        needs: what that takes of disk and memory, checked before it begins.
    """

    request: Mapping[str, Any]
    make: Callable[[], Made]
    needs: Callable[[], Requirements] | None = None


class DataCommand(ABC):
    """The subcommand of one domain.

    Attributes:
        description: of `--help`; begins with what the command does and shows examples.
    """

    description: str

    @abstractmethod
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """The domain's own options; those of all domains are there."""

    @abstractmethod
    def plan(self, args: argparse.Namespace, load_tokenizer: LoadTokenizer) -> Plan:
        """Check the arguments.

        Raises:
            ValueError: they are wrong, or a source is; one line for the user.
        """

    @abstractmethod
    def report(self, manifest: Mapping[str, Any]) -> Iterable[str]:
        """The lines that are printed of a data set that was made."""

    def next_step(self, out: Path, manifest: Mapping[str, Any]) -> str | None:
        """The command that comes next."""
        return None
