"""The doctor's word before a run starts: within two seconds, and nothing where nothing is wrong."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from sg_rlhf.config import Config
from sg_rlhf.doctor.check import FAILED, WARNING
from sg_rlhf.doctor.checks import check
from sg_rlhf.doctor.gather import gather
from sg_rlhf.doctor.recipe import Recipe, judge

#: Set to 1 to start a run that the doctor refuses, at one's own risk.
SKIP = "SG_SKIP_DOCTOR"
SECONDS = 1.5
#: What a run does not meet, or says itself: it starts a private Ray, the domains ask for their
#: servers, and the recipe's files are looked for before.
_NOT_NOW = ("Ray's ports", "retriever", "data", "Python")


class UnfitMachine(ValueError):
    """The run cannot work here; a line a reason."""


def before_run(config: Config, run_dir: Path) -> list[str]:
    """What a user should know before this run starts here, a line each; often nothing.

    Raises:
        UnfitMachine: it cannot work.
    """
    platform, for_gpus = os.environ.get("SG_PLATFORM"), config.value("vllm.sync_backend") != "gloo"
    if os.environ.get(SKIP) == "1" or (platform == "cpu" and for_gpus):
        return []  # the latter is refused flag by flag, each with what to use instead
    recipe = Recipe(config, run_dir, without_gpus=not for_gpus and platform != "cuda")
    facts = gather(replace(recipe.wanted(seconds=SECONDS), retriever=None))
    if for_gpus and facts.gpus == [] and not facts.gpu_problem and platform != "cuda":
        return []  # as above
    if facts.gpus is None:
        # It may be slow and not hanging; torch will tell.
        facts = replace(facts, gpu_problem=None)
    needs, more = judge(recipe, facts)
    found = [one for one in (*check(facts, needs), *more) if one.name not in _NOT_NOW]
    failed = [one.line() for one in found if one.status == FAILED]
    if failed:
        failed[-1] += f" ({SKIP}=1 starts it all the same)"
        raise UnfitMachine("\nerror: ".join(failed))
    return [one.line() for one in found if one.status == WARNING]
