"""Train with a recipe, or resume the run in the same run directory.

Checks the recipe, the files it names and this machine before Ray starts.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shlex
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from sg_rlhf.common import home
from sg_rlhf.common.argument_types import OneLineParser
from sg_rlhf.common.atomic_io import best_effort_output, real_path
from sg_rlhf.common.environment import as_typed
from sg_rlhf.common.redaction import redact_argv, redact_text
from sg_rlhf.common.text import Removed, single_line
from sg_rlhf.config import (
    Config,
    ConfigError,
    builtin_recipes,
    domain_settings,
    removed,
    set_by,
)
from sg_rlhf.config.checks import input_files
from sg_rlhf.config.run_paths import run_dir_of, with_absolute_paths, with_run_dir
from sg_rlhf.doctor.recipe import UnfitMachine, before_run
from sg_rlhf.overlay.driver import model_revision
from sg_rlhf.overlay.driver import run as driver
from sg_rlhf.overlay.driver.arguments import (
    UnsupportedHere,
    UsageError,
    check_platform,
    check_prompt_count,
    check_trackers,
    upstream_arguments,
)
from sg_rlhf.overlay.driver.prepare import prepare_run_dir, run_lock
from sg_rlhf.overlay.patches.version import UpstreamChanged, UpstreamMissing, check_version
from sg_rlhf.overlay.reporting import graceful_stop
from sg_rlhf.overlay.reporting.errors import UnusablePrompts
from sg_rlhf.plan.of_recipe import load_fitted
from sg_rlhf.run_dir.lock import RunLocked
from sg_rlhf.weights.describe import describe_loss

EXAMPLES = """\
examples:
  see what a recipe would run, without running it
    sg-rlhf train --config configs/kk/grpo_qwen2.5-3b-instruct.yaml \\
        --algorithm grpo_sg --dry-run
  train the small model of a machine without GPUs, with another learning rate
    sg-rlhf train --config configs/kk/grpo_sg_tiny_cpu.yaml actor.adam.lr=1e-4
  a model with another algorithm, on other hardware
    sg-rlhf train --config configs/kk/grpo_qwen2.5-3b-instruct.yaml \\
        --algorithm lopti --hardware 4x40gb --dry-run
  resume: the same command again, with the same --run-dir
  on a Ray cluster
    ray job submit --working-dir . -- \\
        python -m sg_rlhf train --config configs/kk/grpo_qwen2.5-3b-instruct.yaml

every OpenRLHF flag is a key: --actor.adam.lr 1e-6 is actor.adam.lr=1e-6 here
"""

#: Errors of a user's input: one line each, exit status 2.
REFUSALS = (
    ConfigError, UsageError, UnusablePrompts, UnfitMachine, UpstreamChanged, RunLocked,
)  # fmt: skip


class _Parser(OneLineParser):
    def format_help(self) -> str:
        from sg_rlhf.config.recipe_listing import algorithm_listing

        return f"{super().format_help()}\n{algorithm_listing()}"


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = _Parser(
        prog="sg-rlhf train",
        description=__doc__,
        epilog=EXAMPLES,
    )
    builtin_recipes.add_arguments(parser, required=True)
    parser.add_argument(
        "--run-dir", metavar="DIR", help="folder of the run (default: runs/<domain>_<recipe>)"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the recipe and the files that are here; print the resolved recipe and the "
        "command that trains it; train nothing",
    )
    parser.add_argument(
        "--allow-changed",
        action="append",
        default=[],
        metavar="KEY",
        help="resume although this key has changed since the run was started; repeatable",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to override")
    for option, why in removed.TRAIN_OPTIONS.items():
        parser.add_argument(option, action=Removed, const=why)
    # Overrides and options may be mixed.
    return parser.parse_intermixed_args(argv)


@dataclass(frozen=True)
class Run:
    """A recipe and where it runs.

    Attributes:
        config: the recipe with the paths of its run directory; other paths as the user gave them.
        directory: the run directory, absolute.
        loss_description: what the policy loss does with a token, for the terminal.
    """

    config: Config
    directory: Path
    loss_description: str


def load(arguments: argparse.Namespace) -> Run:
    """Read the recipe and its overrides, checking every key and value.

    Raises:
        ConfigError: one line naming the file, the key, the value and what was expected.
    """
    config = load_fitted(arguments.config, arguments.overrides)
    run_dir = run_dir_of(arguments.run_dir, arguments.config, config)
    try:
        run_dir = real_path(run_dir, "--run-dir")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    config = with_run_dir(config, run_dir)
    return Run(config, run_dir, describe_loss(config))


def check(run: Run) -> argparse.Namespace:
    """Check all that can be known before Ray starts: upstream, files, settings, machine, domains.

    Returns:
        Upstream's nested namespace with ``sg``.

    Raises:
        ConfigError, UsageError, UnusablePrompts: one line naming the key, its value and the remedy.
        UnfitMachine: the machine lacks something, one line each.
        UpstreamChanged: the overlay is not written for the installed OpenRLHF.
    """
    check_version()
    input_files.check_files(run.config)
    args = upstream_arguments(with_absolute_paths(run.config))
    # Before the platform: to torch, a GPU whose driver is too old looks like no GPU.
    for line in before_run(run.config, run.directory):
        print(f"warning: {line}")
    check_platform(args)
    check_trackers(args)
    model_revision.pin(args)
    for line in input_files.check_prompts(run.config):
        print(f"remark: {line}")
    check_prompt_count(run.config, args)
    domain_settings.check(run.config.sg.domains)
    return args


def dry_run(run: Run, arguments: argparse.Namespace) -> None:
    """Print the resolved recipe, its weighting and the command that trains it.

    The run may be meant for another machine, so a GPU or file that is missing here is a remark.
    Files that are here are checked.

    Raises:
        ConfigError: a value that cannot be, or a file that would stop the run.
        UsageError: settings that cannot work together.
        UnusablePrompts: the prompts do not fill one rollout.
    """
    config, remarks = run.config, io.StringIO()
    with contextlib.redirect_stdout(remarks):
        try:
            args = upstream_arguments(with_absolute_paths(config))
            if args.data.prompt_dataset:
                check_prompt_count(config, args)
            check_version()
            check_platform(args)
        except (UnsupportedHere, UpstreamMissing) as error:
            print(f"# not on this machine: {error}")
    # Before anything is printed: this may find a value that cannot be.
    missing, file_remarks = input_files.look(config)
    print(f"# resolved recipe, from {' <- '.join(reversed(config.sources))}")
    print(config.to_yaml())
    print("# the file that sets each key that differs from configs/base.yaml or the default")
    wrapper = textwrap.TextWrapper(
        100, initial_indent="#   ", subsequent_indent="#     ", break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip
    for line in set_by(config):
        print(wrapper.fill(line))
    print(f"# {run.loss_description}".replace("\n", "\n# "))
    recipe, overrides = builtin_recipes.words(arguments.config), redact_argv(arguments.overrides)
    print("# the command that trains it")
    print(shlex.join(["sg-rlhf", "train", *recipe, "--run-dir", str(run.directory), *overrides]))
    print("# its memory and time: " + shlex.join(["sg-rlhf", "plan", *recipe, *overrides]))
    print(remarks.getvalue(), end="")
    for line in file_remarks:
        print(f"# remark: {line}")
    for line in missing:
        print(f"# not on this machine: {line}")


def write_model_card(run_dir: Path) -> None:
    """Describe the final model; a run whose card cannot be written has trained all the same."""
    # Imported here: a dry run works without huggingface_hub.
    from sg_rlhf.publish import model_card

    try:
        model_card.write(run_dir)
    except (model_card.CardError, OSError) as error:
        print(f"warning: no model card: {single_line(error)}")


def print_summary(run_dir: Path) -> None:
    """What the run has learned, and the command that draws it."""
    # Imported here: a dry run does not read runs.
    from sg_rlhf.report import summary
    from sg_rlhf.report.runs import RunError

    try:
        print(summary.text(run_dir))
    except (RunError, OSError) as error:
        print(f"warning: no summary: {single_line(error)}")
        return
    print(as_typed(f"next: sg-rlhf report {shlex.quote(os.path.relpath(run_dir))}"))


def main(argv: list[str] | None = None, *, summarise: bool = True) -> int:
    """Train. Without ``summarise`` the caller prints how the run ended.

    Exit status 0; 2 for a wrong recipe; 1 when the run stopped; 129, 130 or 143 by a
    signal.
    """
    driver.install_signal_handlers()
    home.ensure()
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    with contextlib.ExitStack() as stack:  # ends what was started, whatever happens
        try:
            if not arguments.dry_run:
                workers = stack.enter_context(driver.fork_server_for_cpu())
            run = load(arguments)
            if arguments.dry_run:
                dry_run(run, arguments)
                return 0
            args = check(run)
            stack.enter_context(run_lock(run.directory))
            args.ckpt.load_enable = prepare_run_dir(
                run.config, run.directory, arguments.allow_changed
            )
        except REFUSALS as error:
            print(f"error: {as_typed(redact_text(str(error)))}", file=sys.stderr)
            return 2
        except graceful_stop.TerminatedNow:
            print(
                f"terminated by {graceful_stop.signal_name()} before the run began", file=sys.stderr
            )
            return graceful_stop.exit_status()
        except KeyboardInterrupt:
            print("interrupted before the run began", file=sys.stderr)
            return 130
        with best_effort_output():
            print(run.loss_description)
            print(f"run directory: {run.directory}", flush=True)
            status = driver.main(args, workers)
            if status == 0:
                write_model_card(run.directory)
                if summarise:
                    print_summary(run.directory)
            return status


if __name__ == "__main__":
    raise SystemExit(main())
