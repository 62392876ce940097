"""Draw docs/images/map.svg, the map of the packages in CONTRIBUTING.md.

    python docs/make_map.py [--check]

The packages and their order come from the import contract in setup.cfg, so the picture shows what
is checked. A package without a line here is an error. ``--check`` writes nothing and fails if the
picture is not the one that would be drawn.
"""

from __future__ import annotations

import configparser
import html
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "map.svg"
#: What a package is for, in two lines.
PURPOSES = {
    "train": ("one training run", "sg-rlhf train"),
    "overlay": ("registered in OpenRLHF;", "on a CPU as well"),
    "run": ("sg-rlhf run: data, training,", "report, for this machine"),
    "dry_run": ("print a run's recipe,", "plan and command"),
    "eval": ("benchmarks: generate,", "grade, compare"),
    "tiny": ("the models that learn", "without a GPU"),
    "data": ("sg-rlhf data", "generate, check, write"),
    "doctor": ("checks of a machine,", "before anything starts"),
    "launch": ("a recipe as a job of", "SLURM, KubeRay, SkyPilot"),
    "integrations": ("the loss in TRL,", "verl and Molt"),
    "publish": ("model card, upload", "to the hub"),
    "environments": ("domains for other", "trainers: OpenEnv"),
    "plan": ("memory, time and disk", "of a run, by formula"),
    "report": ("run directories as", "figures and a page"),
    "retrieval": ("index and server of", "passages, over HTTP"),
    "weights": ("a recipe's token", "weighting: curve, range"),
    "config": ("recipes, their keys, upstream's flags;", "imports neither torch nor ray"),
    "algo": ("the method as functions on tensors:", "weightings, losses, KL; torch alone"),
    "tasks": ("K&K, mathematics, search: data, prompts,", "rewards, grading; no torch"),
    "batching": ("samples to ranks", "by their lengths"),
    "sampling": ("request seeds,", "vLLM's settings"),
    "run_dir": ("files, lock, names of", "a run directory"),
    "data_io": ("records, downloads,", "model folders"),
    "ray_session": ("join or start a", "Ray cluster"),
    "machine": ("GPUs and memory; names and", "settings of hardware"),
    "common": ("atomic files, text,", "host, redaction"),
    "__main__": ("sg-rlhf: every command", "under one name"),
}
WIDTH, LEFT, TOP, ROW, GAP = 1560, 40, 96, 92, 14
HOUSE = 1200
#: Packages in one row.
MOST = 7
INK, FAINT, PAPER = "#17313a", "#5b7680", "#fbfdfd"
FILL = {"train": "#cfe8e4", "overlay": "#cfe8e4", "algo": "#f6e3bd", "tasks": "#f6e3bd"}


def layers() -> list[list[str]]:
    """The packages from the top down, as import-linter checks them."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["importlinter:contract:layers"]["layers"].split("\n")
    found = [line.replace("|", ":").split(":") for line in lines if line.strip()]
    return [[name.strip(" ()") for name in layer] for layer in found]


def drawn_rows() -> list[list[str]]:
    """The layers, one with many packages in two rows."""
    rows = []
    for layer in layers():
        size = len(layer) if len(layer) <= MOST else -(-len(layer) // 2)
        rows += [layer[i : i + size] for i in range(0, len(layer), size)]
    return rows


def text(x: float, y: float, words: str, size: int, fill: str = INK, more: str = "") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" {more}>'
        f"{html.escape(words)}</text>"
    )


def box(
    x: float, y: float, w: float, h: float, name: str, lines: tuple[str, ...], fill: str
) -> str:
    parts = [
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="7" fill="{fill}" '
        f'stroke="{INK}" stroke-width="1.2"/>',
        text(x + 12, y + 24, name, 16, more='font-weight="700"'),
    ]
    parts += [text(x + 12, y + 43 + 16 * i, line, 12, FAINT) for i, line in enumerate(lines)]
    return "\n".join(parts)


def arrow(x1: float, y1: float, x2: float, y2: float, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" stroke="{INK}" stroke-width="1.6" fill="none"'
        f'{dash} marker-end="url(#head)"/>'
    )


def draw() -> str:
    rows = drawn_rows()
    missing = {name for row in rows for name in row} - PURPOSES.keys()
    if missing:
        raise SystemExit(f"make_map.py: say what is for: {', '.join(sorted(missing))}")
    bottom = TOP + len(rows) * ROW
    height = bottom + 128
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" role="img" aria-label="The packages of sg_rlhf">',
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="{INK}"/></marker>'
        "</defs>",
        f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>',
        text(LEFT, 40, "sg_rlhf", 22, more='font-weight="700"'),
        text(
            LEFT + 92,
            40,
            "a package imports only packages below it; import-linter checks it",
            14,
            FAINT,
        ),
        f'<rect x="{LEFT - 16}" y="{TOP - 34}" width="{HOUSE + 32}" height="{bottom - TOP + 34}" '
        f'rx="12" fill="none" stroke="{FAINT}" stroke-dasharray="2 5"/>',
        arrow(LEFT - 2, TOP - 20, LEFT - 2, bottom - 16),
    ]
    for i, row in enumerate(rows):
        x, y = LEFT + 14, TOP + i * ROW
        w = (HOUSE - 14 - GAP * (len(row) - 1)) / len(row)
        # From right to left, so that overlay and report stand beside what they speak with.
        for name in reversed(row) if len(row) > 2 else row:
            parts.append(box(x, y, w, ROW - 18, name, PURPOSES[name], FILL.get(name, "#eaf1f2")))
            x += w + GAP

    at = {name: TOP + i * ROW for i, row in enumerate(rows) for name in row}
    x, w = LEFT + HOUSE + 66, WIDTH - LEFT - HOUSE - 106
    beside = [
        (at["train"], "configs/", ("recipes, algorithms, studies:", "YAML that config reads")),
        (
            at["overlay"],
            "OpenRLHF 0.11.2",
            ("unmodified: Ray, vLLM,", "DeepSpeed; runs the training"),
        ),
        (
            at["report"],
            "run directory",
            ("config, metrics, samples,", "checkpoints; see running.md"),
        ),
    ]
    for y, name, lines in beside:
        parts.append(box(x, y, w, ROW - 18, name, lines, "#ffffff"))
    edge, middle = LEFT + HOUSE, (ROW - 18) / 2
    parts += [
        arrow(x, at["train"] + middle, edge + 4, at["train"] + middle),
        arrow(edge + 4, at["overlay"] + middle, x, at["overlay"] + middle),
        arrow(x + w / 2, at["overlay"] + ROW - 18, x + w / 2, at["report"]),
        arrow(x, at["report"] + middle, edge + 4, at["report"] + middle),
    ]
    y = bottom + 24
    around = [
        ("tests/", "unit mirrors the packages;", "integration runs the pipeline"),
        ("lab/", "the authors' benchmarks,", "studies and measurements"),
        ("docs/", "pages, read here and as a site", "(make docs)"),
        ("scripts/, requirements/", "set-up, lock files", ""),
    ]
    w = (WIDTH - 2 * LEFT - GAP * (len(around) - 1)) / len(around)
    for i, (name, *lines) in enumerate(around):
        left = LEFT + i * (w + GAP)
        parts.append(box(left, y, w, ROW - 18, name, tuple(lines), "#ffffff"))
    return "\n".join([*parts, "</svg>\n"])


def main() -> int:
    drawn = draw()
    if "--check" in sys.argv[1:]:
        if PICTURE.read_text() != drawn:
            print("make_map.py: docs/images/map.svg is not what would be drawn", file=sys.stderr)
            return 1
        return 0
    PICTURE.write_text(drawn)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
