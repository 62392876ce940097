"""The output folder: the run's request (`run.json`) and one line per graded sample.

A run may be killed at any moment. A sample is appended as one whole line once it is graded.
Resuming removes a line that was cut short, and refuses another request.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from sg_rlhf.common.atomic_io import append_whole, write_whole
from sg_rlhf.common.home import writable
from sg_rlhf.common.resources import nearest_existing
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

#: What is read of a stored sample.
_FIELDS = {
    "benchmark", "id", "sample", "group", "prompt", "response", "gold", "finish_reason", "tokens",
    "correct", "extracted",
}  # fmt: skip
#: Differences between requests that a resumed run may have.
_FREE = re.compile(r"model\.name:|benchmarks\.[^:]*\.(title|pass_at):")


def key_of(row: Row) -> Key:
    """The key of a stored sample."""
    return (row["benchmark"], row["id"], row["sample"])


def check_folder(out: Path, resume: bool) -> None:
    """Refuse a folder that cannot be written to, or holds another run than the one to resume."""
    there = nearest_existing(out)
    if not there.is_dir():
        raise EvalError(f"--out {out}: {there} is a file, expected a folder")
    if not writable(there):
        raise EvalError(f"--out {out}: no right to write in {there}; give another folder")
    # A run killed before it began leaves its lock and perhaps a temporary file, both hidden.
    names = os.listdir(out) if out.is_dir() else []
    others = sorted(name for name in names if not name.startswith("."))
    if others and not resume:
        raise EvalError(
            f"--out {out}: not empty (holds {others[0]}); "
            "continue that run with --resume, or give another folder"
        )
    if others and not (out / REQUEST).is_file():
        raise EvalError(f"--out {out}: holds {others[0]} but no {REQUEST}: not a run")


class Store:
    """The folder of one evaluation, locked by one process at a time."""

    def __init__(self, out: Path, resume: bool = False) -> None:
        check_folder(out, resume)
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        self._lock = (out / LOCK).open("w")
        try:
            # Of the process: it ends with it however it dies, and children do not have it.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise EvalError(f"--out {out}: another evaluation is writing there") from None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_error: object) -> None:
        self._lock.close()

    def begin(self, request: Mapping[str, Any]) -> dict[Key, Row]:
        """The stored samples of the run with this request. Removes a line that was cut short."""
        path = self.out / REQUEST
        if not path.is_file():
            return {}
        before = _read_json(path)["request"]
        changes = differences(before, json.loads(json.dumps(request)))
        # The same contents may lie in another folder; a title and pass@k change no response.
        changes = [change for change in changes if not _FREE.match(change)]
        if changes:
            raise EvalError(
                f"--resume: {path} was begun with another request: {first_three(changes)}"
            )
        samples = self.out / SAMPLES
        if not samples.is_file():
            return {}
        with samples.open("r+b") as file:
            rows, whole = _whole_rows(file.read(), samples)
            file.truncate(whole)
        return rows

    def write_request(
        self, request: Mapping[str, Any], environment: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Write `run.json`, which keeps its date and versions of the first start; returns these.

        A resumed run may have another k of pass@k (`begin`), which `--compare` reads there.
        """
        path = self.out / REQUEST
        begun = _read_json(path)["begun"] if path.is_file() else environment
        content = {"request": request, "begun": begun}
        write_whole(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        return dict(begun)

    def append(self, rows: Iterable[Row]) -> None:
        """Append samples in one write."""
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        # Half a surrogate pair cannot be UTF-8; as an escape in the JSON it can.
        text = text.encode(errors="backslashreplace").decode()
        append_whole(self.out / SAMPLES, text, sync=False)

    def append_failure(self, key: Key, problem: str) -> None:
        """Record that a sample could not be generated, and why."""
        benchmark, question, sample = key
        note = {"benchmark": benchmark, "id": question, "sample": sample, "problem": problem}
        append_whole(self.out / FAILURES, json.dumps(note) + "\n", sync=False)

    def failures(self) -> dict[str, int]:
        """Number of these failures per benchmark, over all starts of the run."""
        path = self.out / FAILURES
        lines = path.read_text().splitlines() if path.is_file() else []
        # A line cut short by a kill is counted with none.
        names = re.findall(r'^{"benchmark": "([^"]+)"', "\n".join(lines), re.MULTILINE)
        return dict(Counter(names))


def read_run(folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[Key, Row]]:
    """A folder's request, its first start (date and versions), and its samples.

    The folder does not change. A line cut short by a kill is left out.
    """
    if not (folder / REQUEST).is_file():
        raise EvalError(f"{folder}: no {REQUEST} there, expected the --out of an evaluation")
    content, path = _read_json(folder / REQUEST), folder / SAMPLES
    rows = _whole_rows(path.read_bytes(), path)[0] if path.is_file() else {}
    return content["request"], content["begun"], rows


def model_of(folder: Path) -> str | None:
    """The `--model` of the run in a folder; None without one."""
    if not (folder / REQUEST).is_file():
        return None
    try:
        return str(_read_json(folder / REQUEST)["request"]["model"]["name"])
    except (KeyError, TypeError):
        return None


def differences(before: Any, now: Any, words: str = "was {}, now {}") -> list[str]:
    """One phrase per value that differs between two JSON values: "key: was A, now B"."""
    return [
        f"{path}: {words.format(_short(one), _short(other))}"
        for path, one, other in _changes(before, now, "")
    ]


def first_three(changes: list[str]) -> str:
    """The first of `differences`, and how many more there are."""
    return "; ".join(changes[:3]) + (f"; {len(changes) - 3} more" if changes[3:] else "")


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
        try:
            row = json.loads(line)
            if not row.keys() >= _FIELDS:
                raise LookupError
            key = key_of(row)
        except (ValueError, LookupError, AttributeError):
            raise EvalError(f"{path}: line {number}: no sample; the file was damaged") from None
        if key in rows:
            raise EvalError(f"{path}: line {number}: sample {key} occurs twice")
        rows[key] = row
    return rows, whole


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise EvalError(f"{path}: not JSON: {error}") from None


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
