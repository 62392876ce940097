"""BM25's recall@3, compared with bm25s' defaults and with Lucene.

    python lab/experiments/retrieval/bm25_recall.py --data DIR --lucene anserini-0.22.1-fatjar.jar \
        --out lab/experiments/retrieval/bm25_recall.json

DIR holds `corpus.jsonl` and questions, `*.jsonl` with FlashRAG's fields. `--lucene` is the jar that
pyserini 0.22.1's wheel has in it (Java 11 or later); without it the rows of Lucene are left out.

titles   the share of a question's supporting titles in the first 3 passages, a mean over questions;
         for the sets that have titles.
answer   the share of questions with a gold answer in the first 3 passages. Most answers of the sets
         without titles are nowhere in a small corpus.
a sign   of each set of results against ours: questions where it has the larger share of titles, or
         an answer where the other has none, and the two-sided sign test over all sets.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bm25s  # type: ignore[import-untyped]

from lab.bench.common import as_json, provenance
from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.retrieval.corpus import iterate_contents
from sg_rlhf.retrieval.index import build
from sg_rlhf.retrieval.search import open_index
from sg_rlhf.tasks.search.grading import occurs_in

TOPK = 3
#: For each question the texts of its passages, best first.
Found = list[list[str]]


def main() -> None:
    args = arguments()
    corpus = args.data / "corpus.jsonl"
    texts = list(iterate_contents(corpus))
    sets = {
        path.stem: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in sorted(args.data.glob("*.jsonl"))
        if path != corpus
    }
    questions = [row["question"] for rows in sets.values() for row in rows]
    result: dict[str, Any] = provenance(
        "lab/experiments/retrieval/bm25_recall.py", "bm25s", "pystemmer"
    )
    result["passages"] = len(texts)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        found = {"ours": ours(corpus, questions, work)}
        found["bm25s, its defaults"] = with_bm25s(texts, questions)
        if args.lucene is not None:
            result["lucene"] = {"jar": args.lucene.name}
            found["Lucene"] = lucene(corpus, questions, args.lucene, work)
    shares = {name: list(each_share(sets, some)) for name, some in found.items()}
    result["systems"] = {
        name: described(sets, some, shares["ours"]) for name, some in shares.items()
    }
    if args.lucene is not None:
        pairs = list(zip(found["ours"], found["Lucene"], strict=True))
        result["same_passages_as_lucene"] = {
            "questions": len(pairs),
            "all_in_order": sum(mine == theirs for mine, theirs in pairs),
            "the_same_set": sum(set(mine) == set(theirs) for mine, theirs in pairs),
        }
    write_whole(args.out, as_json(result))
    print(json.dumps(result, indent=2, ensure_ascii=False))


# ------------------------------------------------------------------------------------- the systems


def ours(corpus: Path, questions: Sequence[str], work: Path) -> Found:
    """What our index finds."""
    build(corpus, "bm25", work / "ours")
    hits = open_index(work / "ours").search(questions, TOPK)
    return [[hit.document["contents"] for hit in some] for some in hits]


def with_bm25s(texts: Sequence[str], questions: Sequence[str]) -> Found:
    """What the library finds with its defaults, without a stemmer."""
    model = bm25s.BM25()
    model.index(bm25s.tokenize(list(texts), show_progress=False), show_progress=False)
    asked = bm25s.tokenize(list(questions), show_progress=False)
    documents, _ = model.retrieve(asked, k=TOPK, show_progress=False)
    return [[texts[row] for row in rows] for rows in documents]


def lucene(corpus: Path, questions: Sequence[str], jar: Path, work: Path) -> Found:
    """What Lucene finds, indexed and searched by Anserini's commands with their defaults."""
    (work / "collection").mkdir()
    shutil.copy(corpus, work / "collection")
    java(
        jar, "io.anserini.index.IndexCollection", "-collection", "JsonCollection",
        "-input", work / "collection", "-index", work / "lucene",
        "-generator", "DefaultLuceneDocumentGenerator", "-threads", 1,
    )  # fmt: skip
    topics = [f"{n}\t{' '.join(question.split())}\n" for n, question in enumerate(questions)]
    (work / "topics.tsv").write_text("".join(topics), encoding="utf-8")
    java(
        jar, "io.anserini.search.SearchCollection", "-index", work / "lucene",
        "-topics", work / "topics.tsv", "-topicreader", "TsvInt", "-output", work / "run.txt",
        "-bm25", "-bm25.k1", 0.9, "-bm25.b", 0.4, "-hits", TOPK,
    )  # fmt: skip
    contents = {
        passage["id"]: passage["contents"]
        for passage in map(json.loads, corpus.read_text(encoding="utf-8").splitlines())
    }
    found: Found = [[] for _ in questions]
    for line in (work / "run.txt").read_text(encoding="utf-8").splitlines():
        question, _, passage, *_ = line.split()
        found[int(question)].append(contents[passage])
    return found


def java(jar: Path, *arguments: object) -> None:
    command = ["java", "-cp", str(jar), *map(str, arguments)]
    subprocess.run(command, capture_output=True, text=True, check=True)


# ----------------------------------------------------------------------------------------- figures


def each_share(
    sets: dict[str, list[dict[str, Any]]], found: Found
) -> Iterator[tuple[float | None, float]]:
    """For each question the share of its titles (None: the set has none), and of its answer."""
    passages = iter(found)
    for rows in sets.values():
        for row in rows:
            some = next(passages)
            titles = {text.split("\n")[0].strip('"') for text in some}
            wanted = set(row.get("metadata", {}).get("supporting_titles", ()))
            shown = "\n".join(some)
            answer = any(occurs_in(gold, shown) for gold in row["golden_answers"])
            yield (len(wanted & titles) / len(wanted) if wanted else None), float(answer)


def described(
    sets: dict[str, list[dict[str, Any]]],
    shares: list[tuple[float | None, float]],
    reference: list[tuple[float | None, float]],
) -> dict[str, Any]:
    """Means by set, and the signs against the reference."""
    result: dict[str, Any] = {}
    start = 0
    for name, rows in sets.items():
        some = shares[start : start + len(rows)]
        start += len(rows)
        titles = [share for share, _ in some if share is not None]
        result[name] = {"questions": len(some)}
        if titles:
            result[name]["titles_at_3"] = round(sum(titles) / len(titles), 4)
        result[name]["answer_at_3"] = round(sum(answer for _, answer in some) / len(some), 4)
    for what, place in (("titles", 0), ("answer", 1)):
        pairs = [
            (share, expected)
            for mine, other in zip(shares, reference, strict=True)
            if (share := mine[place]) is not None and (expected := other[place]) is not None
        ]
        better = sum(mine > other for mine, other in pairs)
        worse = sum(mine < other for mine, other in pairs)
        result[f"{what}_against_ours"] = {
            "better": better, "worse": worse, "p": sign_test(better, worse)
        }  # fmt: skip
    return result


def sign_test(better: int, worse: int) -> float:
    """Two-sided: how likely so uneven a split is where both are as good."""
    n = better + worse
    tail = sum(math.comb(n, k) for k in range(min(better, worse) + 1)) / 2**n
    return float(f"{min(1.0, 2 * tail):.2g}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=re.split(r"\n\n", __doc__ or "")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--lucene", type=Path, help="Anserini's fat jar")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
