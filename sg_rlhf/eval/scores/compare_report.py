"""The report of `eval.run --compare`: the terminal's table, `compare.json` and `compare.md`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.common.text import table_head, table_row
from sg_rlhf.data_io import strict_json
from sg_rlhf.eval.scores.compare import BenchmarkComparison, Comparison, Discordant, RunResults
from sg_rlhf.eval.scores.paired import Difference

JSON, MARKDOWN = "compare.json", "compare.md"
#: Questions that are named on the terminal and in Markdown; the JSON file has all.
_SHOWN, _WRITTEN = 10, 100

_HEADS = ("Score", "A", "B", "B - A", "95 % interval", "p", "Questions")
_NOTE = (
    "Interval: the central 95 % of bootstrap resamples of whole questions. p: two-sided, each "
    "question's difference with either sign equally likely; with one response to each question it "
    "is the exact McNemar test. Not adjusted for the number of rows: of twenty rows without any "
    "difference one is below .05 on average."
)


def write(found: Comparison, out: Path) -> list[Path]:
    """Write `compare.json` and `compare.md`; their paths.

    Raises:
        OSError: the folder cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    text = strict_json.dumps(found.as_dict(), indent=2, ensure_ascii=False) + "\n"
    write_whole(out / JSON, text)
    write_whole(out / MARKDOWN, markdown(found))
    return [out / JSON, out / MARKDOWN]


def markdown(found: Comparison) -> str:
    """The whole of `compare.md`."""
    parts = [f"# {found.suite.title}: B against A", "\n\n".join(map(_about, (found.a, found.b)))]
    lines = [*table_head(_HEADS), *map(table_row, _rows(found))]
    parts += ["\n".join(lines), _NOTE]
    for each in found.benchmarks:
        parts.append(f"## {each.benchmark.name}: {_counted(each)}")
        parts += [f"**{title}:** {names}" for title, names in _named(each, _WRITTEN)]
    parts += list(found.notices)
    return "\n\n".join(parts) + "\n"


def show(found: Comparison, console: Console) -> None:
    """The same on the terminal, with fewer names."""
    table = Table(title=f"{found.suite.title}: B against A", title_justify="left")
    for title in _HEADS:
        table.add_column(title, justify="left" if title == "Score" else "right", no_wrap=True)
    for cells in _rows(found):
        table.add_row(*cells)
    lines = [*map(_about, (found.a, found.b)), "", _NOTE]
    for each in found.benchmarks:
        lines.append(f"\n{each.benchmark.name}: {_counted(each)}")
        lines += [f"  {title}: {names}" for title, names in _named(each, _SHOWN)]
    console.print(table)
    for line in [*lines, *found.notices]:
        console.print(line, markup=False, highlight=False, soft_wrap=line.startswith(("A:", "B:")))


def _about(side: RunResults) -> str:
    model = side.request["model"]
    return f"{side.label}: {model['name']} ({model['fingerprint'][:12]}), {side.folder}"


def _rows(found: Comparison) -> list[list[str]]:
    rows = [
        _row(f"{each.benchmark.name} {name}", difference)
        for each in found.benchmarks
        for name, difference in each.scores.items()
    ]
    return rows + [_row(title, difference) for title, difference in found.means.items()]


def _row(name: str, found: Difference) -> list[str]:
    low, high = found.change.interval
    return [
        name,
        f"{found.a:.3f}",
        f"{found.b:.3f}",
        f"{found.change.value:+.3f}",
        f"{low:+.3f} to {high:+.3f}",
        "" if found.p is None else f"{found.p:.3f}" if found.p >= 0.001 else f"{found.p:.1e}",
        str(found.change.n_questions),
    ]


def _counted(each: BenchmarkComparison) -> str:
    n = len(each.wins_a) + len(each.wins_b)
    return (
        f"{n} of {n + each.concordant} questions differ, "
        f"{len(each.wins_a)} better in A, {len(each.wins_b)} better in B"
    )


def _named(each: BenchmarkComparison, shown: int) -> list[tuple[str, str]]:
    """The questions that differ, the largest differences first."""
    one = each.benchmark.settings.n == 1
    titles = ("right in A alone", "right in B alone") if one else ("better in A", "better in B")
    return [
        (title, _listed(questions, each.benchmark.settings.n, shown))
        for title, questions in zip(titles, (each.wins_a, each.wins_b), strict=True)
        if questions
    ]


def _listed(questions: Sequence[Discordant], n: int, shown: int) -> str:
    names = [q.id if n == 1 else f"{q.id} {q.a}/{n} to {q.b}/{n}" for q in questions[:shown]]
    left = len(questions) - len(names)
    return ", ".join(names) + (f" and {left} more ({JSON} has all)" if left else "")
