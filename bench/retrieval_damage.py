"""Damages of a search index: when each is found, and with which line.

    python bench/retrieval_damage.py --data ../shared/data/qa --out FILE

DIR of --data holds `corpus.jsonl`. A BM25 index of 100,000 passages (the real ones, then made up
ones) has files above 16 MiB, which a start does not read whole; a flat one with an encoder of random
weights has the rest. Each damage is done to a copy, which is then opened as the server opens it, and
verified. The table is printed as docs/retrieval.md has it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import provenance
from retrieval import enlarge_corpus

from sg_rlhf.common.files import write_whole
from sg_rlhf.retrieval import manifest, verify
from sg_rlhf.retrieval.corpus import iterate_contents
from sg_rlhf.retrieval.index import build
from sg_rlhf.retrieval.random_encoder import save_random_encoder
from sg_rlhf.retrieval.search import open_index

ROWS = 100_000
DENSE_ROWS = 500


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)


def overwrite(place: float, content: bytes) -> Callable[[Path], None]:
    """Other bytes at a place, 0 at the start to 1 at the end."""

    def damage(path: Path) -> None:
        at = int(place * (path.stat().st_size - len(content)))
        with path.open("r+b") as file:
            file.seek(at)
            before = file.read(len(content))
            file.seek(at)
            file.write(bytes(a ^ b for a, b in zip(before, content, strict=True)))

    return damage


def zeros(path: Path) -> None:
    """A page in the middle that was never written."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2 // 4096 * 4096)
        file.write(bytes(4096))


def keep_time(damage: Callable[[Path], None]) -> Callable[[Path], None]:
    """The same, with the time stamp of before."""

    def damaged(path: Path) -> None:
        status = path.stat()
        damage(path)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    return damaged


def change(**entries: Any) -> Callable[[Path], None]:
    """Other entries in a manifest; None: without that one."""

    def damage(path: Path) -> None:
        facts = {**json.loads(path.read_text(encoding="utf-8")), **entries}
        facts = {name: value for name, value in facts.items() if value is not None}
        path.write_text(json.dumps(facts, indent=2), encoding="utf-8")

    return damage


def another_letter(path: Path) -> None:
    """As many bytes, one of them another."""
    overwrite(0.5, b"\x02")(path)


BIT = overwrite(0.5, b"\x01")
#: (index, file, what happened, how)
DAMAGES: tuple[tuple[str, str, str, Callable[[Path], None]], ...] = (
    ("bm25", "offsets.npy", "gone", Path.unlink),
    ("bm25", "offsets.npy", "cut by 8 bytes", cut),
    ("bm25", "offsets.npy", "a bit", BIT),
    ("bm25", "bm25/data.csc.index.npy", "gone", Path.unlink),
    ("bm25", "bm25/data.csc.index.npy", "cut by 8 bytes", cut),
    ("bm25", "bm25/data.csc.index.npy", "head overwritten", overwrite(0, b"\xff" * 64)),
    ("bm25", "bm25/data.csc.index.npy", "end overwritten", overwrite(1, b"\xff" * 64)),
    ("bm25", "bm25/data.csc.index.npy", "a bit in the middle", BIT),
    ("bm25", "bm25/data.csc.index.npy", "4 KiB of zeros in the middle", zeros),
    ("bm25", "bm25/vocab.index.json", "a bit", BIT),
    ("bm25", "manifest.json", "gone", Path.unlink),
    ("bm25", "manifest.json", "cut in the middle", lambda p: os.truncate(p, p.stat().st_size // 2)),
    ("bm25", "manifest.json", "without `kind`", change(kind=None)),
    ("bm25", "manifest.json", "without `files`", change(files=None)),
    ("bm25", "manifest.json", "without `format`", change(format=None)),
    ("bm25", "manifest.json", "another `kind`", change(kind="flat")),
    ("bm25", "CORPUS", "gone", Path.unlink),
    ("bm25", "CORPUS", "a line more", lambda p: p.open("a").write('{"id": "x"}\n')),
    ("bm25", "CORPUS", "another letter", another_letter),
    ("bm25", "CORPUS", "another letter, old time stamp", keep_time(another_letter)),
    ("flat", "index.faiss", "gone", Path.unlink),
    ("flat", "index.faiss", "cut by 8 bytes", cut),
    ("flat", "index.faiss", "a bit", BIT),
    ("flat", "ENCODER/model.safetensors", "a bit", BIT),
    ("flat", "ENCODER", "gone", shutil.rmtree),
)


def outcome(action: Callable[[], Any], home: Path) -> str:
    """The line that an action ends with, or "" if it finds nothing wrong."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            action()
    except ValueError as error:
        line = str(error)
    else:
        return ""
    assert "\n" not in line, line
    return line.replace(f"{home}/", "")


def verified(index: Path) -> None:
    """What `python -m sg_rlhf.retrieval.verify` does."""
    verify.verify(index, None)


def main() -> None:
    """Damage, look, write the JSON and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    result = provenance("retrieval_damage.py", "bm25s", "faiss-cpu", "numpy")
    result["command"] = "python bench/retrieval_damage.py --data DIR --out FILE"
    result["passages"] = {"bm25": ROWS, "flat": DENSE_ROWS}
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "whole")
        for kind, rows in result["passages"].items():
            home = whole / kind
            home.mkdir(parents=True)
            enlarge_corpus(args.data / "corpus.jsonl", rows, home / "CORPUS")
            encoder = "bm25"
            if kind == "flat":
                encoder = str(home / "ENCODER")
                save_random_encoder(home / "ENCODER", iterate_contents(home / "CORPUS"))
            build(home / "CORPUS", encoder, home / "INDEX", progress=False, device="cpu")
        sizes = manifest.read(whole / "bm25" / "INDEX")["files"]
        result["largest_file_bytes"] = max(sizes.values())
        result["damages"] = []
        for kind, name, what, damage in DAMAGES:
            home = Path(folder, "home")
            # With the corpus's time stamp, by which a start knows it again.
            shutil.copytree(whole / kind, home)
            index = home / "INDEX"
            for check in (outcome(lambda: open_index(home / "INDEX", device="cpu"), home),
                          outcome(lambda: verified(home / "INDEX"), home)):  # fmt: skip
                assert check == "", f"damaged before: {check}"
            path = home / name if name.isupper() or "ENCODER" in name else index / name
            damage(path)
            at_start = outcome(lambda: open_index(home / "INDEX", device="cpu"), home)
            by_verify = outcome(lambda: verified(home / "INDEX"), home)
            result["damages"].append(
                {"index": kind, "file": name, "damage": what, "start": at_start,
                 "verify": by_verify}
            )  # fmt: skip
            found = "each start" if at_start else "verify" if by_verify else "not"
            print(f"| {name} | {what} | {found} | `{at_start or by_verify}` |", flush=True)
            shutil.rmtree(home)
    write_whole(args.out, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
