"""Table 2 of arXiv 2511.00066 as printed, and ours beside it."""

from __future__ import annotations

from sg_rlhf.common.text import EMPTY, table_head, table_row
from sg_rlhf.tasks.suite import Results, Suite, get_score

#: Table 2, per cent exact match: NQ, TriviaQA, PopQA, HotpotQA, 2Wiki, MuSiQue, Bamboogle, Avg.
#: (The last two averages are as printed; the seven columns give 35.51 and 39.67.)
QA: dict[str, tuple[float, ...]] = {
    "Qwen2.5-3B": (0.50, 1.20, 0.80, 0.50, 1.50, 0.00, 0.00, 0.64),
    "Qwen2.5-3B + GRPO": (13.50, 29.40, 11.50, 14.50, 16.30, 1.30, 10.40, 13.84),
    "Qwen2.5-3B + GRPO-SG": (41.80, 52.30, 39.10, 24.50, 20.30, 5.00, 8.00, 27.29),
    "Qwen3-4B": (31.68, 60.00, 38.60, 27.59, 14.89, 6.70, 23.20, 28.95),
    "Qwen3-4B + GRPO": (46.48, 59.84, 40.39, 35.54, 28.87, 10.26, 27.20, 35.21),
    "Qwen3-4B + GRPO-SG": (48.23, 64.11, 46.00, 36.60, 30.89, 10.26, 41.60, 40.18),
}


def beside_the_paper(results: Results, suite: Suite) -> list[str]:
    """The table's lines."""
    titles = [b.title for b in suite.benchmarks]
    lines = table_head(("Model", "Source", *titles, "Avg."))
    for name, numbers in QA.items():
        lines.append(table_row([name, "*paper*, Table 2", *(f"{v:.2f}" for v in numbers)]))
    values = [get_score(results, benchmark, name) for benchmark, name in suite.average]
    cells = [EMPTY if v is None else f"**{100 * v['value']:.2f}**" for v in values]
    for i, b in enumerate(suite.benchmarks):
        described = results["benchmarks"].get(b.name)
        if described and described["limited"]:
            cells[i] += f" ({described['n_questions']:,} of {described['full_size']:,})"
    average = results["average"]
    cells.append(EMPTY if average is None else f"**{100 * average['value']:.2f}**")
    search = results["search"]
    source = "this run" if search["enabled"] else "this run, no search"
    lines.append(table_row([f"`{results['model']['name']}`", source, *cells]))
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
