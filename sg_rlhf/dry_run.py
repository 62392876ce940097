"""``sg-rlhf train --dry-run``: what a recipe would run."""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
from pathlib import Path

from sg_rlhf.common.redaction import redact_argv
from sg_rlhf.config import Config, ConfigError, builtin_recipes
from sg_rlhf.config.checks import input_files
from sg_rlhf.config.run_paths import with_absolute_paths
from sg_rlhf.config.upstream_flags import UpstreamMissing
from sg_rlhf.overlay.driver.arguments import (
    UnsupportedHere,
    check_platform,
    check_prompt_count,
    upstream_arguments,
)
from sg_rlhf.plan.of_recipe import Plan, plan_of


def plan_run(config: Config, run_dir: Path) -> Plan | None:
    """Memory and time that the run will take; None if the model's shape is not known."""
    prompts, rollouts = input_files.count_prompts(config), None
    if prompts is not None:
        per_epoch = prompts // max(1, config.value("rollout.batch_size"))
        rollouts = per_epoch * config.value("train.num_episodes")
    try:
        return plan_of(config, folder=run_dir, rollouts=rollouts or None)
    except ConfigError:
        raise
    except ValueError:  # a model of a kind whose memory is not known
        return None


def plan_lines(config: Config, run_dir: Path) -> list[str]:
    """The plan, as ``sg-rlhf plan`` prints it."""
    plan = plan_run(config, run_dir)
    return plan.lines() if plan else ["no memory plan: the model's shape is not known here"]


def dry_run(
    config: Config, run_dir: Path, loss_description: str, arguments: argparse.Namespace
) -> None:
    """Print the resolved recipe, its weighting, its plan and the command that trains it.

    The run may be meant for another machine, so a GPU or file that is missing here is a remark.
    Files that are here are checked.

    Args:
        config: the recipe, with the paths of its run directory.
        run_dir: the run directory, absolute.
        loss_description: what the policy loss does with a token.
        arguments: the command line.

    Raises:
        ConfigError: a value that cannot be, or a file that would stop the run.
        UsageError: settings that cannot work together.
        UnusablePrompts: the prompts do not fill one rollout.
    """
    remarks = io.StringIO()
    with contextlib.redirect_stdout(remarks):
        try:
            args = upstream_arguments(with_absolute_paths(config))
            if args.data.prompt_dataset:
                check_prompt_count(config, args)
            check_platform(args)
        except UnsupportedHere as error:
            print(f"# not on this machine: {error}")
        except UpstreamMissing:
            print("# not checked: OpenRLHF is not installed here, and has more rules for settings")
    # Before anything is printed: these may find a value that cannot be.
    plan = plan_lines(config, run_dir)
    missing, file_remarks = input_files.look(config)
    print(f"# resolved recipe, from {' <- '.join(reversed(config.sources))}")
    print(config.to_yaml())
    print(f"# {loss_description}".replace("\n", "\n# "))
    print(*(f"# {line}".rstrip() for line in plan), sep="\n")
    print("# the command that trains it")
    print(command(arguments, run_dir))
    print(remarks.getvalue(), end="")
    for line in file_remarks:
        print(f"# remark: {line}")
    for line in missing:
        print(f"# not on this machine: {line}")


def command(arguments: argparse.Namespace, run_dir: Path) -> str:
    """The same run without ``--dry-run``, for a shell; secrets are hidden."""
    words = ["sg-rlhf", "train", *builtin_recipes.words(arguments.config)]
    words += ["--run-dir", str(run_dir), *redact_argv(arguments.overrides)]
    return shlex.join(words)
