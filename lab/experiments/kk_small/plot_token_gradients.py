"""Draw the gradient norms of single tokens over 1 - p, and the weighted norms over w (1 - p).

    python lab/experiments/kk_small/plot_token_gradients.py [TOKENS.json] [--out FILE.png]

TOKENS.json is the file of `python -m lab.measure token-gradients --json`. Without it, the tokens of
sharpness.md are drawn, from measurements.jsonl.gz.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

HERE = Path(__file__).parent
PICTURE = HERE.parents[2] / "docs/images/token_gradients.png"


def report_of(path: Path | None) -> dict[str, Any]:
    """The first report with points, of a JSON file or of the committed measurements."""
    if path is None:
        with gzip.open(HERE / "measurements.jsonl.gz", "rt") as file:
            reports = [json.loads(line) for line in file]
    else:
        reports = json.loads(path.read_text())["models"]
    return next(report for report in reports if "points" in report)


def draw(report: dict[str, Any]) -> Figure:
    """Both norms over 1 - p, with the exact bounds shaded; the weighted norm over w (1 - p)."""
    figure = Figure(figsize=(10.4, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    points = [p for p in report["points"] if p["one_minus_p"] > 0 and p["grad_norm"] > 0]
    rest = [p["one_minus_p"] for p in points]
    left.scatter(rest, [p["grad_norm"] for p in points], s=8, label="all parameters")
    left.scatter(rest, [p["logit_norm"] for p in points], s=8, label="at the logits")
    ends = [min(rest), 1.0]
    left.fill_between(
        ends, ends, [2**0.5 * e for e in ends], color="0.5", alpha=0.35, lw=0,
        label=r"$1-p$ to $\sqrt{2}\,(1-p)$",
    )  # fmt: skip
    right.scatter(
        [p["w_one_minus_p"] for p in points], [p["weighted"] for p in points],
        s=8, color="tab:green", label="w times all parameters",
    )  # fmt: skip
    left.set(xlabel="1 - p", ylabel=r"norm of the gradient of $\log\,\pi(y)$")
    right.set(xlabel="w (1 - p)")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log")
        axes.grid(True, color="0.9", lw=0.8)
        axes.set_axisbelow(True)
        axes.legend(fontsize=8, loc="upper left")
    figure.suptitle(f"{report['tokens']} tokens", fontsize=10)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokens", nargs="?", type=Path, metavar="TOKENS.json")
    parser.add_argument(
        "--out", type=Path, default=PICTURE, help="[docs/images/token_gradients.png]"
    )
    args = parser.parse_args()
    draw(report_of(args.tokens)).savefig(args.out, dpi=150)


if __name__ == "__main__":
    main()
