"""What `eval.run --compare` shows: the terminal's table, `compare.md` and a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sg_rlhf.common import figures
from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.common.text import table_head, table_row
from sg_rlhf.data_io import strict_json
from sg_rlhf.eval.scores.compare import BenchmarkComparison, Comparison, Discordant, RunResults
from sg_rlhf.eval.scores.paired import Difference

JSON, MARKDOWN, PICTURE = "compare.json", "compare.md", "compare.png"
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
    """`compare.json`, `compare.md` and, with matplotlib, `compare.png`; the paths.

    Raises:
        OSError: the folder cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    text = strict_json.dumps(found.as_dict(), indent=2, ensure_ascii=False) + "\n"
    paths = [out / JSON, out / MARKDOWN]
    write_whole(paths[0], text)
    try:
        picture(found, out / PICTURE)
    except ModuleNotFoundError:
        print("notice: no picture, matplotlib is not installed (pip install '.[plots]')")
    else:
        paths.append(out / PICTURE)
    write_whole(paths[1], markdown(found, pictured=len(paths) == 3))
    return paths


def markdown(found: Comparison, *, pictured: bool = False) -> str:
    """The whole of `compare.md`."""
    parts = [f"# {found.suite.title}: B against A", "\n\n".join(map(_about, (found.a, found.b)))]
    lines = [*table_head(_HEADS), *map(table_row, _rows(found))]
    parts += ["\n".join(lines), _NOTE]
    if pictured:
        parts.append(f"![The differences with their intervals]({PICTURE})")
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


def picture(found: Comparison, path: Path) -> None:
    """Differences with their intervals, and the questions' shares where they are sampled.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    scores = [
        (f"{each.benchmark.name} {name}", difference)
        for each in found.benchmarks
        for name, difference in each.scores.items()
    ] + list(found.means.items())
    sampled = [each for each in found.benchmarks if each.benchmark.settings.n > 1]
    columns = 1 + bool(sampled)
    figure, axes = pyplot.subplots(
        1, columns, squeeze=False, layout="constrained",
        figsize=(6 * columns, max(3.0, 1.2 + 0.28 * len(scores))),
    )  # fmt: skip
    forest = axes[0][0]
    for row, (_, difference) in enumerate(reversed(scores)):
        low, high = (100 * bound for bound in difference.change.interval)
        forest.plot((low, high), (row, row), color="tab:blue", linewidth=1.5)
        forest.plot(100 * difference.change.value, row, "o", color="tab:blue", markersize=4)
    forest.axvline(0, color="0.6", linewidth=0.8)
    forest.set_yticks(range(len(scores)), [name for name, _ in reversed(scores)], fontsize=8)
    forest.set_xlabel("B - A, percentage points, with 95 % intervals over questions")
    if sampled:
        scatter = axes[0][1]
        for each in sampled:
            places = Counter(each.shares.values())
            scatter.scatter(
                *zip(*places, strict=True), s=[12 * count**0.5 for count in places.values()],
                alpha=0.6, label=each.benchmark.name,
            )  # fmt: skip
        scatter.plot((0, 1), (0, 1), color="0.6", linewidth=0.8)
        scatter.set(
            xlabel="share right, A (a dot's area: root of the questions)",
            ylabel="share right, B",
            aspect="equal",
        )
        scatter.legend(fontsize=8)
    temporary = path.with_name(f".{path.name}")
    figures.save(figure, temporary, dpi=150, format="png")
    pyplot.close(figure)
    temporary.replace(path)


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
