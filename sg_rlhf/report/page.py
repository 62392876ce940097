"""One self-contained HTML page about one or several runs; no network, no dependence on a server."""

from __future__ import annotations

import base64
import hashlib
import math
import time
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

import sg_rlhf
from sg_rlhf.common.statistics import spikes
from sg_rlhf.report import catalogue, figures
from sg_rlhf.report.chart import Chart, Missing, Panel, look, page_data, table_of
from sg_rlhf.report.evaluations import Evaluated, held_out_accuracy, held_out_label
from sg_rlhf.report.runs import (
    NOT_COMPARED,
    Group,
    Run,
    all_settings,
    differences,
    grouped,
    named_apart,
    read_run,
)
from sg_rlhf.report.samples import payload
from sg_rlhf.report.summary import figures_of
from sg_rlhf.report.text import embedded_json, one_line
from sg_rlhf.report.weighting import weighting_of
from sg_rlhf.run_dir import alerts

#: Samples in the browser of a page, over all its runs, if nobody asks for more; and their size.
SAMPLES, SAMPLES_BYTES = 500, 600_000
#: Joined in this order, in one function.
SCRIPTS = ("page.js", "figures.js", "tokens.js", "group.js", "samples.js", "live.js")
#: Values of a line, and of all lines of a figure: longer ones are thinned.
LINE_VALUES, FIGURE_VALUES = 1000, 4000


@dataclass(frozen=True)
class Drawn:
    """A figure as it goes into the page: a chart, or the sentence that says why there is none."""

    entry: catalogue.Entry
    chart: Chart | None
    missing: str = ""


def read_runs(run_dirs: list[Path], *, may_be_empty: bool = False) -> tuple[list[Run], list[Group]]:
    """The runs and their groups.

    Args:
        may_be_empty: accept runs without a rollout.

    Raises:
        RunError: one of them cannot be read.
    """
    runs = named_apart([read_run(path, may_be_empty=may_be_empty) for path in run_dirs])
    return runs, grouped(runs)


def build(
    runs: list[Run], groups: list[Group], samples: int | None = None, version: str | None = None
) -> str:
    """The page as text.

    Args:
        samples: in the page, over all runs; None: as many as keep it below 1 MB.
        version: of the runs' files, for a page that :mod:`.follow` serves and updates; None for
            a page that stands alone.
    """
    environment = Environment(
        loader=DictLoader({"page.html": _file("templates/page.html")}), autoescape=True,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    scripts = "\n".join(_file(f"templates/{name}") for name in SCRIPTS)
    plots = f"/*\n{_file('uplot/LICENSE')}*/\n{_file('uplot/uPlot.iife.min.js')}"
    script = f'{plots}\n"use strict";\n(() => {{\n{scripts}}})();\n'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data = payload(runs, samples or SAMPLES)
    while samples is None and len(embedded_json(data)) > SAMPLES_BYTES:
        shown = len(data["samples"]["step"])
        if shown <= len(runs):
            break
        data = payload(runs, shown // 2)
    drawn = [_drawn(entry, groups) for entry in catalogue.FIGURES]
    return environment.get_template("page.html").render(
        title=" · ".join(group.label for group in groups),
        style=Markup(_file("uplot/uPlot.min.css") + _file("templates/page.css")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        groups=groups,
        looks=[look(index) for index in range(len(groups))],
        dashes=[" ".join(str(2 * part) for part in look(i)["dash"]) for i in range(len(groups))],
        table=[_table_row(run) for run in runs],
        figures=[figure for figure in drawn if figure.chart],
        missing=[figure for figure in drawn if not figure.chart],
        table_of=table_of,
        window=figures.window_of(groups),
        several_seeds=any(len(group.runs) > 1 for group in groups),
        differences=differences(groups) if len(groups) > 1 else [],
        settings=[(run.name, all_settings(run)) for run in runs] if len(groups) == 1 else [],
        not_compared=", ".join(NOT_COMPARED),
        sample_count=len(data["samples"]["step"]),
        left_out=[run for run in data["runs"] if run["shown"] < run["total"]],
        data=Markup(embedded_json(data | {"figures": _data_of(drawn, runs)})),
        version=sg_rlhf.__version__,
        live=version,
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )


def _file(name: str) -> str:
    return (resources.files("sg_rlhf.report") / name).read_text(encoding="utf-8")


def _drawn(entry: catalogue.Entry, groups: list[Group]) -> Drawn:
    try:
        return Drawn(entry, entry.chart(groups))
    except Missing as missing:
        return Drawn(entry, None, str(missing))


def _data_of(drawn: list[Drawn], runs: list[Run]) -> dict[str, list[dict[str, Any]]]:
    """The panels of each figure that has some."""
    limit = min(LINE_VALUES, FIGURE_VALUES // len(runs))
    return {
        figure.entry.key: [
            page_data(panel, limit) for panel in figure.chart.panels if isinstance(panel, Panel)
        ]
        for figure in drawn
        if figure.chart
    }


def _table_row(run: Run) -> dict[str, Any]:
    """What the table of runs says, as text; "n/a" where a run does not have it."""
    norms = [y for _, y in figures.norm_curve(run)]
    found = figures_of(run)

    def shown(form: str, *keys: str) -> str:
        values = [found[key] for key in keys]
        return form.format(*values) if all(map(math.isfinite, values)) else "n/a"

    return {
        "name": run.name,
        "path": one_line(str(run.path)),
        "seed": one_line(run.seed),
        "rollouts": f"{run.rollouts}" + (f" of {run.planned}" if run.planned else ""),
        "state": "finished" if run.finished else "not finished",
        "weighting": one_line(weighting_of(run).label),
        "reward": shown("{:+.3f} → {:+.3f}", "reward_first", "reward_last"),
        "accuracy": _held_out(run),
        "evaluated": one_line(held_out_label(run)),
        "norm": shown("{:.3g} ± {:.2g}", "grad_norm_mean", "grad_norm_std"),
        "norm_max": shown("{:.3g}", "grad_norm_max"),
        "spikes": f"{len(spikes(norms))} of {len(norms)}" if norms else "n/a",
        "weight": shown("{:.3f}", "weight_mean"),
        "zeroed": shown("{:.1%}", "zeroed_pos"),
        "seconds": shown("{:.1f}", "seconds_per_rollout"),
        "notes": [one_line(note) for note in (*run.notes, *_alerts(run))],
    }


def _alerts(run: Run) -> list[str]:
    return [f"Alert of the last rollout: {alert.message}." for alert in alerts.check(run.metrics)]


def _held_out(run: Run) -> str:
    points = held_out_accuracy(run)
    if not points:
        return "n/a"

    def text(point: Evaluated) -> str:
        width = point.half_width
        interval = f" ± {width:.3f}" if math.isfinite(width) else ""
        return f"{point.accuracy:.3f}{interval}"

    return text(points[0]) if len(points) == 1 else f"{text(points[0])} → {text(points[-1])}"
