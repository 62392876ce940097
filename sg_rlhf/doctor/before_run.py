"""The doctor's checks before a run starts: within two seconds, and only problems are reported."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from sg_rlhf.config import Config
from sg_rlhf.doctor.check import FAILED, WARNING
from sg_rlhf.doctor.checks import check
from sg_rlhf.doctor.gather import gather
from sg_rlhf.doctor.recipe import Recipe, judge

#: Environment variable; 1 starts a run that the doctor would refuse.
SKIP = "SG_SKIP_DOCTOR"
SECONDS = 1.5
#: Checks that do not apply to a run or that it makes itself: it starts a private Ray, domains ask
#: for their servers, and the recipe's files are checked before.
_NOT_NOW = ("Ray's ports", "retriever", "data", "Python")


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
    recipe = Recipe(config, run_dir, without_gpus=not for_gpus and platform != "cuda")
    facts = gather(replace(recipe.wanted(seconds=SECONDS), retriever=None))
    if for_gpus and facts.gpus == [] and not facts.gpu_problem and platform != "cuda":
        return []  # as above
    if facts.gpus is None:
        # nvidia-smi may be slow and not hanging. torch will find out.
        facts = replace(facts, gpu_problem=None)
    needs, more = judge(recipe, facts)
    checks = [item for item in (*check(facts, needs), *more) if item.name not in _NOT_NOW]
    failed = [item.line() for item in checks if item.status == FAILED]
    if failed:
        failed[-1] += f" ({SKIP}=1 starts it all the same)"
        raise UnfitMachine("\nerror: ".join(failed))
    return [item.line() for item in checks if item.status == WARNING]
