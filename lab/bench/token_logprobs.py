"""Log-probs of tokens under the head of a 3B to 8B model: memory and time of each way to them.

    python lab/bench/token_logprobs.py --out lab/bench/results/token_logprobs_cpu.json
    python lab/bench/token_logprobs.py --device cuda --tokens 1024,4096,16384,32768 \\
        --memory-tokens 1024,4096,8192,16384,32768 --out lab/bench/results/token_logprobs_cuda.json
    python lab/bench/token_logprobs.py --draw lab/bench/results/token_logprobs_cuda.json --plot FILE

``logits`` is upstream's path: logits of the model's dtype, a float32 copy, divided by the
temperature, the entropy of the whole vocabulary, the log-probs. ``ours`` is
`sg_rlhf/algo/log_probs/fused_log_probs.py`, on CUDA with each of its kernels; the others are
`peer_heads.py`.

Seconds: three passes, ``score`` without gradients or entropy (old and reference log-probs),
``update`` with the gradients of hidden states and head, ``frozen_head`` with the hidden states'
alone (LoRA); medians over the repeats, the ways by turns in one process. The entropy is computed
and only logged, as the recipes do. Memory: a process each, the peak above the inputs and the
returned gradients, in % of the float32 logits. The logits' peak comes before the head's gradient is
there, so that their figure is too low by it. ``--plot`` draws memory over tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from lab.bench.common import at_least, provenance, write
from lab.bench.head_costs import WAYS, memory, seconds, why_not
from lab.bench.peer_heads import PEERS
from sg_rlhf.plan.shapes import shape_of

MODELS = ("Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B-Instruct")
#: Goals: share of the float32 logits at 4,096 tokens; time of the path over logits.
MEMORY_GOAL, TIME_GOAL = 5.0, {"cpu": 1.15, "cuda": 1.0}


def _numbers(text: str) -> list[int]:
    """``1024,4096``; an empty text is none."""
    values = [int(part) for part in text.split(",") if part.strip()]
    if min(values, default=1) < 1:
        raise ValueError
    return values


def _of(allowed: Any) -> Any:
    def names(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if not allowed(name):
                raise argparse.ArgumentTypeError(f"{name!r} is not known")
        return found

    return names


def _child(
    arguments: argparse.Namespace, ways: list[str], model: str, tokens: int, what: str
) -> Any:
    """A measurement in a process of its own; None and the reason if it ended otherwise."""
    done = subprocess.run(
        [
            sys.executable, __file__, "--one", what, "--ways", ",".join(ways), "--models", model,
            "--tokens", str(tokens), "--device", arguments.device, "--dtype", arguments.dtype,
            "--repeats", str(arguments.repeats), "--peers", str(arguments.peers),
        ],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1]), None
    return None, (done.stderr.strip().splitlines() or ["killed: out of memory?"])[-1][:200]


def _times(arguments: argparse.Namespace, model: str, tokens: int) -> list[dict[str, Any]]:
    ways = [way for way in arguments.ways if not why_not(way, arguments.device)]
    found, why = _child(arguments, ways, model, tokens, "seconds")
    rows = found or [{"way": way, "failed": why} for way in ways]
    base = next((row for row in rows if row["way"] == "logits" and "update_seconds" in row), None)
    for row in rows:
        if base and "update_seconds" in row:
            row["ratios"] = {
                name: round(of(row) / of(base), 3)
                for name, of in {
                    "score": lambda x: x["score_seconds"],
                    "update": lambda x: x["update_seconds"],
                    "frozen_head": lambda x: x["frozen_head_seconds"],
                    "step, 1 score": lambda x: x["score_seconds"] + x["update_seconds"],
                    "step, 2 scores": lambda x: 2 * x["score_seconds"] + x["update_seconds"],
                }.items()
            }
    return [{"model": model, "tokens": tokens, **row} for row in rows]


def _memories(arguments: argparse.Namespace, model: str, tokens: int) -> list[dict[str, Any]]:
    rows = []
    for way in arguments.ways:
        if not why_not(way, arguments.device):
            found, why = _child(arguments, [way], model, tokens, "memory")
            rows.append(
                {"model": model, "tokens": tokens, **(found or {"way": way, "failed": why})}
            )
    return rows


def table(result: dict[str, Any]) -> str:
    """Of a result's rows, as text."""
    lines = []
    for row in result["seconds"]:
        head = f"{row['model'].split('/')[-1]:24}T {row['tokens']:6}  {row['way']:18}"
        if "failed" in row:
            lines.append(f"{head}failed: {row['failed']}")
            continue
        names = ("score", "update", "frozen_head")
        values = "  ".join(f"{name} {row[f'{name}_seconds']:8.3f} s" for name in names)
        ratios = row.get("ratios", {})
        lines.append(head + values + "".join(f"  {n} {r:.2f}x" for n, r in ratios.items()))
    for row in result["memory"]:
        head = f"{row['model'].split('/')[-1]:24}T {row['tokens']:6}  {row['way']:18}"
        lines.append(
            f"{head}failed: {row['failed']}"
            if "failed" in row
            else f"{head}score {row['score_extra_mib']:8.1f} MiB, "
            f"{row['score_percent_of_fp32_logits']:6.2f} %  update {row['update_extra_mib']:8.1f} "
            f"MiB, {row['update_percent_of_fp32_logits']:6.2f} % of the fp32 logits"
        )
    lines += [f"skipped: {way}: {why}" for way, why in result["skipped"].items()]
    return "\n".join(lines)


def plot(result: dict[str, Any], file: Path) -> None:
    """Extra memory of an update over the tokens, a panel a head; both axes by powers of two."""
    rows = [row for row in result["memory"] if "failed" not in row]
    if not rows:
        print(f"no {file}: no memory was measured")
        return
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = pyplot.subplots(
        1, len(models), figsize=(2 + 3.5 * len(models), 4), squeeze=False, sharey=True
    )
    for panel, model in zip(panels[0], models, strict=True):
        shape = shape_of(model)
        assert shape is not None
        of_model = [row for row in rows if row["model"] == model]
        tokens = sorted({row["tokens"] for row in of_model})
        full = [4 * n * shape.vocab_size / 2**20 for n in tokens]
        panel.plot(tokens, full, "k--", label="the fp32 logits")
        panel.plot(tokens, [MEMORY_GOAL / 100 * x for x in full], "k:", label="5 % of them")
        for way in dict.fromkeys(row["way"] for row in of_model):
            line = sorted((r["tokens"], r["update_extra_mib"]) for r in of_model if r["way"] == way)
            panel.plot(*zip(*line, strict=True), marker="o", label=way)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.yaxis.set_major_formatter("{x:g}")
        panel.set_xticks(tokens, [str(n) for n in tokens])
        panel.set_title(model.split("/")[-1])
        panel.set_xlabel("tokens")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("MiB beside inputs and gradients")
    panels[0][-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.suptitle(
        f"Memory of log-probs and their gradients, {result['dtype']}", fontsize="medium"
    )
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
    print(f"wrote {file}")


def main() -> None:
    """Every way at every size, then the JSON, the table and the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--plot", type=Path, help="PNG file to draw the memory into")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="measure nothing: this result")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"],
                        help="of hidden and weight [float32 on cpu, bfloat16 on cuda]")  # fmt: skip
    parser.add_argument("--models", type=_of(shape_of), default=",".join(MODELS),
                        help="ids of sg_rlhf.plan.shapes, by commas")  # fmt: skip
    parser.add_argument("--tokens", type=_numbers, default="512",
                        help="numbers of tokens to be timed, '' for none [512]")  # fmt: skip
    parser.add_argument("--memory-tokens", type=_numbers, default="512",
                        help="the same for memory [512]")  # fmt: skip
    parser.add_argument("--ways", type=_of(WAYS.__contains__), default=",".join(WAYS),
                        help="of " + ",".join(WAYS))  # fmt: skip
    parser.add_argument("--repeats", type=at_least(1), default=2, help="of each time")
    parser.add_argument("--peers", type=Path, default=Path(".cache/peers"), help="peers' sources")
    parser.add_argument("--one", choices=["seconds", "memory"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.draw:
        if not arguments.draw.is_file():
            parser.error(f"--draw {arguments.draw}: no such file")
        result = json.loads(arguments.draw.read_text())
        print(table(result))
        if arguments.plot:
            plot(result, arguments.plot)
        return
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU here")
    arguments.dtype = arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")
    if arguments.one:
        size = arguments.models[0], arguments.tokens[0], arguments.device, arguments.dtype
        if arguments.one == "seconds":
            found: Any = seconds(arguments.ways, *size, arguments.repeats, arguments.peers)
        else:
            found = memory(arguments.ways[0], *size, arguments.peers)
        print(json.dumps(found))
        return
    reasons = {way: why_not(way, arguments.device) for way in arguments.ways}
    result = {
        **provenance("lab/bench/token_logprobs.py", "torch"),
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "dtype": arguments.dtype,
        "goals": {
            "percent_of_fp32_logits_at_4096": MEMORY_GOAL,
            "update, of logits": TIME_GOAL[arguments.device],
        },
        "peers": {name: peer.origin for name, peer in PEERS.items()},
        "skipped": {way: why for way, why in reasons.items() if why},
        "seconds": [],
        "memory": [],
    }
    for kind, sizes, of_size in (
        ("seconds", arguments.tokens, _times),
        ("memory", arguments.memory_tokens, _memories),
    ):
        for model in arguments.models:
            for tokens in sizes:
                rows = of_size(arguments, model, tokens)
                result[kind] += rows
                print(table({"seconds": [], "memory": [], "skipped": {}, kind: rows}), flush=True)
    for way, why in result["skipped"].items():
        print(f"skipped: {way}: {why}")
    if arguments.out:
        write(result, arguments.out)
        print(f"wrote {arguments.out}")
    if arguments.plot:
        plot(result, arguments.plot)


if __name__ == "__main__":
    main()
