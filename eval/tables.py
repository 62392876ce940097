"""The tables: ours beside the paper's, which are marked so. What was not run stays empty."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eval import paper_numbers
from eval.data import KK_SIZES, KK_TRAINED_SIZES
from eval.suites import Suite

EMPTY = "–"
_MATH_COLUMNS = (
    "OlympiadBench", "Minerva", "MATH-500", "AMC avg@16", "AIME pass@16", "AIME avg@16", "Avg.",
)  # fmt: skip

Results = Mapping[str, Any]


def markdown(results: Results, suite: Suite) -> str:
    """The whole of `table.md`."""
    parts = [f"# {suite.title}", _provenance(results)]
    limited = [name for name, b in results["benchmarks"].items() if b["limited"]]
    if limited:
        sizes = ", ".join(
            f"{name} {results['benchmarks'][name]['n_questions']:,} of "
            f"{results['benchmarks'][name]['full_size']:,}"
            for name in limited
        )
        parts.append(f"**Limited run, not comparable with the paper:** questions of {sizes}.")
    if suite.name in _BESIDE_THE_PAPER:
        parts.append("\n".join(_BESIDE_THE_PAPER[suite.name](results, suite)))
    parts.append("\n".join(["## Each score", "", *_details(results, suite)]))
    searched = _search_rows(results)
    if searched:
        parts.append("\n".join(["## Searches", "", *_head(_SEARCH), *map(_line, searched)]))
        parts.append(_SEARCH_NOTE)
    parts += _notices(results)
    return "\n\n".join(parts) + "\n"


def show(results: Results, suite: Suite, out: Path, console: Console) -> None:
    """The scores on the terminal, and where the files are."""
    table = Table(title=f"{suite.title}: {results['model']['name']}")
    for title in ("score", "value", "95 %", "questions", "truncated", "unreadable", "tokens"):
        table.add_column(title, justify="left" if title == "score" else "right", no_wrap=True)
    for cells in _detail_rows(results, suite):
        table.add_row(*cells)
    console.print(table)
    searched = _search_rows(results)
    if searched:
        table = Table(title="Searches, means over questions")
        for title in _SEARCH:
            table.add_column(title.lower(), justify="left" if title == "Set" else "right")
        for cells in searched:
            table.add_row(*cells)
        console.print(table)
    for name, b in results["benchmarks"].items():
        if suite.name == "qa" and b["limited"]:
            line = f"{name}: {b['n_questions']:,} of {b['full_size']:,} questions, a sample"
            console.print(line, markup=False, highlight=False)
    for notice in _notices(results):
        console.print(notice.replace("**", ""), markup=False, highlight=False)
    for name in ("results.json", "samples.jsonl", "table.md"):
        console.print(str(out / name), markup=False, highlight=False, soft_wrap=True)


def _provenance(results: Results) -> str:
    model = results["model"]
    begun, finished = results["begun"], results["finished"]
    commit = (finished["commit"] or "unknown")[:12] + (
        "+" if (finished["commit"] or "").endswith("+") else ""
    )
    revision = f", revision {model['revision'][:12]}" if model["revision"] else ""
    return (
        f"Model `{model['name']}`{revision} (fingerprint {model['fingerprint'][:12]}), "
        f"engine {results['engine']}, dtype {results['dtype']}, seed {results['seed']}, "
        f"commit {commit}, {begun['date'][:10]}. Rows marked *paper* are arXiv 2511.00066's and "
        f"were not run here; {EMPTY} was not run."
    )


def _math(results: Results, suite: Suite) -> list[str]:
    lines = _head(("Model", "Source", *_MATH_COLUMNS))
    for name, numbers in paper_numbers.MATH.items():
        lines.append(_line([name, "*paper*, Table 1", *(f"{v:.2f}" for v in numbers)]))
    found = [_score(results, benchmark, name) for benchmark, name in suite.average]
    values = [*found, results["average"]]
    cells = [EMPTY if v is None else f"**{100 * v['value']:.2f}**" for v in values]
    lines.append(_line([f"`{results['model']['name']}`", "this run", *cells]))
    return ["Per cent of questions; greedy unless avg@16 or pass@16 (T = 1).", "", *lines]


def _kk(results: Results, suite: Suite) -> list[str]:
    extra = [size for size in KK_SIZES if size not in KK_TRAINED_SIZES]
    heads = (
        [str(size) for size in KK_TRAINED_SIZES] + ["Avg."] + [f"{size} (OOD)" for size in extra]
    )
    lines = _head(("Model", "Source", *heads))
    for table, rows in paper_numbers.KK.items():
        for name, numbers in rows.items():
            cells = [*(f"{v:.2f}" for v in numbers), *(EMPTY for _ in extra)]
            lines.append(_line([name, f"*paper*, {table}", *cells]))
    for benchmark, described in results["benchmarks"].items():
        names = [f"accuracy/{size}" for size in KK_TRAINED_SIZES]
        names += ["accuracy"] + [f"accuracy/{size}" for size in extra]
        values = [_score(results, benchmark, name) for name in names]
        cells = [EMPTY if v is None else f"**{v['value']:.2f}**" for v in values]
        source = f"this run, {described['title']}"
        lines.append(_line([f"`{results['model']['name']}`", source, *cells]))
    return [
        "Accuracy by number of people. The paper says that it follows the official harness, and "
        "trains and prompts as Logic-RL does; which of the harnesses below its numbers come from "
        "is not stated.",
        "",
        *lines,
    ]


def _qa(results: Results, suite: Suite) -> list[str]:
    titles = [b.title for b in suite.benchmarks]
    lines = _head(("Model", "Source", *titles, "Avg."))
    for name, numbers in paper_numbers.QA.items():
        lines.append(_line([name, "*paper*, Table 2", *(f"{v:.2f}" for v in numbers)]))
    values = [_score(results, benchmark, name) for benchmark, name in suite.average]
    cells = [EMPTY if v is None else f"**{100 * v['value']:.2f}**" for v in values]
    for i, b in enumerate(suite.benchmarks):
        described = results["benchmarks"].get(b.name)
        if described and described["limited"]:
            cells[i] += f" ({described['n_questions']:,} of {described['full_size']:,})"
    average = results["average"]
    cells.append(EMPTY if average is None else f"**{100 * average['value']:.2f}**")
    search = results["search"]
    source = "this run" if search["enabled"] else "this run, no search"
    lines.append(_line([f"`{results['model']['name']}`", source, *cells]))
    how = (
        f"{search['topk']} passages a search, {search['max_turns']} turns that may search"
        if search["enabled"]
        else "from the model's memory alone"
    )
    return [
        f"Per cent exact match, greedy, {how}, prompt `{search['prompt']}`. The paper's averages "
        "of the two trained Qwen3-4B rows are as printed; their columns give 35.51 and 39.67.",
        "",
        *lines,
    ]


_SEARCH = (
    "Set", "Searches", "Turns", "Invalid", "Answered", "F1", "Gold found", "Answer found",
    "Empty results", "Failures", "Seconds a search",
)  # fmt: skip
_SEARCH_NOTE = (
    "Means over questions; empty results are a count, failures the dialogues that were broken "
    "off and held again because a search failed. Gold found: a gold answer stands in what was "
    "retrieved."
)


def _search_rows(results: Results) -> list[list[str]]:
    rows = []
    for name, described in results["benchmarks"].items():
        found = described.get("search")
        if found is None:
            continue
        seconds = found["seconds_per_search"]
        rows.append(
            [
                name,
                f"{found['searches_per_question']:.2f}",
                f"{found['turns_per_question']:.2f}",
                f"{found['invalid_actions_per_question']:.2f}",
                f"{found['answered_rate']:.1%}",
                f"{found['f1']:.3f}",
                f"{found['gold_retrieved_rate']:.1%}",
                f"{found['answer_retrieved_rate']:.1%}",
                f"{found['empty_results']:.0f}",
                f"{found['retrieval_failures']:.0f}",
                EMPTY if seconds is None else f"{seconds:.3f}",
            ]
        )
    return rows


#: Suite -> its table with the paper's rows. A suite without one has its scores alone.
_BESIDE_THE_PAPER: Mapping[str, Callable[[Results, Suite], list[str]]] = {
    "math": _math,
    "kk": _kk,
    "qa": _qa,
}


def _details(results: Results, suite: Suite) -> list[str]:
    heads = ("Score", "Value", "95 % interval", "Questions", "Truncated", "Unreadable", "Tokens")
    return [*_head(heads), *(_line(cells) for cells in _detail_rows(results, suite))]


def _detail_rows(results: Results, suite: Suite) -> list[list[str]]:
    rows = []
    for name, described in results["benchmarks"].items():
        for score, found in described["scores"].items():
            low, high = found["ci95"]
            whole = "/" not in score
            rows.append(
                [
                    f"{name} {score}",
                    f"{found['value']:.3f}",
                    f"{low:.3f} to {high:.3f}",
                    str(found["n_questions"]),
                    f"{described['truncation_rate']:.1%}" if whole else "",
                    f"{described['extraction_failure_rate']:.1%}" if whole else "",
                    f"{described['mean_tokens']:.0f}" if whole else "",
                ]
            )
    means = {**results["groups"], suite.average_title: results["average"]}
    for title, found in means.items():
        if found is not None:
            low, high = found["ci95"]
            rows.append(
                [title, f"{found['value']:.3f}", f"{low:.3f} to {high:.3f}", "", "", "", ""]
            )
    return rows


def _notices(results: Results) -> list[str]:
    notices = []
    for name, described in results["benchmarks"].items():
        cuts = described["context_cuts"]
        if cuts["questions"]:
            notices.append(
                f"**Context:** {name}: the model holds {results['context']} tokens, so "
                f"{described['settings']['max_tokens']} response tokens were cut for "
                f"{cuts['questions']} of {described['n_questions']} questions (least "
                f"{cuts['shortest_max_tokens']}); {cuts['prompts_too_long']} prompts left no room "
                "and count as wrong."
            )
    if results["begun"]["versions"] != results["finished"]["versions"]:
        notices.append("**Versions** changed between the run's start and its end: results.json.")
    return notices


def _score(results: Results, benchmark: str, name: str) -> Any:
    return results["benchmarks"].get(benchmark, {}).get("scores", {}).get(name)


def _head(cells: tuple[str, ...]) -> list[str]:
    return [_line(cells), _line(["---"] * len(cells))]


def _line(cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
