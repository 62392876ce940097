"""The doctor's checks before a run starts: only problems are reported."""

from __future__ import annotations

import os
from pathlib import Path

from sg_rlhf.config import Config
from sg_rlhf.doctor import recipe
from sg_rlhf.doctor.check import FAILED, WARNING
from sg_rlhf.doctor.checks import check
from sg_rlhf.doctor.facts import gather

#: Environment variable; 1 starts a run that the doctor would refuse.
SKIP = "SG_SKIP_DOCTOR"


class UnfitMachine(ValueError):
    """The run cannot work on this machine; one line per reason."""


def before_run(config: Config, run_dir: Path) -> list[str]:
    """Warnings about this machine for a run, one line each; often none.

    Raises:
        UnfitMachine: the run cannot work here.
    """
    platform, for_gpus = os.environ.get("SG_PLATFORM"), config.value("vllm.sync_backend") != "gloo"
    if os.environ.get(SKIP) == "1" or (platform == "cpu" and for_gpus):
        return []  # the latter is refused elsewhere, setting by setting, each with its remedy
    run = recipe.Recipe(config, run_dir, without_gpus=not for_gpus and platform != "cuda")
    facts = gather(run_dir)
    if for_gpus and not facts.gpus and not facts.gpu_problem and platform != "cuda":
        return []  # as above
    cached = recipe.cached_model(run.model, run.revision) is not None
    needs, more = recipe.judge(run, facts, cached=cached)
    # The run checks the recipe's files and servers itself.
    model = recipe.model(run.model, run.revision, cached=cached)
    checks = [*check(facts, needs), *more, *([model] if model else [])]
    failed = [item.line() for item in checks if item.status == FAILED]
    if failed:
        failed[-1] += f" ({SKIP}=1 starts it all the same)"
        raise UnfitMachine("\nerror: ".join(failed))
    return [item.line() for item in checks if item.status == WARNING]
