"""Start Ray, run :func:`.train.train`, and turn how it ends into an exit status."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sg_rlhf.common import redaction
from sg_rlhf.common.atomic_io import BestEffortStream, best_effort_output
from sg_rlhf.common.environment import as_typed
from sg_rlhf.common.redaction import redact_text
from sg_rlhf.overlay.checkpoints import paths
from sg_rlhf.overlay.cpu import platform
from sg_rlhf.overlay.fork_server import client as fork_server
from sg_rlhf.overlay.patches.version import UpstreamChanged
from sg_rlhf.overlay.reporting import graceful_stop
from sg_rlhf.ray_session import auth_token
from sg_rlhf.run_dir import GRACE_SECONDS, alerts, jsonl_log

if TYPE_CHECKING:
    from sg_rlhf.overlay.cluster.placement import Placement

#: The module of a run's ``train``. It imports OpenRLHF, which must come after the patches.
TRAIN = "sg_rlhf.overlay.driver.train"


@contextlib.contextmanager
def fork_server_for_cpu() -> Iterator[fork_server.ForkServer | None]:
    """Start the process that workers are forked from, if there is no CUDA."""
    auth_token.set_auth_token()
    if not (platform.is_cpu() and fork_server.enabled()):
        yield None
        return
    workers = fork_server.ForkServer()
    try:
        yield workers
    finally:
        workers.close()


def _train(args: argparse.Namespace, placement: Placement) -> None:
    importlib.import_module(TRAIN).train(args, placement)


def train(
    args: argparse.Namespace,
    workers: fork_server.ForkServer | None = None,
    job: Callable[..., Any] = _train,
) -> Any:
    """Train, then end the local Ray cluster and every process that it started.

    Raises RunStopped (a reward, a NaN, a failed sync), UnusablePrompts, ClusterError.
    """
    from sg_rlhf.overlay.reporting import activity
    from sg_rlhf.overlay.reporting.errors import LostProcess, reraise_run_error

    redaction.mask_namespace(args)  # upstream prints the flags, and wandb keeps them
    local = True
    run_dir = Path(args.sg.run_dir) if args.sg.run_dir else None
    if run_dir is not None:
        activity.clear(run_dir)
        activity.write_to(activity.log_file(run_dir))
    with redirect_output(args):
        from sg_rlhf.overlay.cluster import node_failure
        from sg_rlhf.overlay.driver import ray_session as session
        from sg_rlhf.overlay.fork_server import train_task
        from sg_rlhf.overlay.patches import table

        try:
            # Ray first: its processes start while this one imports. Never import in another thread
            # meanwhile: Ray forks, and Python's import lock was seen to stay locked for good.
            with activity.phase(activity.DRIVER, "starting Ray"):
                local = session.connect(args, workers)
                install_signal_handlers()  # Ray has put its own in their place
            placement = session.reserve_placement(args, local)
            with activity.phase(activity.DRIVER, "importing PyTorch, vLLM and OpenRLHF"):
                if workers is None:
                    table.install()
                    importlib.import_module(TRAIN)
                else:
                    train_task.import_module(TRAIN)
            with (
                activity.phase(activity.DRIVER, activity.STARTING_WORKERS),
                graceful_stop.GracefulStop(args.sg.run_dir, GRACE_SECONDS),
            ):
                if workers is None:
                    return job(args, placement)
                return train_task.run(job, args, placement)
        except Exception as error:
            reraise_run_error(error)
            if not local and (lost := node_failure.diagnose(error, run_dir)):
                raise LostProcess(lost) from error
            raise
        finally:
            # A second Ctrl-C or SIGTERM must not leave the cluster half down.
            ending = [signal.SIGINT, *graceful_stop.signals()]
            previous = {n: signal.signal(n, signal.SIG_IGN) for n in ending}
            session.shut_down(local, args.sg.run_dir, workers=workers)
            for number, handler in previous.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def redirect_output(args: Namespace) -> Iterator[None]:
    """Show a progress bar on the terminal; write all other output to ``logs/driver.log``."""
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
def main(
    args: argparse.Namespace,
    workers: fork_server.ForkServer | None = None,
) -> int:
    """Train with checked arguments and report how the run ended.

    Returns the exit status: 0, 2 for bad usage, 1 when the run stopped, 130 interrupted, 143
    terminated (SIGTERM), 129 for SIGHUP.
    """
    from sg_rlhf.overlay.reporting import activity
    from sg_rlhf.overlay.reporting.errors import (
        CheckpointError,
        EngineLost,
        RunStopped,
        Terminated,
        UnusablePrompts,
    )
    from sg_rlhf.ray_session.cluster import ClusterError

    install_signal_handlers()
    try:
        train(args, workers)
        if warning := _nothing_learned(args):
            print(f"warning: {warning}", file=sys.stderr)
    except (UpstreamChanged, ClusterError, UnusablePrompts) as error:
        print(f"error: {as_typed(redact_text(str(error)))}", file=sys.stderr)
        return 2
    except (Terminated, graceful_stop.TerminatedNow) as error:
        return _terminated(args, str(error))
    except RunStopped as error:
        if graceful_stop.requested() and isinstance(error, EngineLost):
            return _terminated(args, _lost_too(error))
        message = as_typed(redact_text(str(error)))
        if not isinstance(error, CheckpointError) and args.sg.run_dir:  # else there is none
            during = activity.last_status(Path(args.sg.run_dir))
            message += f"{during and f'; this was{during}'}{_resume_hint(args)}"
        print(f"stopped: {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted{_resume_hint(args)}", file=sys.stderr)
        return 130
    except Exception as error:
        from sg_rlhf.overlay.reporting import error_report
        from sg_rlhf.overlay.rollout import engine_monitor

        if graceful_stop.requested():
            return _terminated(args, _lost_too(error_report.summarize(error)))
        if not args.sg.run_dir:
            raise
        during = activity.last_status(Path(args.sg.run_dir))
        details = (
            error_report.save_traceback(error, Path(args.sg.run_dir))
            or "none: they could not be written"
        )
        line = engine_monitor.failure_message(args.sg.run_dir) or error_report.summarize(error)
        message = f"failed: {line}{during}{_resume_hint(args)}; details: {details}"
        print(redact_text(message), file=sys.stderr)
        return 1
    return 0


def _terminated(args: Namespace, when: str) -> int:
    """Say that a signal ended the run; the exit status."""
    print(
        redact_text(f"terminated by {graceful_stop.signal_name()}, {when}{_resume_hint(args)}"),
        file=sys.stderr,
    )
    return graceful_stop.exit_status()


def _lost_too(error: object) -> str:
    """When a run ended whose other processes got the signal as well, as from a service manager."""
    return f"before the rollout's end, as its other processes ended too ({as_typed(str(error))})"


def _nothing_learned(args: Namespace) -> str | None:
    """The last line of a finished run whose rollouts had no signal."""
    file = Path(args.sg.run_dir or ".") / jsonl_log.METRICS
    return alerts.nothing_learned(jsonl_log.read(file)) if file.is_file() else None


def _resume_hint(args: Namespace) -> str:
    """The checkpoint that the same command resumes from, as the end of a message."""
    if not args.sg.run_dir:
        return ""
    tags = paths.resume_candidates(Path(args.ckpt.path) / "_actor")
    if not tags:
        return "; there is no checkpoint: the same command starts from the beginning"
    return f"; the same command resumes from the last checkpoint, {tags[0]}"


def install_signal_handlers() -> None:
    """SIGINT (which a shell ignores in background jobs), SIGTERM and SIGHUP end the run."""
    for number in (signal.SIGINT, *graceful_stop.signals()):
        signal.signal(number, graceful_stop.interrupt)
