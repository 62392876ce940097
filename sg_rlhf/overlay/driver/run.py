"""Upstream's command with the overlay registered: ``python -m sg_rlhf.overlay.driver.run
--actor...``.

Takes every flag of ``python -m openrlhf.cli.train_ppo_ray``, the added choices of
``--actor.policy_loss_type`` and ``--algo.kl.estimator``, and ``--sg.*``.
``python -m sg_rlhf.train`` makes this command line out of a recipe.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sg_rlhf.common import redaction
from sg_rlhf.common.atomic_io import BestEffortStream, best_effort_output
from sg_rlhf.common.environment import as_typed
from sg_rlhf.common.redaction import redact_text
from sg_rlhf.config import ConfigError, sg_keys
from sg_rlhf.config.recipe import sg_settings_of_flags
from sg_rlhf.config.sg_settings import BESIDE_UPSTREAMS
from sg_rlhf.config.upstream_flags import (
    KL_ESTIMATORS,
    UpstreamChanged,
    build_parser,
    validate_args,
)
from sg_rlhf.overlay.checkpoints import paths
from sg_rlhf.overlay.cpu import platform
from sg_rlhf.overlay.fork_server import client as fork_server
from sg_rlhf.overlay.model import packed_attention
from sg_rlhf.overlay.patches import flash_attn_shim
from sg_rlhf.overlay.patches.version import check_version
from sg_rlhf.overlay.reporting import graceful_stop
from sg_rlhf.overlay.settings import cuda_toolkit, layout_checks, optional_packages, worker_settings
from sg_rlhf.ray_session import auth_token

#: Signals that end a run.
ENDING = (signal.SIGINT, signal.SIGTERM)


class UsageError(ValueError):
    """The flags cannot work together; the message is one line for the user."""


class UnsupportedHere(UsageError):
    """The flags could work, but not here."""


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse and check a command line; the result is upstream's nested namespace plus ``sg``.

    Raises:
        UsageError: upstream's own check or one of ours failed.
        SystemExit: argparse's usage error (status 2).
    """
    parser = build_parser()
    # Upstream's own is flash-attn, which the locks do not have.
    parser.set_defaults(**{"ds.attn_implementation": packed_attention.VARLEN})
    for key, about in sg_keys().items():
        parser.add_argument(f"--{key}", *_other_names(key), dest=key, default=None, help=about)
    flat = vars(parser.parse_args(argv))
    given = {key: flat.pop(key) for key in list(flat) if key.startswith("sg.")}
    try:
        settings = sg_settings_of_flags(given, str(flat["actor.policy_loss_type"]))
    except ConfigError as error:
        raise UsageError(str(error)) from None
    try:
        layout_checks.check_flags(flat)
    except ValueError as error:
        raise UsageError(str(error)) from None
    remarks = io.StringIO()
    try:
        with contextlib.redirect_stdout(remarks):
            args = validate_args(argparse.Namespace(**flat))
    except AssertionError as error:
        raise UsageError(f"upstream refuses these flags: {error}") from None
    except ModuleNotFoundError as error:  # the only package that it asks for already here
        raise UnsupportedHere(
            "; ".join(optional_packages.missing(flat.__getitem__)) or str(error)
        ) from None
    except Exception as error:  # its checks take for granted that many flags are set
        raise UsageError(
            f"upstream cannot check these flags, one of which is missing or null: "
            f"{type(error).__name__}: {error}"
        ) from None
    for line in remarks.getvalue().splitlines():
        # Upstream recommends k2 or k3 as a loss, and wk3 is k3 with weights; and flash-attn for
        # packed samples, which have an attention of their own.
        known = "as a loss" in line and args.algo.kl.estimator in KL_ESTIMATORS
        if not known and "with flash_attention" not in line:
            print(line)
    args.ds.attn_implementation = packed_attention.resolve_attention(
        str(flat["ds.attn_implementation"]), args.ds.packing_samples, args.ds.ring_attn_size
    )
    args.sg = argparse.Namespace(**settings.model_dump())
    _check(args)
    if args.sg.fused_logprobs and not worker_settings.fused_log_probs_fit(args):
        print("actor.fused_logprobs: off with ds.tensor_parallel_size > 1 or ds.deepcompile")
    return args


def _other_names(key: str) -> list[str]:
    return [f"--{name}" for name, own in BESIDE_UPSTREAMS.items() if own == key]


def _check(args: Any) -> None:
    from sg_rlhf.overlay.learner import nonfinite, policy_loss

    if args.sg.advantage_std == "population" and not (
        args.algo.advantage.estimator == "group_norm" and args.algo.kl.use_loss
    ):
        raise UsageError(
            "sg.advantage_std=population needs algo.advantage.estimator=group_norm and "
            "algo.kl.use_loss=true (the KL inside the reward would be rescaled too)"
        )
    if args.vllm.sync_with_ray and args.sg.weight_sync == "buckets":
        raise UsageError(
            "vllm.sync_with_ray=true: not with sg.weight_sync=buckets; set it to false, or "
            "sg.weight_sync=upstream"
        )
    if args.rollout.top_p < 1 and args.sg.truncated_sampling == "refuse":
        raise UsageError(
            f"rollout.top_p={args.rollout.top_p:g}: the engine would sample from a part of the "
            "policy, and the trainer's log-probs are those of all of it; set it to 1, or "
            "sg.truncated_sampling=keep to train on such samples"
        )
    if args.ds.lora.rank > 0:
        _check_lora(args)
    try:
        layout_checks.check(args)
        policy_loss.check(args)
        nonfinite.check(args)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _check_lora(args: Any) -> None:
    """Adapters reach the engine merged, which only the buckets do, into weights of numbers."""
    from sg_rlhf.overlay.weight_sync import sender

    for found, wrong, expected in (
        (args.ds.load_in_4bit, "ds.load_in_4bit=true", "set it to false"),
        (
            not sender.uses_buckets(args),
            f"sg.weight_sync={args.sg.weight_sync}, ds.tensor_parallel_size="
            f"{args.ds.tensor_parallel_size}",
            "use sg.weight_sync=buckets and ds.tensor_parallel_size=1",
        ),
    ):
        if found:
            raise UsageError(
                f"ds.lora.rank={args.ds.lora.rank}: not with {wrong}: the engine takes adapters "
                f"merged into their layers; {expected}"
            )


def check_platform(args: Any) -> None:
    """Refuse settings that cannot work on this machine. Without CUDA packed samples get the one
    attention that can, whatever is asked for.

    Raises:
        NotOnThisMachine: naming each key and what to use instead.
    """

    def value(key: str) -> Any:
        return functools.reduce(getattr, key.split("."), args)

    if not platform.active():
        problems = [*optional_packages.missing(value), *cuda_toolkit.unsupported_settings(value)]
        if "flash_attention_2" in args.ds.attn_implementation and flash_attn_shim.absent():
            problems.append(
                f"ds.attn_implementation={args.ds.attn_implementation}: flash-attn is not "
                f"installed; use {packed_attention.VARLEN}, torch's own kernel, or install "
                f"{flash_attn_shim.PINNED} (docs/operations.md)"
            )
        if args.ds.param_dtype == "fp32":
            problems.append("ds.param_dtype=fp32: with CUDA use bf16 or fp16")
        if problems:
            raise UnsupportedHere("; ".join(problems))
        return
    problems = platform.unsupported_settings(value)
    if args.sg.batch_invariant:
        problems.append("sg.batch_invariant=true: vLLM has such kernels for CUDA; use false")
    if problems:
        raise UnsupportedHere(
            "; ".join(problems) + " (no CUDA here; SG_PLATFORM=cuda if the cluster's nodes have it)"
        )
    problems = optional_packages.missing(value)
    if problems:
        raise UnsupportedHere("; ".join(problems))
    if args.ds.packing_samples:
        args.ds.attn_implementation = packed_attention.VARLEN


@contextlib.contextmanager
def fork_server_for_cpu() -> Iterator[fork_server.ForkServer | None]:
    """What the workers are forked from where there is no CUDA; it imports from now on."""
    auth_token.set_auth_token()
    if not (platform.active() and fork_server.enabled()):
        yield None
        return
    workers = fork_server.ForkServer()
    try:
        yield workers
    finally:
        workers.close()


def run(args: argparse.Namespace, workers: fork_server.ForkServer | None = None) -> None:
    """Train. Ends its own Ray cluster and every process it started, whatever happens.

    Args:
        args: upstream's namespace with ``sg``.
        workers: see :func:`fork_server_for_cpu`.

    Raises:
        RunStopped: the run stopped on purpose (a reward, a NaN, a failed sync).
        UnusablePrompts: the data set does not fill one rollout, or suits another model.
        ClusterError: the cluster is too small.
    """
    from sg_rlhf.overlay.reporting import activity
    from sg_rlhf.overlay.reporting.errors import LostProcess, reraise_run_error

    redaction.mask_namespace(args)  # upstream prints the flags, and wandb keeps them
    local = True
    if args.sg.run_dir:
        run_dir = Path(args.sg.run_dir)
        activity.clear(run_dir)
        activity.write_to(activity.log_file(run_dir))
    with _redirect_output(args):
        from sg_rlhf.overlay.cluster import node_failure
        from sg_rlhf.overlay.driver import ray_session as session
        from sg_rlhf.overlay.fork_server import train_task
        from sg_rlhf.overlay.patches import table

        try:
            # Ray first: its processes start while this one imports. Never in a thread beside it:
            # Ray forks, and Python's import lock was seen to stay locked for good.
            with activity.phase(activity.DRIVER, "starting Ray"):
                local = session.connect(args, workers)
                install_signal_handlers()  # Ray has put its own in their place
            if not local:
                session.reserve_placement(args)
            with activity.phase(activity.DRIVER, "importing PyTorch, vLLM and OpenRLHF"):
                train = table.install_driver().train if workers is None else train_task.train()
            with (
                activity.phase(activity.DRIVER, activity.WORKERS),
                graceful_stop.GracefulStop(args.sg.run_dir, args.sg.grace_seconds),
            ):
                train(args)
        except Exception as error:
            reraise_run_error(error)
            if not local and (lost := node_failure.diagnose(error, _path(args.sg.run_dir))):
                raise LostProcess(lost) from error
            raise
        finally:
            # A second Ctrl-C or SIGTERM must not leave the cluster half down.
            previous = {n: signal.signal(n, signal.SIG_IGN) for n in ENDING}
            session.shut_down(local, args.sg.run_dir, workers=workers)
            for number, handler in previous.items():
                signal.signal(number, handler)


def _path(name: str | None) -> Path | None:
    return Path(name) if name else None


@contextlib.contextmanager
def _redirect_output(args: Any) -> Iterator[None]:
    """A progress bar on the terminal, and whatever else is printed in ``logs/driver.log``.

    Compilers and Ray's own binaries write to the file descriptors, so those are redirected.
    """
    from sg_rlhf.overlay.reporting.terminal import LOGS, Progress

    if args.sg.verbose or not args.sg.run_dir:
        yield
        return
    logs = Path(args.sg.run_dir) / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    try:
        with (
            (logs / "driver.log").open("a") as log,
            Progress(Path(args.sg.run_dir), BestEffortStream.over(kept[0])),
            contextlib.redirect_stdout(BestEffortStream.over(1)),
            contextlib.redirect_stderr(BestEffortStream.over(2)),
        ):
            for descriptor in (1, 2):
                os.dup2(log.fileno(), descriptor)
            yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, original in zip((1, 2), kept, strict=True):
            os.dup2(original, descriptor)
            os.close(original)


@best_effort_output()
def execute(args: argparse.Namespace, workers: fork_server.ForkServer | None = None) -> int:
    """Run what has been checked, and report.

    Returns:
        The exit status: 0, 2 for bad usage, 1 when the run stopped, 130 interrupted, 143
        terminated (SIGTERM).
    """
    from sg_rlhf.overlay.reporting import activity
    from sg_rlhf.overlay.reporting.errors import (
        CheckpointError,
        RunStopped,
        Terminated,
        UnusablePrompts,
    )
    from sg_rlhf.ray_session.cluster import ClusterError

    install_signal_handlers()
    try:
        run(args, workers)
    except (UpstreamChanged, ClusterError, UnusablePrompts) as error:
        print(f"error: {as_typed(redact_text(str(error)))}", file=sys.stderr)
        return 2
    except (Terminated, graceful_stop.TerminatedNow) as error:
        print(f"terminated by SIGTERM, {error}{_resume_hint(args)}", file=sys.stderr)
        return 143
    except RunStopped as error:
        said = as_typed(redact_text(str(error)))
        if not isinstance(error, CheckpointError) and args.sg.run_dir:  # else there is none
            during = activity.last_status(Path(args.sg.run_dir))
            said += f"{during and f'; this was{during}'}{_resume_hint(args)}"
        print(f"stopped: {said}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted{_resume_hint(args)}", file=sys.stderr)
        return 130
    except Exception as error:
        from sg_rlhf.overlay.reporting import error_report
        from sg_rlhf.overlay.rollout import engine_health

        if not args.sg.run_dir:
            raise
        during = activity.last_status(Path(args.sg.run_dir))
        details = (
            error_report.save_traceback(error, Path(args.sg.run_dir))
            or "none: they could not be written"
        )
        line = engine_health.failure_message(args.sg.run_dir) or error_report.summarize(error)
        said = redact_text(f"failed: {line}{during}{_resume_hint(args)}; details: {details}")
        print(said, file=sys.stderr)
        return 1
    return 0


def _resume_hint(args: Any) -> str:
    """What the same command does next, for the end of a line."""
    if not args.sg.run_dir:
        return ""
    found = paths.resume_candidates(Path(args.ckpt.path) / "_actor")
    if not found:
        return "; there is no checkpoint: the same command begins again"
    return f"; the same command resumes from the last checkpoint, {found[0]}"


def main(argv: list[str] | None = None) -> int:
    """The command: parse, then :func:`execute`."""
    try:
        check_version()
        args = parse(sys.argv[1:] if argv is None else argv)
        check_platform(args)
    except (UsageError, UpstreamChanged) as error:
        print(f"error: {as_typed(redact_text(str(error)))}", file=sys.stderr)
        return 2
    with fork_server_for_cpu() as workers:
        return execute(args, workers)


def install_signal_handlers() -> None:
    """SIGINT and SIGTERM end the run, from now on.

    A shell starts background jobs with SIGINT ignored; whoever sends it means it.
    """
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, graceful_stop.interrupt)


def _interrupt(_signum: int, _frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
