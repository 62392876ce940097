"""The tables: ours beside the paper's, which are marked so. What was not run stays empty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.common.text import EMPTY, table_head, table_row
from sg_rlhf.data_io import strict_json
from sg_rlhf.eval.store import RESULTS, SAMPLES, TABLE
from sg_rlhf.tasks.suite import ExtraTable, Results, Suite

_HEADS = (
    "Score", "Value", "95 % interval", "Questions", "Truncated", "Unreadable", "Tokens",
    "Contamination",
)  # fmt: skip


def write(
    results: Results, extra: Sequence[ExtraTable], suite: Suite, out: Path, console: Console
) -> None:
    """Write `results.json` and `table.md`, and print the scores."""
    text = strict_json.dumps(results, indent=2, ensure_ascii=False) + "\n"
    write_whole(out / RESULTS, text)
    write_whole(out / TABLE, markdown(results, extra, suite))
    show(results, extra, suite, out, console)


def markdown(results: Results, extra: Sequence[ExtraTable], suite: Suite) -> str:
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
    other_settings = _other_settings(results)
    if other_settings:
        parts.append(f"**Other settings than the paper's, not comparable:** {other_settings}.")
    if "rescored" in results:
        lines = [f"- {line}" for line in _rescored_lines(results)]
        parts.append("\n".join(["## Graded again", "", *lines]))
    if suite.beside_the_paper is not None:
        parts.append("\n".join(suite.beside_the_paper(results, suite)))
    lines = [*table_head(_HEADS), *map(table_row, _detail_rows(results, suite))]
    parts.append("\n".join(["## Each score", "", *lines]))
    exposure = exposure_lines(results)
    if exposure:
        parts.append("\n".join(["## Contamination", "", *(f"- {line}" for line in exposure)]))
    for more in extra:
        lines = [*table_head(more.heads), *map(table_row, more.rows)]
        parts += ["\n".join([f"## {more.title}", "", *lines]), more.note]
    parts += _notices(results)
    return "\n\n".join(parts) + "\n"


def show(
    results: Results, extra: Sequence[ExtraTable], suite: Suite, out: Path, console: Console
) -> None:
    """The scores on the terminal, and where the files are."""
    table = Table(title=f"{suite.title}: {results['model']['name']}")
    for title in (
        "score", "value", "95 %", "questions", "truncated", "unreadable", "tokens", "contamination",
    ):  # fmt: skip
        table.add_column(title, justify="left" if title == "score" else "right", no_wrap=True)
    for cells in _detail_rows(results, suite):
        table.add_row(*cells)
    console.print(table)
    for more in extra:
        table = Table(title=f"{more.title}, {more.about}")
        for number, title in enumerate(more.heads):
            table.add_column(title.lower(), justify="right" if number else "left")
        for row in more.rows:
            table.add_row(*row)
        console.print(table)
    drawn = {benchmark.name for benchmark in suite.benchmarks if benchmark.samples}
    for name, b in results["benchmarks"].items():
        if name in drawn and b["limited"]:
            line = f"{name}: {b['n_questions']:,} of {b['full_size']:,} questions, a sample"
            console.print(line, markup=False, highlight=False)
    for line in _rescored_lines(results) if "rescored" in results else ():
        console.print(line, markup=False, highlight=False)
    for line in exposure_lines(results, short=True):
        console.print(line, markup=False, highlight=False)
    for notice in _notices(results):
        console.print(notice.replace("**", ""), markup=False, highlight=False)
    for name in (RESULTS, SAMPLES, TABLE):
        console.print(str(out / name), markup=False, highlight=False, soft_wrap=True)


def _other_settings(results: Results) -> str:
    """The options that changed the suite's settings or prompts; empty without any."""
    options = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in results.get("overrides", {}).items()
    ]
    if "chat" in results:
        options.append("--chat-template")
        if results["chat"]["system_prompt"] is not None:
            options.append(f"--system-prompt {results['chat']['system_prompt']!r}")
    return ", ".join(options)


def _rescored_lines(results: Results) -> list[str]:
    """Per benchmark, how many verdicts `--rescore` changed."""
    found = results["rescored"]
    return [
        f"{name}: {counts['responses']:,} responses of {found['from']}, {counts['now_correct']} "
        f"now correct, {counts['now_wrong']} now wrong."
        for name, counts in found["changes"].items()
    ]


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
                    _seen(described) if whole else "",
                ]
            )
    means = {**results["groups"], suite.average_title: results["average"]}
    for title, found in means.items():
        if found is not None:
            low, high = found["ci95"]
            rows.append([title, f"{found['value']:.3f}", f"{low:.3f} to {high:.3f}", *[""] * 5])
    return rows


def exposure_lines(results: Results, *, short: bool = False) -> list[str]:
    """What the model may have seen of each benchmark: published findings, then its own data.

    Args:
        short: of a model whose family is not known only for which families there are findings.
    """
    lines = []
    for name, described in results["benchmarks"].items():
        about = described.get("contamination")
        if about is None:
            continue
        verdict = f"{name}: {about['verdict']}"
        if about["family"] is not None:
            verdict += f" for {about['family']}"
        elif short:
            told = ", ".join(about["reported_for"]) or "no family"
            lines.append(f"{verdict}; published signs of it: {told} (table.md).")
            continue
        lines.append(f"{verdict}: {'; '.join(about['evidence'])}.")
    data = results.get("training_data")
    if data is None:
        lines.append("Training data: not known; --train-data FILE counts shared questions.")
        return lines
    if "problem" in data:
        return [*lines, f"Training data: {data['problem']}."]
    files = ", ".join(f"{file['name']} ({file['rows']:,} rows)" for file in data["files"])
    lines.append(f"Training data, by {data['source']}: {files}.")
    for name, described in results["benchmarks"].items():
        overlap = described["train_overlap"]
        line = f"{name}: {overlap['exact']} of {overlap['problems']} questions are in it"
        if "run" in overlap:
            line += (
                f", {overlap['mostly']} more share half or more of their runs of "
                f"{overlap['run']} words, {overlap['some']} some (most often a phrase)"
            )
        for score, found in overlap.get("scores_without", {}).items():
            line += f"; {score} without them {found['value']:.3f}"
        lines.append(f"{line}.")
    return lines


def _seen(described: Mapping[str, Any]) -> str:
    """In a word or two: trained on, or what is published."""
    if described.get("train_overlap", {}).get("ids"):
        return f"{len(described['train_overlap']['ids'])} trained on"
    about = described.get("contamination")
    return EMPTY if about is None else str(about["verdict"])


def _notices(results: Results) -> list[str]:
    notices = []
    for name, described in results["benchmarks"].items():
        cuts = described["context_cuts"]
        if cuts["questions"]:
            notices.append(
                f"**Context:** {name}: the model holds {results['context']} tokens, so "
                f"{described['settings']['max_tokens']} response tokens were cut for "
                f"{cuts['questions']} of {described['n_questions']} questions (least "
                f"{cuts['shortest_max_tokens']}); {cuts['prompts_too_long']} prompts filled the "
                "context and count as wrong."
            )
    if results["begun"]["versions"] != results["finished"]["versions"]:
        notices.append("**Versions** changed between the run's start and its end: results.json.")
    return notices
