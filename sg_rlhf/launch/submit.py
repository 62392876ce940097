"""Train on a Ray cluster: upload this checkout, submit the job and print its output.

Takes the options of ``sg-rlhf train`` and ends with the run's exit status. The cluster's machines
need the locked packages. The same command again resumes the run.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import math
import os
import shlex
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sg_rlhf.common.argument_types import OneLineParser, progress_bar
from sg_rlhf.common.environment import network_variables, script
from sg_rlhf.common.text import single_line
from sg_rlhf.config import Config, ConfigError, builtin_recipes, run_paths
from sg_rlhf.config.checks import input_files
from sg_rlhf.plan.of_recipe import load_fitted
from sg_rlhf.run_dir import GRACE_SECONDS

#: Never uploaded, as well as what .gitignore and .rayignore name; Ray's own default.
EXCLUDED = [".git", ".venv", "venv", "__pycache__"]
#: A job with more than this is refused: it is data, which belongs on a disk that all machines see.
MAX_FILES, MAX_MIB = 20_000, 500
#: What the run finds in its environment, if it is set here; and NCCL's and gloo's variables.
HANDED_ON = ("SG_PLATFORM", "WANDB_MODE", "HF_HUB_OFFLINE")
#: Ray kills a job that it stops after so long; beyond the time that the run has to save.
BESIDE_GRACE_SECONDS = 60
#: Exit status of a job that was stopped: a shell's for SIGTERM, as the run's own.
STOPPED = 143
#: How long a head that does not answer is asked again.
HEAD_SECONDS = 60.0
LOOK_SECONDS = 1.0
#: Between two questions whether the head is there.
PING_SECONDS = 10.0


class SubmitError(ValueError):
    """The job cannot be submitted; the message is one line for the user."""


class ClusterLost(RuntimeError):
    """The cluster does not answer any more; the message is one line for the user."""


@dataclass(frozen=True)
class Package:
    """The files to upload.

    Attributes:
        content: a folder with what is uploaded, and nothing else.
        names: files in it, by their paths.
        size: packed, bytes.
        folder: what was packed.
    """

    content: Path
    names: frozenset[str]
    size: int
    folder: Path

    def contains(self, path: Path) -> bool:
        """Whether a file, or a file below a folder, is uploaded."""
        found = os.path.relpath(path.absolute(), self.folder.absolute())
        return any(name == found or name.startswith(f"{found}/") for name in self.names)


def pack(folder: Path, into: Path) -> Package:
    """A package of a folder, without what .gitignore and .rayignore name.

    Raises:
        SubmitError: the folder is too large.
    """
    from ray._private.runtime_env.packaging import create_package

    logging.getLogger("ray").setLevel(logging.WARNING)  # it names every .gitignore, often
    _check_size(folder)
    file, content = into / "packed.zip", into / "content"
    create_package(str(folder), file, include_gitignore=True, excludes=EXCLUDED)
    # Ray's client takes folders alone, and says of none how large it is.
    with zipfile.ZipFile(file) as packed:
        names = frozenset(name for name in packed.namelist() if not name.endswith("/"))
        packed.extractall(content)
    return Package(content, names, file.stat().st_size, folder)


def _check_size(folder: Path) -> None:
    """Refuse a folder above the limits as soon as they are reached, naming where its files are."""
    from ray._private.runtime_env import packaging

    files: collections.Counter[str] = collections.Counter()
    sizes: collections.Counter[str] = collections.Counter()

    def count(path: Path) -> None:
        if not path.is_file():
            return
        top = "/".join(path.relative_to(folder).parent.parts[:2]) or "."
        files[top] += 1
        sizes[top] += path.stat().st_size
        bar.update()
        if (many := files.total() > MAX_FILES) or sizes.total() > MAX_MIB * 2**20:
            largest = ", ".join(name for name, _ in (files if many else sizes).most_common(3))
            raise SubmitError(
                f"{folder}: more than {f'{MAX_FILES} files' if many else f'{MAX_MIB} MiB'} to "
                f"upload, most of them in {largest}: move data out of the folder, or name it in "
                ".rayignore"
            )

    quiet = logging.getLogger(__name__)
    quiet.disabled = True  # Ray logs the refusal as an error of its own
    with progress_bar("looking for files to upload", "files") as bar:
        excludes = [packaging._get_excludes(folder, EXCLUDED)]
        packaging._dir_travel(folder, excludes, count, include_gitignore=True, logger=quiet)


def input_paths(config: Config) -> dict[str, str]:
    """Key -> the files it names, without modules and addresses."""
    found = {key: str(config.value(key) or "") for key in input_files.READ_FROM}
    found |= {f"sg.eval_sets, {one.name}": one.dataset for one in config.sg.eval_sets}
    return {k: v for k, v in found.items() if v and not v.startswith(("module:", "http"))}


def missing_from_package(config: Config, package: Package) -> tuple[dict[str, str], list[str]]:
    """Input files that are here and are not uploaded.

    Returns:
        Overrides with absolute paths; a line for each, for the user.

    Raises:
        SubmitError: a held-out set of ``sg.eval_sets`` is such a file, by a relative path.
    """
    overrides, lines = {}, []
    for key, names in input_paths(config).items():
        parts = [name.strip() for name in names.split(",")]
        away = [p for p in parts if _is_here(p) and not package.contains(Path(p.partition("@")[0]))]
        if not away:
            continue
        if any(not os.path.isabs(name) for name in away):
            if key.startswith("sg."):
                raise SubmitError(
                    f"{key}: {', '.join(away)}: not uploaded, as .gitignore names it; give its "
                    "absolute path, on a folder that every machine of the cluster sees"
                )
            overrides[key] = ",".join(os.path.abspath(p) if p in away else p for p in parts)
        lines.append(
            f"{key}: not uploaded; every machine of the cluster has to see "
            f"{', '.join(map(os.path.abspath, away))}"
        )
    return overrides, lines


def _is_here(name: str) -> bool:
    return os.path.exists(name.partition("@")[0])


def command(
    configs: Sequence[str],
    run_dir: Path,
    allowed: Sequence[str],
    overrides: Sequence[str],
    python: str,
) -> str:
    """The job's command, for a shell, which it replaces: signals and the status are the run's."""
    words = [python, "-m", "sg_rlhf.train", *builtin_recipes.words(configs)]
    words += ["--run-dir", str(run_dir)]
    for key in allowed:
        words += ["--allow-changed", key]
    return f"exec {shlex.join([*words, *overrides])}"


def runtime_env(package: Package) -> dict[str, Any]:
    """Ray's runtime environment of the job."""
    wait = math.ceil(GRACE_SECONDS) + BESIDE_GRACE_SECONDS
    variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(wait), "PYTHONUNBUFFERED": "1"}
    variables |= {name: os.environ[name] for name in HANDED_ON if name in os.environ}
    variables |= network_variables()
    return {"working_dir": str(package.content), "env_vars": variables}


def exit_status(status: str, code: int | None) -> int:
    """The run's exit status, by what Ray says of its job.

    Args:
        status: of Ray's ``JobStatus``.
        code: of the job's command, where Ray knows it; negative for a signal.
    """
    if status == "SUCCEEDED":
        return 0
    if status == "STOPPED":
        return STOPPED
    if code is None:
        return 1
    return 128 - code if code < 0 else code


class Output:
    """A job's output, printed as it comes; each part is sent once, whatever the run's length.

    Args:
        client: of Ray's job submission.
        job: its id.
    """

    def __init__(self, client: Any, job: str) -> None:
        self._client, self._job = client, job
        self._shown = 0

    async def print(self) -> None:
        """Print what was not printed yet, until the output ends or the connection does.

        Raises:
            Exception: the head does not answer.
        """
        reading = asyncio.ensure_future(self._read())
        while not (await asyncio.wait({reading}, timeout=PING_SECONDS))[0]:
            # A head that is gone may leave the connection open.
            await asyncio.to_thread(self._client.get_job_info, self._job)
        await reading

    async def _read(self) -> None:
        skipped = self._shown  # a new connection begins with the first line again
        async for part in self._client.tail_job_logs(self._job):
            new = part[skipped:]
            skipped -= len(part) - len(new)
            self._shown += len(new)
            print(new, end="", flush=True)


def stream_logs(client: Any, job: str) -> int:
    """Print a job's output until it ends; its exit status.

    Raises:
        ClusterLost: the cluster does not answer any more.
    """
    output = Output(client, job)
    silent_since: float | None = None
    while True:
        try:
            asyncio.run(output.print())
            info = client.get_job_info(job)
            silent_since = None
        except Exception as error:  # the client's own, bare ones
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > HEAD_SECONDS:
                raise ClusterLost(
                    f"the cluster's head has not answered for {HEAD_SECONDS:g} s: "
                    f"{single_line(error)}; the same command resumes the run on a new cluster"
                ) from None
            time.sleep(LOOK_SECONDS)
            continue
        if info.status.is_terminal():
            status = exit_status(info.status.value, info.driver_exit_code)
            if info.driver_exit_code is None and info.status.value == "FAILED":
                print(f"the job failed: {' '.join(str(info.message).split())}", file=sys.stderr)
            print(f"job {job}: {info.status.value}, exit status {status}", flush=True)
            return status
        time.sleep(LOOK_SECONDS)


def parse(argv: Sequence[str] | None) -> Any:
    """Parse the command line."""
    parser = OneLineParser(prog="python -m sg_rlhf.launch.submit", description=__doc__)
    builtin_recipes.add_arguments(parser, required=True)
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        help="folder that every machine of the cluster sees (default: runs/<domain>_<recipe> here)",
    )
    parser.add_argument("--allow-changed", action="append", default=[], metavar="KEY")
    parser.add_argument(
        "--address",
        default=os.environ.get("RAY_API_SERVER_ADDRESS"),
        metavar="http://HEAD:8265",
        help="address of the cluster's dashboard (default: RAY_API_SERVER_ADDRESS)",
    )
    parser.add_argument(
        "--python",
        default="python",
        metavar="COMMAND",
        help="Python with the locked packages on the cluster's machines (default: python)",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args(argv)
    if not arguments.address:
        parser.error(
            "--address: not given, and RAY_API_SERVER_ADDRESS is not set; the dashboard of the "
            "cluster's head, such as http://HEAD:8265"
        )
    return arguments


def submit(arguments: Any) -> int:
    """Pack, upload, follow.

    Raises:
        ConfigError, SubmitError: one line for the user.
    """
    config = load_fitted(arguments.config, arguments.overrides)
    run_dir = run_paths.run_dir_of(arguments.run_dir, arguments.config, config)
    run_dir = Path(os.path.abspath(run_dir))
    with tempfile.TemporaryDirectory() as folder:
        package = pack(Path.cwd(), Path(folder))
        files = [part for part in arguments.config if Path(part).is_file()]
        absent = [file for file in files if not package.contains(Path(file))]
        if absent:
            raise SubmitError(
                f"--config {absent[0]}: not uploaded; it has to lie in {package.folder}, and "
                ".gitignore must not name it"
            )
        configs = [os.path.relpath(p) if p in files else p for p in arguments.config]
        overrides, lines = missing_from_package(config, package)
        client = _client(arguments.address)
        print(
            f"uploading {package.folder}: {len(package.names)} files, "
            f"{package.size / 2**20:.1f} MiB packed, without what .gitignore and .rayignore name"
        )
        print(*lines, sep="\n", end="\n" if lines else "")
        print(f"run directory: {run_dir}, which every machine of the cluster has to see")
        try:
            job = client.submit_job(
                entrypoint=command(
                    configs, run_dir, arguments.allow_changed,
                    [*arguments.overrides, *(f"{k}={v}" for k, v in overrides.items())],
                    arguments.python,
                ),
                runtime_env=runtime_env(package),
            )  # fmt: skip
        except Exception as error:  # the client's own, bare ones
            raise SubmitError(f"{arguments.address}: {single_line(error)}") from None
    at, ray = f"--address {arguments.address}", script("ray")
    print(f"job {job}; to stop it after a checkpoint: {ray} job stop {at} {job}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return stream_logs(client, job)
    except KeyboardInterrupt:
        print(
            f"\nthe job goes on; {ray} job logs --follow {at} {job} follows it, "
            f"{ray} job stop {at} {job} ends it after a checkpoint",
            file=sys.stderr,
        )
        return 130


def _client(address: str) -> Any:
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except Exception as error:  # plain ones, and asyncio's
        raise SubmitError(
            f"--address {address}: no Ray dashboard answers there: {single_line(error)}"
        ) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: the run's; 2 for wrong usage, 1 where the cluster is lost, 130 by Ctrl-C."""
    try:
        return submit(parse(argv))
    except (ConfigError, SubmitError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ClusterLost as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
