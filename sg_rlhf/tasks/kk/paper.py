"""Tables 3, 7 and 8 of arXiv 2511.00066 as printed, and ours beside them."""

from __future__ import annotations

from sg_rlhf.common.text import EMPTY, table_head, table_row
from sg_rlhf.tasks.suite import Results, Suite, get_score

#: People of a puzzle: all sizes, and those that the published runs trained on.
SIZES = tuple(range(2, 9))
TRAINED_SIZES = tuple(range(3, 8))

#: Accuracy at 3, 4, 5, 6, 7 people and the average.
KK: dict[str, dict[str, tuple[float, ...]]] = {
    "Table 3": {
        "GPT-4o": (0.57, 0.49, 0.32, 0.23, 0.21, 0.36),
        "o1-2024-12-17": (0.51, 0.38, 0.38, 0.35, 0.30, 0.38),
        "Deepseek-R1": (0.73, 0.77, 0.78, 0.75, 0.88, 0.78),
        "Qwen2.5-3B-Instruct": (0.09, 0.10, 0.03, 0.05, 0.02, 0.06),
        "Qwen2.5-3B-Instruct + GRPO": (0.64, 0.47, 0.35, 0.30, 0.21, 0.39),
        "Qwen2.5-3B-Instruct + GRPO-SG": (0.76, 0.76, 0.61, 0.59, 0.44, 0.63),
        "Qwen2.5-7B-Instruct-1M": (0.22, 0.15, 0.08, 0.10, 0.02, 0.11),
        "Qwen2.5-7B-Instruct-1M + GRPO": (0.91, 0.91, 0.77, 0.65, 0.61, 0.77),
        "Qwen2.5-7B-Instruct-1M + GRPO-SG": (0.95, 0.95, 0.92, 0.87, 0.84, 0.91),
    },
    "Table 7": {
        "Qwen2.5-3B-Instruct, tau 0.5": (0.63, 0.48, 0.35, 0.31, 0.20, 0.39),
        "Qwen2.5-3B-Instruct, tau 2": (0.64, 0.49, 0.37, 0.33, 0.19, 0.40),
        "Qwen2.5-3B-Instruct, tau 7": (0.67, 0.62, 0.41, 0.37, 0.24, 0.46),
        "Qwen2.5-3B-Instruct, tau 9": (0.76, 0.76, 0.61, 0.59, 0.44, 0.63),
        "Qwen2.5-3B-Instruct, tau 10": (0.77, 0.79, 0.58, 0.57, 0.37, 0.62),
        "Qwen2.5-3B-Instruct, tau 20": (0.74, 0.68, 0.51, 0.46, 0.35, 0.55),
        "Qwen2.5-3B-Instruct, (L, U) = (1.0, 1.2)": (0.77, 0.76, 0.60, 0.58, 0.40, 0.62),
        "Qwen2.5-3B-Instruct, (L, U) = (1.0, 1.4)": (0.76, 0.76, 0.61, 0.59, 0.44, 0.63),
        "Qwen2.5-3B-Instruct, (L, U) = (0.8, 1.5)": (0.74, 0.75, 0.57, 0.62, 0.42, 0.62),
        "Qwen2.5-3B-Instruct, (L, U) = (0.5, 1.5)": (0.70, 0.65, 0.59, 0.60, 0.44, 0.60),
    },
    "Table 8": {
        "Qwen2.5-3B-Base": (0.14, 0.04, 0.02, 0.01, 0.02, 0.05),
        "Qwen2.5-3B-Base + GRPO": (0.60, 0.54, 0.43, 0.38, 0.28, 0.45),
        "Qwen2.5-3B-Base + GRPO-SG": (0.68, 0.62, 0.44, 0.47, 0.26, 0.49),
        "Mistral-7B-Instruct-v0.3": (0.05, 0.01, 0.00, 0.02, 0.00, 0.02),
        "Mistral-7B-Instruct-v0.3 + GRPO": (0.29, 0.16, 0.09, 0.11, 0.03, 0.14),
        "Mistral-7B-Instruct-v0.3 + GRPO-SG": (0.47, 0.27, 0.18, 0.15, 0.08, 0.23),
        "LLaMa3.1-8B-Instruct": (0.08, 0.00, 0.00, 0.00, 0.00, 0.02),
        "LLaMa3.1-8B-Instruct + GRPO": (0.92, 0.92, 0.83, 0.79, 0.80, 0.85),
        "LLaMa3.1-8B-Instruct + GRPO-SG": (0.89, 0.95, 0.88, 0.87, 0.81, 0.88),
    },
}


def beside_the_paper(results: Results, suite: Suite) -> list[str]:
    """The table's lines."""
    extra = [size for size in SIZES if size not in TRAINED_SIZES]
    heads = [str(size) for size in TRAINED_SIZES] + ["Avg."] + [f"{size} (OOD)" for size in extra]
    lines = table_head(("Model", "Source", *heads))
    for table, rows in KK.items():
        for name, numbers in rows.items():
            cells = [*(f"{v:.2f}" for v in numbers), *(EMPTY for _ in extra)]
            lines.append(table_row([name, f"*paper*, {table}", *cells]))
    for benchmark, described in results["benchmarks"].items():
        names = [f"accuracy/{size}" for size in TRAINED_SIZES]
        names += ["accuracy"] + [f"accuracy/{size}" for size in extra]
        values = [get_score(results, benchmark, name) for name in names]
        cells = [EMPTY if v is None else f"**{v['value']:.2f}**" for v in values]
        source = f"this run, {described['title']}"
        lines.append(table_row([f"`{results['model']['name']}`", source, *cells]))
    return [
        "Accuracy by number of people. The paper says that it follows the official harness, and "
        "trains and prompts as Logic-RL does; which of the harnesses below its numbers come from "
        "is not stated.",
        "",
        *lines,
    ]
