"""The report of `sg-rlhf eval --compare`: `compare.json`, `compare.md` and the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sg_rlhf.common.text import listed
from sg_rlhf.eval.scores import report
from sg_rlhf.tasks.suite import Suite

JSON, MARKDOWN = "compare.json", "compare.md"
#: Questions that are named; the JSON file has all.
_NAMED = 10

_HEADS = ("Score", "A", "B", "B - A", "95 % interval", "p", "Questions")
_NOTE = (
    "Interval: the central 95 % of bootstrap resamples of whole questions. p: two-sided, each "
    "question's difference with either sign equally likely; with one response to each question it "
    "is the exact McNemar test. Not adjusted for the number of rows: of twenty rows without any "
    "difference one is below .05 on average."
)


def write(suite: Suite, found: Mapping[str, Any], out: Path | None, console: Console) -> None:
    """Print a comparison of `compare.compare`; write it into a folder, if there is one."""
    parts, files = markdown(suite, found), []
    if out is not None:
        files = [out / JSON, out / MARKDOWN]
        report.write_json(files[0], found)
        report.write_markdown(files[1], parts)
    report.show(console, parts, files)


def markdown(suite: Suite, found: Mapping[str, Any]) -> list[str]:
    """The parts of `compare.md`."""
    parts = [f"# {suite.title}: B against A"]
    for side in "ab":
        model, folder = found[side]["model"], found[side]["folder"]
        parts.append(f"{side.upper()}: {model['name']} ({model['fingerprint'][:12]}), {folder}")
    rows = [
        _row(f"{name} {score}", difference)
        for name, part in found["benchmarks"].items()
        for score, difference in part["scores"].items()
    ]
    rows += [_row(title, difference) for title, difference in found["means"].items()]
    parts += ["\n".join(report.table(_HEADS, rows)), _NOTE]
    for name, part in found["benchmarks"].items():
        parts += _questions(name, part)
    return [*parts, *found["notices"]]


def _row(name: str, found: Mapping[str, Any]) -> list[str]:
    p = found["p"]
    return [
        name,
        f"{found['a']:.3f}",
        f"{found['b']:.3f}",
        f"{found['difference']:+.3f}",
        report.interval(found["ci95"], "+.3f"),
        "" if p is None else f"{p:.3f}" if p >= 0.001 else f"{p:.1e}",
        str(found["n_questions"]),
    ]


def _questions(name: str, part: Mapping[str, Any]) -> list[str]:
    """The questions that differ, the largest differences first."""
    sides: Sequence[Sequence[Mapping[str, Any]]] = part["a_better"], part["b_better"]
    differing, n = sum(map(len, sides)), part["settings"]["n"]
    counted = ", ".join(f"{len(side)} better in {at}" for at, side in zip("AB", sides, strict=True))
    said = f"{differing} of {differing + part['alike']} questions differ, {counted}"
    found = [f"## {name}: {said}"]
    for at, side in zip("AB", sides, strict=True):
        names = [q["id"] if n == 1 else f"{q['id']} {q['a']}/{n} to {q['b']}/{n}" for q in side]
        title = f"right in {at} alone" if n == 1 else f"better in {at}"
        all_in = f" ({JSON} has all)" if len(names) > _NAMED else ""
        if names:
            found.append(f"**{title}:** {listed(names, _NAMED)}{all_in}")
    return found
