"""Options and output shared by the data commands of all domains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sg_rlhf.common.argument_types import key_values
from sg_rlhf.data_io.dataset_writer import UsageError, sha256_of
from sg_rlhf.data_io.records import DataError


def generate_options(
    tokens: Sequence[str],
    defaults: Mapping[str, Any],
    readers: Mapping[str, Callable[[str], Any]] | None = None,
) -> dict[str, Any]:
    """Parse the KEY=VALUE pairs of `--generate` and apply them to the defaults.

    Args:
        tokens: the pairs.
        defaults: every key with its default.
        readers: key -> function from text to value; default: the type of the default value.

    Raises:
        UsageError: an unknown key, a key given twice, or a bad value.
    """
    options = dict(defaults)
    try:
        given = key_values("--generate", tokens, options)
    except ValueError as error:
        raise UsageError(str(error)) from None
    for key, value in given.items():
        kind = type(options[key])
        try:
            options[key] = (readers or {}).get(key, kind)(value)
        except UsageError:
            raise
        except ValueError:
            expected = "a whole number" if kind is int else "a number"
            raise UsageError(f"--generate {key}={value}: expected {expected}") from None
    return options


def file_entry(path: Path, expected: str) -> dict[str, str]:
    """A source file's name and SHA-256, for the manifest. Without the file: `DataError`."""
    if not path.is_file():
        raise DataError(f"{path}: no such file, expected {expected}")
    return {"name": path.name, "sha256": sha256_of(path)}
