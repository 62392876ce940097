"""Damages of a search index: every file, every way, when it is found, and what is said.

    python bench/retrieval_damage.py --data DIR --out FILE

DIR holds `corpus.jsonl`. A BM25 index of 100,000 passages (the real ones, then made up ones) has a
file above 16 MiB, which a start does not read whole; flat and IVF indexes of 500 passages, with an
encoder of random weights, have the other files. Each damage is done to one file of a copy, which is
then opened as the server opens it, asked 50 questions if it opened, and verified.

removed, emptied      the file is gone, or has no bytes
cut, longer           8 bytes less, or more
a bit: start ...      one bit of the first bytes, of the middle, of the last bytes is another
page of zeros         4 KiB in the middle were never written
swapped               another file of the same index, or of another one of the same kind

An outcome is "refused" with status 2 and one line, "wrong" if an answer differs from that of the
undamaged index, or "same" if the damage made no difference. A traceback ends the script.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from arguments import as_json
from machine import provenance
from retrieval_load import enlarge_corpus, make_queries

from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.retrieval import command, contents, verify
from sg_rlhf.retrieval.corpus import iterate_contents
from sg_rlhf.retrieval.index import build
from sg_rlhf.retrieval.random_encoder import save_random_encoder
from sg_rlhf.retrieval.search import Retriever, open_faiss, open_index

#: What is built, and of how many passages.
ROWS = {"bm25": 100_000, "flat": 500, "ivf": 500}
QUESTIONS = 50
CORPUS, ENCODER, INDEX, OTHER = "corpus.jsonl", "encoder", "index", "other"

Damage = Callable[[Path], None]


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    os.truncate(path, max(0, path.stat().st_size - 8))


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(8))


def bit(place: float) -> Damage:
    """One bit, at the start (0) to the end (1)."""

    def damage(path: Path) -> None:
        at = round(place * (path.stat().st_size - 1))
        with path.open("r+b") as file:
            file.seek(at)
            before = file.read(1)
            file.seek(at)
            file.write(bytes([before[0] ^ 4]))

    return damage


def zeros(path: Path) -> None:
    """A page that was never written."""
    with path.open("r+b") as file:
        size = path.stat().st_size
        file.seek(size // 2 // 4096 * 4096)
        file.write(bytes(min(4096, size - file.tell())))


def swapped(other: Path) -> Damage:
    def damage(path: Path) -> None:
        shutil.copyfile(other, path)

    return damage


DAMAGES: dict[str, Damage] = {
    "removed": Path.unlink,
    "emptied": emptied,
    "cut by 8 bytes": cut,
    "8 bytes longer": longer,
    "a bit: start": bit(0.001),
    "a bit: middle": bit(0.5),
    "a bit: end": bit(0.999),
    "a page of zeros": zeros,
}


def keep_time(damage: Damage) -> Damage:
    """The same, with the time stamp of before: a disk that lost something changes no time."""

    def damaged(path: Path) -> None:
        status = path.stat()
        damage(path)
        if path.exists():
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    return damaged


def outcome(action: Callable[[], Any], home: Path) -> dict[str, Any]:
    """Status and last line of a command that does this; everything but its own errors passes."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        status = command.run("command", lambda: action())
    if not status:
        return {"status": 0}
    line = errors.getvalue().strip().splitlines()[-1]
    return {"status": status, "line": line.removeprefix("command: ").replace(f"{home}/", "")}


def asked(retriever: Retriever, questions: list[str]) -> list[Any]:
    """What the questions find, or the reason of a 500."""
    found: list[Any] = []
    for question in questions:
        try:
            [hits] = retriever.search([question], 3)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append([(hit.document, round(hit.score, 5)) for hit in hits])
    return found


class Index:
    """An undamaged index in a folder of its own, with corpus, encoder, and one to swap with."""

    def __init__(self, home: Path, kind: str, source: Path, questions: list[str]) -> None:
        self.home, self.kind, self.questions = home, kind, questions
        home.mkdir()
        enlarge_corpus(source, ROWS[kind], home / CORPUS)
        encoder, options = "bm25", {}
        if kind != "bm25":
            encoder = str(home / ENCODER)
            save_random_encoder(home / ENCODER, iterate_contents(home / CORPUS))
            options = {"type": kind, "device": "cpu"}
        build(home / CORPUS, encoder, home / INDEX, progress=False, **options)
        # Of the same passages in another order: every file has its size, or nearly.
        lines = (home / CORPUS).read_text(encoding="utf-8").splitlines(keepends=True)
        (home / OTHER).mkdir()
        (home / OTHER / CORPUS).write_text("".join(reversed(lines)), encoding="utf-8")
        build(home / OTHER / CORPUS, encoder, home / OTHER / INDEX, progress=False, **options)
        self.answers = asked(open_index(home / INDEX, device="cpu"), questions)

    def files(self) -> Iterator[Path]:
        """Everything that a search needs, from `home`."""
        for top in (INDEX, CORPUS, ENCODER):
            for path in sorted([self.home / top, *(self.home / top).rglob("*")]):
                if path.is_file():
                    yield path.relative_to(self.home)

    def cases(self, name: Path) -> Iterator[tuple[str, Damage]]:
        """Damages of a file."""
        yield from DAMAGES.items()
        same = self.home / OTHER / name
        if same.is_file() and same.read_bytes() != (self.home / name).read_bytes():
            yield "swapped: of another index", swapped(same)
        if name.parts[0] == INDEX:
            largest = max((self.home / INDEX).rglob("*.*"), key=lambda path: path.stat().st_size)
            if largest != self.home / name:
                yield "swapped: another file", swapped(largest)

    def look(self, name: Path, damage: Damage, open_it: Callable[[Path], Retriever]) -> Any:
        """What opening, asking and verifying say of a damaged copy."""
        with tempfile.TemporaryDirectory(dir=self.home.parent) as folder:
            home = Path(folder)
            for part in (INDEX, ENCODER, CORPUS):
                whole = self.home / part
                if whole.is_dir():
                    # Links: a damaged file is a copy of its own, and only that one.
                    shutil.copytree(whole, home / part, copy_function=os.link)
                elif whole.exists():
                    os.link(whole, home / part)
            path = home / name
            path.unlink()
            shutil.copy2(self.home / name, path)
            damage(path)
            opened: list[Retriever] = []
            found: dict[str, Any] = {
                "start": outcome(lambda: opened.append(open_it(home)), home),
                "query": "not asked",
            }
            if opened:
                answers = asked(opened[0], self.questions)
                failed = [answer for answer in answers if isinstance(answer, str)]
                wrong = sum(a != b for a, b in zip(answers, self.answers, strict=True))
                found["query"] = f"{wrong} of {len(answers)} wrong" if wrong else "same"
                if failed:
                    found["query"] += f", {len(failed)} of them 500: {failed[0]}"
            if (home / INDEX / "manifest.json").exists() or name.name == "manifest.json":
                found["verify"] = outcome(lambda: verify.verify(home / INDEX, None), home)
            return found


def of_folder(home: Path) -> Retriever:
    return open_index(home / INDEX, device="cpu")


def of_plain_file(home: Path) -> Retriever:
    return open_faiss(
        home / INDEX / "index.faiss", home / CORPUS, str(home / ENCODER), device="cpu"
    )


def measure(args: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """Every damage of every file."""
    questions = make_queries(args.data)[:QUESTIONS]
    rows = []
    for kind in ROWS:
        index = Index(work / kind, kind, args.data / "corpus.jsonl", questions)
        # Corpus and encoder are those of the flat index.
        names = [name for name in index.files() if kind != "ivf" or name.parts[0] == INDEX]
        jobs = [(name, what, how) for name in names for what, how in index.cases(name)]
        if kind == "bm25":
            corpus = Path(CORPUS)
            jobs += [
                (corpus, f"{what}, time kept", keep_time(how)) for what, how in DAMAGES.items()
            ]
        ways: dict[str, Callable[[Path], Retriever]] = {"--index": of_folder}
        if kind != "bm25":
            ways["--faiss-index"] = of_plain_file
        for flag, open_it in ways.items():
            for name, what, how in jobs:
                if flag == "--faiss-index" and name.name in ("manifest.json", "offsets.npy"):
                    continue  # not opened
                size = (index.home / name).stat().st_size
                row = {"kind": kind, "opened": flag, "file": str(name), "bytes": size,
                       "damage": what}  # fmt: skip
                found = index.look(name, how, open_it)
                if flag == "--faiss-index":
                    found.pop("verify", None)
                rows.append({**row, **found})
                print(json.dumps(rows[-1]), flush=True)
        shutil.rmtree(work / kind)
    return rows


def group(row: dict[str, Any]) -> str:
    """What a row of the table is about."""
    if row["opened"] == "--faiss-index":
        return f"`--faiss-index`: {row['file'].split('/')[0].replace(INDEX, 'the faiss file')}"
    if row["file"].startswith(INDEX):
        if row["file"].endswith("manifest.json"):
            return "manifest.json"
        return f"index file {'above' if row['bytes'] > contents.SMALL else 'up to'} 16 MiB"
    time_kept = ", time stamp kept" if "time kept" in row["damage"] else ""
    return row["file"].split("/")[0].replace(CORPUS, "corpus") + time_kept


def when(row: dict[str, Any]) -> str:
    """When a damage is found."""
    if row["start"]["status"]:
        return "start"
    if row.get("verify", {}).get("status"):
        return "verify"
    return "none" if row["query"] == "same" else "never"


def table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many damages of each group are found when, and the lines."""
    made: dict[str, Any] = {}
    for row in rows:
        entry = made.setdefault(
            group(row), {"damages": 0, "start": 0, "verify": 0, "none": 0, "never": 0}
        )
        entry["damages"] += 1
        entry[when(row)] += 1
    return made


def main() -> None:
    """Damage, look, write the JSON and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    result = provenance("retrieval_damage.py", "bm25s", "faiss-cpu", "numpy")
    result["command"] = result["command"].replace(str(args.data), "DIR")
    result["passages"] = ROWS
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args, Path(folder))
    result |= {"table": table(rows), "damages": rows}
    write_whole(args.out, as_json(result))
    print("| file | damages | found at start | by --verify alone | no difference | not found |")
    for name, entry in result["table"].items():
        print(f"| {name} | {' | '.join(str(number) for number in entry.values())} |")


if __name__ == "__main__":
    main()
