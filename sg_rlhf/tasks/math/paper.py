"""Table 1 of arXiv 2511.00066 as printed, and ours beside it."""

from __future__ import annotations

from sg_rlhf.common.text import EMPTY, table_head, table_row
from sg_rlhf.tasks.suite import Results, Suite, get_score

#: Table 1, per cent: OlympiadBench, Minerva, MATH-500, AMC avg@16, AIME pass@16, AIME avg@16, Avg.
#: (The text of Section 4.2.1 swaps AIME's two columns.)
MATH: dict[str, tuple[float, ...]] = {
    "Qwen2.5-7B": (27.64, 18.38, 63.00, 22.21, 30.00, 5.00, 27.71),
    "DSR + GRPO": (36.50, 29.66, 74.67, 47.72, 28.89, 16.46, 38.98),
    "DSR + GRPO-SG": (38.48, 32.35, 79.40, 46.84, 43.33, 18.13, 43.09),
    "ORZ + GRPO": (38.23, 27.69, 78.33, 49.57, 32.22, 12.92, 39.83),
    "ORZ + GRPO-SG": (40.12, 30.51, 78.60, 45.48, 43.33, 16.88, 42.49),
}

_COLUMNS = (
    "OlympiadBench", "Minerva", "MATH-500", "AMC avg@16", "AIME pass@16", "AIME avg@16", "Avg.",
)  # fmt: skip


def beside_the_paper(results: Results, suite: Suite) -> list[str]:
    """The table's lines."""
    lines = table_head(("Model", "Source", *_COLUMNS))
    for name, numbers in MATH.items():
        lines.append(table_row([name, "*paper*, Table 1", *(f"{v:.2f}" for v in numbers)]))
    found = [get_score(results, benchmark, name) for benchmark, name in suite.average]
    values = [*found, results["average"]]
    cells = [EMPTY if v is None else f"**{100 * v['value']:.2f}**" for v in values]
    lines.append(table_row([f"`{results['model']['name']}`", "this run", *cells]))
    return ["Per cent of questions; greedy unless avg@16 or pass@16 (T = 1).", "", *lines]
