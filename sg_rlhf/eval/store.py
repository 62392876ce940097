"""The output folder: the run's request (`run.json`) and one line per graded sample.

A run may be killed at any moment. A sample is appended as one whole line once it is graded.
Resuming removes a line that was cut short, and refuses another request.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeAlias

from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.tasks.questions import EvalError

REQUEST = "run.json"
SAMPLES = "samples.jsonl"
RESULTS = "results.json"
TABLE = "table.md"
FAILURES = "retrieval_failures.jsonl"
LOCK = ".lock"

#: Benchmark, question id, sample index.
Key: TypeAlias = tuple[str, str, int]
Row: TypeAlias = dict[str, Any]

_KEYS = ("benchmark", "id", "sample", "prompt", "response", "extracted", "gold", "correct")
_FIELDS = (*_KEYS, "reason", "finish_reason", "tokens")


def key_of(row: Row) -> Key:
    """The key of a stored sample."""
    return (row["benchmark"], row["id"], row["sample"])


class Store:
    """The folder of one evaluation, locked by one process at a time.

    Args:
        resume: continue the run in the folder, if there is one.
    """

    def __init__(self, out: Path, resume: bool = False) -> None:
        self.out = out
        if out.exists() and not out.is_dir():
            raise EvalError(f"--out {out}: is a file, expected a folder")
        #: Folders that this run creates, the innermost first.
        self._made = [folder for folder in (out, *out.parents) if not folder.exists()]
        others = self._contents()
        if others and not resume:
            raise EvalError(
                f"--out {out}: not empty (holds {others[0]}); "
                "continue that run with --resume, or give another folder"
            )
        if others and not (out / REQUEST).is_file():
            raise EvalError(f"--out {out}: holds {others[0]} but no {REQUEST}: not a run")
        out.mkdir(parents=True, exist_ok=True)
        lock = _locked(out / LOCK)
        if lock is None:
            raise EvalError(f"--out {out}: another evaluation is writing there")
        self._lock = lock

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        (self.out / LOCK).unlink(missing_ok=True)
        # A run that did not begin leaves no folder. One that has something in it stays.
        with contextlib.suppress(OSError):
            for folder in self._made:
                folder.rmdir()
        self._lock.close()

    def begin(self, request: Mapping[str, Any]) -> dict[Key, Row]:
        """The stored samples of the run with this request. Removes a line that was cut short."""
        path = self.out / REQUEST
        if not path.is_file():
            return {}
        before = _read_json(path)["request"]
        changes = differences(before, json.loads(json.dumps(request)))
        # The same contents may lie in another folder, and a title is for people.
        changes = [c for c in changes if not re.match(r"model\.name:|benchmarks\.[^:]*\.title:", c)]
        if changes:
            shown = "; ".join(changes[:3]) + (f"; {len(changes) - 3} more" if changes[3:] else "")
            raise EvalError(f"--resume: {path} was begun with another request: {shown}")
        return self._read_samples()

    def write_request(
        self, request: Mapping[str, Any], environment: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Write `run.json`; a resumed run leaves it as it is.

        Returns:
            Date and versions of the run's first start.
        """
        path = self.out / REQUEST
        if not path.is_file():
            content = {"request": request, "begun": environment}
            write_whole(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        return dict(_read_json(path)["begun"])

    def append(self, rows: Iterable[Row]) -> None:
        """Append samples in one write."""
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        # Half a surrogate pair cannot be UTF-8; as an escape in the JSON it can.
        data = text.encode("utf-8", errors="backslashreplace")
        with (self.out / SAMPLES).open("ab", buffering=0) as file:
            written = file.write(data)
            # A disk that fills up writes a part: the torn line is removed when the run goes on.
            if written != len(data):
                raise EvalError(f"{self.out / SAMPLES}: the disk is full")

    def append_failure(self, key: Key, problem: str) -> None:
        """Record that a sample could not be generated, and why."""
        benchmark, question, sample = key
        note = {"benchmark": benchmark, "id": question, "sample": sample, "problem": problem}
        with (self.out / FAILURES).open("a") as file:
            file.write(json.dumps(note) + "\n")

    def failures(self) -> dict[str, int]:
        """Number of these failures per benchmark, over all starts of the run."""
        path = self.out / FAILURES
        lines = path.read_text().splitlines() if path.is_file() else []
        # A line cut short by a kill is counted with none.
        names = re.findall(r'^{"benchmark": "([^"]+)"', "\n".join(lines), re.MULTILINE)
        return dict(Counter(names))

    def _contents(self) -> list[str]:
        # A run killed before it began leaves its lock and perhaps a temporary file, both hidden.
        names = os.listdir(self.out) if self.out.is_dir() else []
        return sorted(name for name in names if not name.startswith("."))

    def _read_samples(self) -> dict[Key, Row]:
        path = self.out / SAMPLES
        if not path.is_file():
            return {}
        with path.open("r+b") as file:
            rows, whole = _whole_rows(file.read(), path)
            file.truncate(whole)
        return rows


def _locked(path: Path) -> IO[str] | None:
    """A lock file that this process holds; None where another does.

    A lock of the process: it ends with it however it dies, and children do not have it.
    """
    while True:
        file = path.open("w")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return None
        # Its last owner may have deleted it since it was opened, and a third process may hold
        # another file of that name.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


def read_run(folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[Key, Row]]:
    """A folder's request, its first start (date and versions), and its samples.

    The folder does not change. A line cut short by a kill is left out.
    """
    if not (folder / REQUEST).is_file():
        raise EvalError(f"{folder}: no {REQUEST} there, expected the --out of an evaluation")
    content = _read_json(folder / REQUEST)
    match content:
        case {"request": dict() as request, "begun": dict() as begun}:
            path = folder / SAMPLES
            rows = _whole_rows(path.read_bytes(), path)[0] if path.is_file() else {}
            return request, begun, rows
    raise EvalError(f"{folder / REQUEST}: expected the objects request and begun; damaged")


def model_of(folder: Path) -> str | None:
    """The `--model` of the run in a folder; None without one."""
    if not (folder / REQUEST).is_file():
        return None
    try:
        return str(_read_json(folder / REQUEST)["request"]["model"]["name"])
    except (KeyError, TypeError):
        return None


def read_results(folder: Path) -> dict[str, Any]:
    """A folder's `results.json`; empty without one."""
    path = folder / RESULTS
    found = _read_json(path) if path.is_file() else {}
    if not isinstance(found, dict):
        raise EvalError(f"{path}: expected a JSON object; damaged")
    return found


def differences(before: Any, now: Any, words: str = "was {}, now {}") -> list[str]:
    """One phrase per value that differs between two JSON values: "key: was A, now B"."""
    return [
        f"{path}: {words.format(_short(one), _short(other))}"
        for path, one, other in _changes(before, now, "")
    ]


def _changes(before: Any, now: Any, at: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*before, *now]):
            path = f"{at}.{key}" if at else str(key)
            yield from _changes(before.get(key), now.get(key), path)
    elif before != now:
        yield at, before, now


def _whole_rows(data: bytes, path: Path) -> tuple[dict[Key, Row], int]:
    """The rows of whole lines, and where the last of them ends."""
    whole = data.rfind(b"\n") + 1
    rows: dict[Key, Row] = {}
    for number, line in enumerate(data[:whole].splitlines(), start=1):
        row = _parse_row(line, path, number)
        key = key_of(row)
        if key in rows:
            raise EvalError(f"{path}: line {number}: sample {key} occurs twice")
        rows[key] = row
    return rows, whole


def _parse_row(line: bytes, path: Path, number: int) -> Row:
    try:
        row = json.loads(line)
    except ValueError:
        raise EvalError(f"{path}: line {number}: not JSON; the file was damaged") from None
    missing = [f for f in _FIELDS if f not in row] if isinstance(row, dict) else list(_FIELDS)
    if missing:
        raise EvalError(f"{path}: line {number}: field {missing[0]!r} is missing")
    return dict(row)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise EvalError(f"{path}: not JSON: {error}") from None


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
