"""Values for the options that were not given: model, output folder, data of the suite."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sg_rlhf.eval import suites, training_runs
from sg_rlhf.eval.store import model_of
from sg_rlhf.tasks import registry
from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.suite import Benchmark, Suite

#: Parent folder of the results without `--out`.
OUT = Path("out")


def fill_in(args: argparse.Namespace, suite: Suite, benchmarks: Sequence[Benchmark]) -> None:
    """Set the options that were not given: the model, the output folder, the suite's own.

    Raises:
        EvalError: something is missing and was not found in its default place; names all of it.
    """
    if args.resume and args.out is None:
        raise EvalError("--resume needs --out DIR, the folder of the run that is to go on")
    said: dict[str, Any] = {}
    missing = []
    if args.model is None and args.resume:
        args.model = said["model"] = model_of(args.out)
    if args.model is None and args.engine == "openai":
        missing.append("--model, the server's name of it")
    elif args.model is None:
        owner = suites.domain_of(suite, args.suite)
        domain = None if owner is None else owner.name
        newest = training_runs.newest_checkpoint(domain) if domain else None
        if newest is not None:
            args.model = str(newest)
            said["model"] = (
                f"{newest}, the newest finished run of {domain} under {training_runs.RUNS}/"
            )
        else:
            missing.append(_no_model(domain))
    run_dir = None if args.model is None else training_runs.run_dir_of(Path(args.model))
    args.run_settings = {} if run_dir is None else training_runs.settings_of(run_dir)
    missing += suite.missing(benchmarks, args)
    if missing:
        numbered = (
            missing if len(missing) == 1 else [f"({n}) {m}" for n, m in enumerate(missing, 1)]
        )
        raise EvalError(f"--suite {suite.name}: missing: {'; '.join(numbered)}")
    if args.out is None:
        args.out = said["out"] = OUT / f"{suite.name}_{time.strftime('%Y-%m-%d_%H%M%S')}"
    if said:
        print("; ".join(f"--{name} {value}" for name, value in said.items()), flush=True)


def _no_model(domain: str | None) -> str:
    if domain is None:
        return "--model"
    command = "sg-rlhf train --config RECIPE"
    if domain in registry.DOMAINS:
        command = f"sg-rlhf run {domain}"
    return (
        f"a model: no finished run of {domain} under {training_runs.RUNS}/; train one first "
        f"(`{command}`), or give --model M"
    )
