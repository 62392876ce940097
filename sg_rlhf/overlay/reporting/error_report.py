"""Reports an unexpected error of a run: one line for the user, all tracebacks in a file.

An error reaches the driver nested in Ray's errors, one per process on its way, each with its own
traceback. The line has the innermost cause and the process that it happened in.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import ray

from sg_rlhf.common.atomic_io import is_full_disk
from sg_rlhf.common.redaction import redact_text
from sg_rlhf.overlay.reporting.errors import LostProcess, cause_chain

#: In the run directory.
FILE = Path("logs") / "failure.log"
#: A part of the class name of a worker -> its role, as the user reads it.
ROLES = {
    "RolloutActor": "rollout engine",
    "RolloutRayActor": "rollout engine",
    "PolicyModelActor": "policy rank",
    "ReferenceModelActor": "reference rank",
    "RewardModelActor": "reward rank",
    "Controller": "controller",
}
#: Characters of the line at most.
_MAX_LENGTH = 400
#: Finds class, process id and address in the text of Ray's task errors.
_find_workers = re.compile(r"ray::([\w.]+)[^\n]*?\(pid=(\d+), ip=([\w.:]+)").findall


def summarize(error: BaseException) -> str:
    """One line with the cause of an error and the process that it happened in."""
    if isinstance(error, LostProcess):
        return str(error)
    errors = list(cause_chain(error))
    cause = errors[-1]
    if isinstance(cause, ray.exceptions.RayActorError):
        return _dead_actor(cause)
    line = _cause_line(cause)
    # Ray writes one line per process on the way, the innermost last.
    workers = [
        worker
        for e in errors
        if isinstance(e, ray.exceptions.RayTaskError)
        for worker in _find_workers(str(e))
    ]
    if workers:
        name, pid, ip = workers[-1]
        line += f" (in {role_name(name)}, process {pid} on {ip})"
    return line


def save_traceback(error: BaseException, run_dir: Path) -> Path | None:
    """Append the error with all tracebacks to ``logs/failure.log``; None where that fails."""
    file = run_dir / FILE
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as log:
            log.write(redact_text("".join(traceback.format_exception(error))) + "\n")
    except OSError:
        return None
    return file


def _cause_line(cause: BaseException) -> str:
    if is_full_disk(cause):
        file = getattr(cause, "filename", None) or "the run"
        return f"no space left on the disk of {file}; free some space"
    if isinstance(cause, ray.exceptions.OutOfMemoryError):
        return "the machine ran out of memory, and Ray ended a worker"
    lines = str(cause).strip().splitlines() or ["no message"]
    text = last_line(lines) if isinstance(cause, ray.exceptions.RayTaskError) else lines[0]
    name = "" if isinstance(cause, ray.exceptions.RayTaskError) else f"{type(cause).__name__}: "
    return f"{name}{text.strip()}"[:_MAX_LENGTH]


def last_line(lines: list[str]) -> str:
    """The error of a traceback, or of Ray's text of one, without Pydantic's address of a page."""
    useful = [n for n in lines if not n.strip().startswith("For further information visit")]
    return (useful or lines)[-1].strip()


def _dead_actor(error: ray.exceptions.RayActorError) -> str:
    text = str(error)
    fields = dict(re.findall(r"^\t(class_name|pid|ip): (.+)$", text, re.MULTILINE))
    role = role_name(fields.get("class_name", "a worker"))
    process = ""
    if "pid" in fields:
        process = f"process {fields['pid']} on {fields.get('ip', 'its machine')}"
    if error.actor_init_failed:
        line = last_line(text.strip().splitlines())
        match = re.search(r"pid=(\d+), ip=([\w.:]+), .*?repr=<[\w.]*?(\w+) object", text)
        if match:
            role, process = role_name(match[3]), f"process {match[1]} on {match[2]}"
        return f"{role}{f' ({process})' if process else ''} did not start: {line}"[:_MAX_LENGTH]
    # The facts come first. Ray's advice on common causes mentions nodes and memory in any case.
    known = text.split("common causes")[0]
    how = "out of memory" if "OOM" in known else "killed, or crashed"
    if "node" in known and "is dead" in known:
        how = "with its machine"
    return f"{role}{f' ({process})' if process else ''} died ({how})"


def role_name(name: str) -> str:
    """The role of a worker, as the user reads it, by the name of its class."""
    return next((role for part, role in ROLES.items() if part in name), name)
