"""BM25's recall@3 beside Lucene's own, and its words beside Lucene's.

    python bench/bm25_recall.py --data DIR --lucene anserini-0.22.1-fatjar.jar \
        --out bench/results/bm25_recall.json

DIR holds `corpus.jsonl` and questions, `*.jsonl` with FlashRAG's fields. `--lucene` is the jar that
pyserini 0.22.1's wheel has in it (Java 11 or later); without it the rows of Lucene are left out.

words    texts of corpus and questions that our `lucene` analysis splits exactly as Lucene does, and
         words whose stems agree, made of stems and suffixes that Porter's rules are about.
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
import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bm25s
import Stemmer
from arguments import as_json
from machine import provenance

from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.retrieval.analysis import ANALYSES, lucene_words
from sg_rlhf.retrieval.corpus import iterate_contents
from sg_rlhf.retrieval.index import build
from sg_rlhf.retrieval.search import open_index
from sg_rlhf.tasks.search.grading import occurs_in

TOPK = 3
#: Splits each line, a JSON string, as pyserini's searcher and indexer do.
TOKENS = """
import com.fasterxml.jackson.databind.ObjectMapper;
import io.anserini.analysis.AnalyzerUtils;
import io.anserini.analysis.DefaultEnglishAnalyzer;
import java.io.*;

public class Tokens {
  public static void main(String[] arguments) throws Exception {
    ObjectMapper json = new ObjectMapper();
    DefaultEnglishAnalyzer analyzer = DefaultEnglishAnalyzer.newDefaultInstance();
    BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, "UTF-8"));
    PrintStream out = new PrintStream(new BufferedOutputStream(System.out), false, "UTF-8");
    for (String line = lines.readLine(); line != null; line = lines.readLine())
      out.println(json.writeValueAsString(
          AnalyzerUtils.analyze(analyzer, json.readValue(line, String.class))));
    out.flush();
  }
}
"""
STEMS = """
tec pos ass techno anthropo bio apo hop tt fil fail siz conf r re see bl bab crys cry happ relat
digit hum o a
"""
SUFFIXES = """
s es ies ed ing y i e ational tional enci anci izer abli alli entli eli ousli ization ation ator
alism iveness fulness ousness aliti iviti biliti bli bly logi logy icate ative alize iciti ical ful
ness al ance ence er ic able ible ant ement ment ent sion tion ou ism ate iti ous ive ize ll ss at
bl iz
"""

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
    result: dict[str, Any] = provenance("bm25_recall.py", "bm25s", "pystemmer", "regex")
    result["passages"] = len(texts)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        found = {f"ours ({name})": ours(corpus, questions, name, work) for name in ANALYSES}
        found["bm25s, its defaults"] = with_bm25s(texts, questions, None)
        found["bm25s, Snowball stemmer"] = with_bm25s(texts, questions, "english")
        if args.lucene is not None:
            result["lucene"] = {"jar": args.lucene.name}
            found["Lucene"] = lucene(corpus, questions, args.lucene, work)
            result["words"] = same_words(texts + questions, args.lucene, work)
    shares = {name: list(each_share(sets, some)) for name, some in found.items()}
    result["systems"] = {
        name: described(sets, some, shares["ours (lucene)"]) for name, some in shares.items()
    }
    if args.lucene is not None:
        pairs = list(zip(found["ours (lucene)"], found["Lucene"], strict=True))
        result["same_passages_as_lucene"] = {
            "questions": len(pairs),
            "all_in_order": sum(mine == theirs for mine, theirs in pairs),
            "the_same_set": sum(set(mine) == set(theirs) for mine, theirs in pairs),
        }
    write_whole(args.out, as_json(result))
    print(json.dumps(result, indent=2, ensure_ascii=False))


# ------------------------------------------------------------------------------------- the systems


def ours(corpus: Path, questions: Sequence[str], analysis: str, work: Path) -> Found:
    """What our index finds."""
    build(corpus, "bm25", work / analysis, analysis=analysis, progress=False)
    hits = open_index(work / analysis).search(questions, TOPK)
    return [[hit.document["contents"] for hit in some] for some in hits]


def with_bm25s(texts: Sequence[str], questions: Sequence[str], stemmer: str | None) -> Found:
    """What the library finds as its README shows it, with a stemmer and without."""

    def split(some: Sequence[str]) -> Any:
        stem = Stemmer.Stemmer(stemmer) if stemmer else None
        return bm25s.tokenize(list(some), stopwords="en", stemmer=stem, show_progress=False)

    model = bm25s.BM25()
    model.index(split(texts), show_progress=False)
    documents, _ = model.retrieve(split(questions), k=TOPK, show_progress=False)
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


def java(jar: Path, *arguments: object, text: str | None = None) -> str:
    command = ["java", "-cp", str(jar), *map(str, arguments)]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


# ----------------------------------------------------------------------------------------- figures


def same_words(texts: Sequence[str], jar: Path, work: Path) -> dict[str, Any]:
    """How many texts, and made-up words, our analysis splits as Lucene does."""
    source = work / "Tokens.java"
    source.write_text(TOKENS, encoding="utf-8")
    rng = random.Random(0)
    stems, suffixes = STEMS.split(), SUFFIXES.split()
    made_up = list(
        dict.fromkeys(
            rng.choice(stems) + "".join(rng.choices(suffixes, k=rng.randint(0, 3)))
            for _ in range(300_000)
        )
    )
    result = {}
    for name, some in (("texts", texts), ("made_up_words", made_up)):
        lines = "".join(f"{json.dumps(text)}\n" for text in some)
        theirs = [json.loads(line) for line in java(jar, source, text=lines).split("\n") if line]
        mine = [lucene_words(text) for text in some]
        equal = sum(a == b for a, b in zip(mine, theirs, strict=True))
        result[name] = {"compared": len(mine), "equal": equal, "words": sum(map(len, theirs))}
    return result


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
            (mine[place], other[place])
            for mine, other in zip(shares, reference, strict=True)
            if mine[place] is not None
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
