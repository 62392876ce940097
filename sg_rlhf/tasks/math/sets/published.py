"""The published mathematics sets: where they are from, and reading them exactly as published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sg_rlhf.data_io.pinned_download import Origin, download
from sg_rlhf.data_io.records import DataError
from sg_rlhf.tasks.math.data import MathRow, read_rows
from sg_rlhf.tasks.math.sets.competitions import Competitions


@dataclass(frozen=True)
class EvalSet:
    """A published evaluation set: its file in the data folder, its rows, and its origin."""

    name: str
    file: str
    rows: int
    origin: Origin | Competitions
    title: str

    @property
    def sha256(self) -> str:
        """SHA-256 of the file, in hex; "" if none is known."""
        return self.origin.sha256


def _reference(path: str, sha256: str) -> Origin:
    commit = "b92ba16c014e39a550bef50bda8a2ea444e458be"
    return Origin("zhyang2226/AR-Lopti", commit, f"data/{path}", sha256=sha256)


# 10,000 rows drawn with replacement from DeepScaleR, about equally from each tenth of difficulty.
DSR_UNIFORM = _reference(
    "deepscaler_c/deepscaler_uniform_train.parquet",
    "0eab171b089e0a18c70b5e59387b6352ae95af99a800cb6468f1c025462f77bc",
)

# Unchanged in its repository since the first commit, 2025-02-20.
ORZ_57K = Origin(
    "Open-Reasoner-Zero/Open-Reasoner-Zero",
    "3fdd9a07b4fb01e06005e6e74fc56690cde8a341",
    "data/orz_math_57k_collected.json",
    git_blob="08812d4a47aadf8fa80a43f11431e6d41ba55b64",
)

#: The sets of the paper's Table 1, from the repository of the reference runs: our name, that of the
#: files, problems, title, SHA-256.
_PAPER = (
    ("aime", "aime", 30, "AIME 2024",
     "421b81847fcd2d86d90c7fb7efb8b04fd41ecfa1f93d58c818183edbb1f37ef2"),
    ("amc", "amc", 83, "AMC 2022-23, the 83",
     "ba543ce7cb7cefd4d22308f72ed212425bc1d0b4035644a7872cf2b37b345669"),
    ("math500", "math", 500, "MATH-500",
     "095d27979af6cec1cf332e741beca70100675554e16c715883a1e82f51e0bf91"),
    ("minerva", "minerva", 272, "Minerva",
     "17553bc9ace8650615126c3faccf87ee4c69c312faece56fcafd46b65b754a32"),
    ("olympiadbench", "olympiad_bench", 675, "OlympiadBench",
     "aadff6e47f67c74b3a75e2b8c438cc54ef7d584796b7395530958a9198d4d7b8"),
)  # fmt: skip
EVAL_SETS: Mapping[str, EvalSet] = {
    name: EvalSet(
        name,
        f"{file}_eval.parquet",
        rows,
        _reference(f"deepscaler/{file}_dsr.parquet", sha256),
        title,
    )
    for name, file, rows, title, sha256 in _PAPER
}

#: The last commit of MathArena's repository that holds problems.
_MATHARENA = ("eth-sri/matharena", "81f103e38b1df076afa65ee0a3ffbe148d42e6d2")

#: The file of MathArena's data sets on the hub. Each has this name.
_ON_HUB = "data/train-00000-of-00001.parquet"


def _hub(name: str, commit: str, sha256: str = "") -> Origin:
    """A data set of MathArena on the hub. Commits and checksum are those that several public
    projects pin."""
    return Origin(f"MathArena/{name}", commit, _ON_HUB, sha256=sha256, on_hub=True)


#: Sets that the paper does not have.
MORE_EVAL_SETS: Mapping[str, EvalSet] = {
    eval_set.name: eval_set
    for eval_set in (
        EvalSet(
            "aime25",
            "aime25.jsonl",
            30,
            Competitions(
                *_MATHARENA,
                ("data/aime/aime_2025_I", "data/aime/aime_2025_II"),
                "aime25.jsonl",
                "1b0814a1b33f0c5f59c8b03048f43179a106beb3a97dad79c1601465574d489c",
            ),
            "AIME 2025",
        ),
        EvalSet(
            "aime26",
            "aime26.jsonl",
            30,
            Origin(
                "jianzhnie/LLMEval",
                "66572ad3f66078c376d777866f6535d3f334b0c8",
                "data/aime26.jsonl",
                sha256="31fa88574e75103bcfee15811fec860aabd727af5cfe9327756305dbed8f5d70",
            ),
            "AIME 2026",
        ),
        EvalSet(
            "hmmt25",
            "hmmt25.jsonl",
            30,
            Competitions(
                *_MATHARENA,
                ("data/hmmt/hmmt_feb_2025",),
                "hmmt25.jsonl",
                "94b34933289ead98a72f334be2260be5e385ed2e2618c9f169934ede1a129e17",
            ),
            "HMMT February 2025",
        ),
        EvalSet(
            "hmmt25_nov",
            "hmmt25_nov.parquet",
            30,
            _hub("hmmt_nov_2025", "118dbfb45c4c9467c672268ed55166642897aa46"),
            "HMMT November 2025",
        ),
        EvalSet(
            "hmmt26",
            "hmmt26.parquet",
            33,
            _hub(
                "hmmt_feb_2026",
                "02fba4f74d8e68e73e66a02d540fd979c05c274c",
                "e5fcff6b1c2262841c0c37bf6d7b42529f284528d5f0d5c45c52e8bf0654a916",
            ),
            "HMMT February 2026",
        ),
        EvalSet(
            "amc23",
            "amc23.jsonl",
            40,
            Origin(
                "QwenLM/Qwen2.5-Math",
                "a45202bd16f1ec06f433442dc1152d0074773465",
                "evaluation/data/amc23/test.jsonl",
                sha256="43707e1ca784602d8479de24ee8ce36609dbebc46dd152b0b12a46611aa898a4",
            ),
            "AMC 2023, the 40",
        ),
        EvalSet(
            "imo_answerbench",
            "imo_answerbench.csv",
            400,
            # Version 2, which corrects problems and answers of the first one.
            Origin(
                "google-deepmind/superhuman",
                "955558ad67ef24dccd27545c326988bdad1b4471",
                "imobench/answerbench_v2.csv",
                sha256="275877a9d988d85278fad3a5f8a41d7f83393a60bf259531ec0a5161e6b21cf9",
            ),
            "IMO-AnswerBench v2",
        ),
    )
}

#: The training sets by the name that the data command gives them.
ORIGINS: Mapping[str, Origin] = {"dsr_uniform": DSR_UNIFORM, "orz57k": ORZ_57K}


def all_eval_sets() -> dict[str, EvalSet]:
    """Every set by its name, those of the paper first."""
    return {**EVAL_SETS, **MORE_EVAL_SETS}


def read_eval_set(name: str, data_dir: str | Path) -> list[MathRow]:
    """Read an evaluation set exactly as it was published; else a `DataError`."""
    known = all_eval_sets()
    eval_set = known.get(name)
    if eval_set is None:
        raise DataError(f"evaluation set {name!r}: unknown, expected one of {', '.join(known)}")
    path = find_eval_file(eval_set, Path(data_dir))
    if path is None:
        raise DataError(
            f"{Path(data_dir) / eval_set.file}: no such file, expected {eval_set.title} "
            f"({eval_set.rows} rows) from {eval_set.origin.url}"
        )
    try:
        eval_set.origin.check(path)
    except DataError as error:
        raise DataError(f"{error} ({eval_set.title}, {eval_set.rows} rows)") from None
    rows = read_rows(path, source=eval_set.name)
    if len(rows) != eval_set.rows:
        raise DataError(f"{path}: {len(rows)} rows, expected {eval_set.rows} ({eval_set.title})")
    return rows


def find_eval_file(eval_set: EvalSet, data_dir: Path) -> Path | None:
    """The set's file in a folder, by our name or the repository's; None without one."""
    ours = data_dir / eval_set.file
    if eval_set.origin.path == _ON_HUB:  # the same name for every set
        return ours if ours.is_file() else None
    published = Path(eval_set.origin.path)
    # A name such as test.jsonl says nothing, unless its folder is there too.
    named = published.name if published.stem != "test" else Path(*published.parts[-2:])
    paths = (ours, data_dir / named)
    return next((path for path in paths if path.is_file()), None)


def download_eval_set(eval_set: EvalSet, data_dir: Path) -> Path:
    """The set's file in `data_dir`, downloaded if it is not there yet."""
    found = find_eval_file(eval_set, data_dir)
    if found is not None:
        return found
    if isinstance(eval_set.origin, Competitions):
        return eval_set.origin.download(data_dir, eval_set.file)
    return download(eval_set.origin, data_dir, eval_set.file)
