"""The report of an evaluation: `results.json`, `table.md` and the terminal.

`table.md` has our scores beside the paper's, which are marked so. What was not run stays empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sg_rlhf.common.text import EMPTY
from sg_rlhf.eval.scores import report
from sg_rlhf.eval.store import RESULTS, SAMPLES, TABLE
from sg_rlhf.tasks.suite import ExtraTable, Results, Suite

_HEADS = (
    "Score", "Value", "95 % interval", "Questions", "Truncated", "Unreadable", "Tokens",
    "Contamination",
)  # fmt: skip


def write(
    results: Results, extra: Sequence[ExtraTable], suite: Suite, out: Path, console: Console
) -> None:
    """Write `results.json` and `table.md`; print the table without the paper's rows."""
    report.write_json(out / RESULTS, results)
    report.write_markdown(out / TABLE, markdown(results, extra, suite))
    parts = [*_head(results, suite), *_scores(results, suite), *_more(results, extra)]
    report.show(console, parts, [out / name for name in (RESULTS, SAMPLES, TABLE)])


def markdown(results: Results, extra: Sequence[ExtraTable], suite: Suite) -> list[str]:
    """The parts of `table.md`."""
    parts = _head(results, suite)
    if suite.beside_the_paper is not None:
        parts.append("\n".join(suite.beside_the_paper(results, suite)))
    parts += _scores(results, suite)
    exposure = _exposure_lines(results)
    parts.append(report.section("Contamination", (f"- {line}" for line in exposure)))
    return [*parts, *_more(results, extra)]


def _head(results: Results, suite: Suite) -> list[str]:
    """What was run, and how it differs from the suite."""
    parts = [f"# {suite.title}", _provenance(results)]
    limited = [
        f"{name} {described['n_questions']:,} of {described['full_size']:,}"
        for name, described in results["benchmarks"].items()
        if described["limited"]
    ]
    if limited:
        sizes = ", ".join(limited)
        parts.append(f"**Limited run, not comparable with the paper:** questions of {sizes}.")
    options = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in results.get("overrides", {}).items()
    ]
    if "chat" in results:
        options.append("--chat-template")
        if results["chat"]["system_prompt"] is not None:
            options.append(f"--system-prompt {results['chat']['system_prompt']!r}")
    if options:
        changed = ", ".join(options)
        parts.append(f"**Other settings than the paper's, not comparable:** {changed}.")
    if "rescored" in results:
        source, changes = results["rescored"]["from"], results["rescored"]["changes"]
        lines = [
            f"- {name}: {counts['responses']:,} responses of {source}, {counts['now_correct']} "
            f"now correct, {counts['now_wrong']} now wrong."
            for name, counts in changes.items()
        ]
        parts.append(report.section("Graded again", lines))
    return parts


def _provenance(results: Results) -> str:
    model = results["model"]
    begun, finished = results["begun"], results["finished"]
    full = finished["commit"] or "unknown"
    commit = full[:12] + ("+" if full.endswith("+") else "")
    revision = f", revision {model['revision'][:12]}" if model["revision"] else ""
    return (
        f"Model `{model['name']}`{revision} (fingerprint {model['fingerprint'][:12]}), "
        f"engine {results['engine']}, dtype {results['dtype']}, seed {results['seed']}, "
        f"commit {commit}, {begun['date'][:10]}. Rows marked *paper* are arXiv 2511.00066's and "
        f"were not run here; {EMPTY} was not run."
    )


def _scores(results: Results, suite: Suite) -> list[str]:
    rows = []
    for name, described in results["benchmarks"].items():
        responses = [
            f"{described['truncation_rate']:.1%}",
            f"{described['extraction_failure_rate']:.1%}",
            f"{described['mean_tokens']:.0f}",
            _seen(described),
        ]
        for score, found in described["scores"].items():
            of_all = responses if "/" not in score else [""] * 4
            rows.append([f"{name} {score}", *_score(found), str(found["n_questions"]), *of_all])
    means = {**results["groups"], suite.average_title: results["average"]}
    rows += [
        [title, *_score(found), *[""] * 5] for title, found in means.items() if found is not None
    ]
    return [report.section("Each score", report.table(_HEADS, rows))]


def _score(found: Mapping[str, Any]) -> list[str]:
    return [f"{found['value']:.3f}", report.interval(found["ci95"])]


def _exposure_lines(results: Results) -> list[str]:
    """What the model may have seen of each benchmark: published findings, then its own data."""
    lines = []
    for name, described in results["benchmarks"].items():
        about = described.get("contamination")
        if about is not None:
            family = "" if about["family"] is None else f" for {about['family']}"
            lines.append(f"{name}: {about['verdict']}{family}: {'; '.join(about['evidence'])}.")
    data = results.get("training_data")
    if data is None:
        return [*lines, "Training data: not known; --train-data FILE counts shared questions."]
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


def _more(results: Results, extra: Sequence[ExtraTable]) -> list[str]:
    """The suite's own tables, and what to keep in mind."""
    parts = []
    for each in extra:
        parts += [report.section(each.title, report.table(each.heads, each.rows)), each.note]
    cuts = context_notices(results["benchmarks"], results["context"])
    parts += [f"**Context:** {cut}." for cut in cuts]
    if results["begun"]["versions"] != results["finished"]["versions"]:
        parts.append("**Versions** changed between the run's start and its end: results.json.")
    return parts


def context_notices(benchmarks: Mapping[str, Any], context: int | None) -> list[str]:
    """Which benchmarks' responses the model's context makes shorter than their settings say."""
    return [
        f"{name}: the model's context of {context} tokens cuts {cuts['questions']} of "
        f"{described['n_questions']} questions' responses, to {cuts['shortest_max_tokens']} tokens "
        f"at the least; {cuts['prompts_too_long']} prompts fill it and count as wrong"
        for name, described in benchmarks.items()
        for cuts in [described["context_cuts"]]
        if cuts["questions"]
    ]
