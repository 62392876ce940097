"""Draw docs/images/processes.svg, the picture of a training run's processes.

    python docs/make_processes.py [--check]

Each box names the folder of its code. Each arrow names the function or class that sends the data,
and the script fails if the module does not define it. ``--check`` writes nothing and fails if the
picture is out of date.
"""

from __future__ import annotations

import ast
import html
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "processes.svg"
WIDTH, HEIGHT = 1100, 520
BOX_WIDTH, LINE = 300, 21
INK, FAINT, PAPER = "#17313a", "#3f5962", "#fbfdfd"


class Box(NamedTuple):
    """A process, or the run directory: place of its corner, title, text, folder of its code."""

    x: int
    y: int
    title: str
    lines: tuple[str, ...]
    code: str
    fill: str = "#eaf1f2"

    @property
    def height(self) -> int:
        return 64 + LINE * len(self.lines)


class Arrow(NamedTuple):
    """A path of SVG, its label and the label's place, and the code that sends: module, name."""

    path: str
    label: str
    x: int
    y: int
    module: str
    name: str


BOXES = (
    Box(20, 20, "Driver", ("checks the recipe, starts Ray,", "shows the progress"),
        "overlay/driver"),
    Box(400, 20, "Controller", ("the training loop: prompts,", "advantages, batches, logs"),
        "overlay/controller"),
    Box(780, 20, "Run directory", ("config, metrics, samples,", "checkpoints, report"), "run_dir"),
    Box(20, 228, "Rollout engines (vLLM)",
        ("sample a group of responses", "for each prompt and", "call the reward function"),
        "overlay/rollout"),
    Box(400, 228, "Policy ranks (ZeRO-3)",
        ("log-probs, the loss with a", "weight for each token,", "optimizer steps, checkpoints"),
        "overlay/learner", "#f6e3bd"),
    Box(780, 228, "Reference ranks", ("log-probs of the start model,", "for the KL penalty"),
        "overlay/model"),
)  # fmt: skip
ARROWS = (
    Arrow("M320 70 H396", "", 0, 0, "overlay/driver/train.py", "train"),
    Arrow("M700 70 H776", "", 0, 0, "overlay/controller/metric_log.py", "MetricLog"),
    Arrow("M420 126 L250 224", "1 prompts", 222, 168, "overlay/rollout/dispatch.py", "submit"),
    Arrow("M290 228 L466 130", "2 responses, rewards", 392, 202,
          "overlay/rollout/dispatch.py", "completions"),
    Arrow("M600 126 V224", "3 score, 4 train", 612, 196,
          "overlay/controller/trainer.py", "_update_policy"),
    Arrow("M690 126 L850 224", "3 score", 792, 168,
          "overlay/learner/experience_maker.py", "score"),
    Arrow("M550 355 V397 H230 V359", "5 weight sync: the new weights", 242, 389,
          "overlay/weight_sync/sender.py", "WeightSync"),
    Arrow("M110 355 V437 H640 V359", "6 check: log-probs of the same samples", 242, 429,
          "overlay/weight_sync/log_prob_check.py", "check"),
)  # fmt: skip
NOTES = (
    "Controller, engines and ranks are Ray actors. The small text is the folder in sg_rlhf.",
    "The recipes of the paper place engines, policy and reference on the same GPUs, in turns.",
)
ABOUT = (
    "The processes of a training run: the driver starts a controller; the controller sends prompts "
    "to vLLM rollout engines, which return rewarded responses; policy and reference ranks score "
    "them; the policy ranks train, save checkpoints and send the new weights to the engines; "
    "engines and ranks compare log-probs."
)


def check_code() -> None:
    """Refuse a folder or a sender that does not exist."""
    for box in BOXES:
        assert (ROOT / "sg_rlhf" / box.code).is_dir(), f"{box.title}: no folder {box.code}"
    for arrow in ARROWS:
        tree = ast.parse((ROOT / "sg_rlhf" / arrow.module).read_text())
        defined = {getattr(node, "name", None) for node in ast.walk(tree)}
        assert arrow.name in defined, f"{arrow.module} defines no {arrow.name}"


def text(x: int, y: int, kind: str, words: str) -> str:
    return f'  <text class="{kind}" x="{x}" y="{y}">{html.escape(words)}</text>'


def drawing() -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="system-ui, -apple-system, sans-serif" role="img" aria-label="{ABOUT}">',
        '  <defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="{INK}"/></marker>',
        f"  <style>.box {{ stroke: {INK}; stroke-width: 1.3 }}",
        f"  .name {{ font-size: 18px; font-weight: 700; fill: {INK} }}",
        f"  .line {{ font-size: 14px; fill: {FAINT} }}",
        f"  .code {{ font-size: 12px; fill: {FAINT}; font-family: ui-monospace, monospace }}",
        f"  .step {{ font-size: 14px; font-weight: 600; fill: {INK}; stroke: {PAPER}; "
        "stroke-width: 5px; paint-order: stroke }",
        f"  .arrow {{ stroke: {INK}; stroke-width: 1.7; fill: none; marker-end: url(#head) }}",
        "  </style></defs>",
        f'  <rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>',
    ]
    for box in BOXES:
        lines.append(
            f'  <rect class="box" fill="{box.fill}" x="{box.x}" y="{box.y}" width="{BOX_WIDTH}" '
            f'height="{box.height}" rx="8"/>'
        )
        lines.append(text(box.x + 18, box.y + 28, "name", box.title))
        for number, line in enumerate(box.lines):
            lines.append(text(box.x + 18, box.y + 52 + LINE * number, "line", line))
        lines.append(text(box.x + 18, box.y + box.height - 10, "code", box.code))
    lines += [f'  <path class="arrow" d="{arrow.path}"/>' for arrow in ARROWS]
    lines += [text(arrow.x, arrow.y, "step", arrow.label) for arrow in ARROWS if arrow.label]
    lines += [text(20, 478 + 23 * i, "line", note) for i, note in enumerate(NOTES)]
    return "\n".join([*lines, "</svg>", ""])


def main() -> int:
    check_code()
    drawn = drawing()
    if "--check" in sys.argv[1:]:
        same = PICTURE.read_text() == drawn
        if not same:
            print(f"{PICTURE.relative_to(ROOT)} is out of date: python docs/make_processes.py")
        return int(not same)
    PICTURE.write_text(drawn)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
