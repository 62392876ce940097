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
from pathlib import Path

from sg_rlhf.common import home
from sg_rlhf.common.argument_types import OneLineParser
from sg_rlhf.common.atomic_io import best_effort_output
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
from sg_rlhf.doctor.recipe import UnfitMachine, before_run
from sg_rlhf.overlay.driver import run as driver
from sg_rlhf.overlay.driver.arguments import (
    UnsupportedHere,
    UsageError,
    check_platform,
    check_prompt_count,
    fit_to_machine,
    upstream_arguments,
)
from sg_rlhf.overlay.driver.prepare import prepare_run_dir, run_lock
from sg_rlhf.overlay.patches.version import UpstreamChanged, UpstreamMissing, check_version
from sg_rlhf.overlay.reporting import graceful_stop
from sg_rlhf.overlay.reporting.errors import UnusablePrompts
from sg_rlhf.plan.load import load_run
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
    for option, why in removed.TRAIN_OPTIONS.items():
        parser.add_argument(option, action=Removed, const=why)
    return parser.parse_intermixed_args(argv)


def check(config: Config) -> argparse.Namespace:
    """Check all that can be known before Ray starts: upstream, files, settings, machine, domains.

    Returns:
        Upstream's nested namespace with ``sg``.

    Raises:
        ConfigError, UsageError, UnusablePrompts: one line naming the key, its value and the remedy.
        UnfitMachine: the machine lacks something, one line each.
        UpstreamChanged: the overlay is not written for the installed OpenRLHF.
    """
    check_version()
    input_files.check_files(config)
    args = upstream_arguments(config)
    # Before the platform: to torch, a GPU whose driver is too old looks like no GPU.
    for line in before_run(config):
        print(f"warning: {line}")
    fit_to_machine(args)
    for line in input_files.check_prompts(config):
        print(f"remark: {line}")
    check_prompt_count(config, args)
    domain_settings.check(config.sg.domains)
    return args


def dry_run(config: Config, arguments: argparse.Namespace) -> None:
    """Print the resolved recipe, its weighting and the command that trains it.

    The run may be meant for another machine, so a GPU or file that is missing here is a remark.
    Files that are here are checked.

    Raises:
        ConfigError: a value that cannot be, or a file that would stop the run.
        UsageError: settings that cannot work together.
        UnusablePrompts: the prompts do not fill one rollout.
    """
    loss, remarks = describe_loss(config), io.StringIO()
    with contextlib.redirect_stdout(remarks):
        try:
            args = upstream_arguments(config)
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
    print(f"# {loss}".replace("\n", "\n# "))
    recipe, overrides = builtin_recipes.words(arguments.config), redact_argv(arguments.overrides)
    print("# the command that trains it")
    print(
        shlex.join(["sg-rlhf", "train", *recipe, "--run-dir", str(config.sg.run_dir), *overrides])
    )
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
            config = load_run(arguments.config, arguments.overrides, arguments.run_dir)
            if arguments.dry_run:
                dry_run(config, arguments)
                return 0
            loss = describe_loss(config)
            args = check(config)
            stack.enter_context(run_lock(config))
            args.ckpt.load_enable = prepare_run_dir(config, arguments.allow_changed)
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
            print(loss)
            print(f"run directory: {config.sg.run_dir}", flush=True)
            status = driver.main(args, workers)
            if status == 0:
                write_model_card(Path(args.sg.run_dir))
                if summarise:
                    print_summary(Path(args.sg.run_dir))
            return status


if __name__ == "__main__":
    raise SystemExit(main())
