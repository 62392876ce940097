"""What went wrong in a run that did not stop on purpose, as one line for its user.

An error reaches the driver in a nest of Ray's, one for every process on its way, each with a
traceback of its own. The whole of it goes to a file; the terminal gets the cause and where it was.
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
#: Classes of the workers, by a part of their name, and what they are to a user.
ROLES = {
    "RolloutActor": "rollout engine",
    "RolloutRayActor": "rollout engine",
    "PolicyModelActor": "policy rank",
    "ReferenceModelActor": "reference rank",
    "RewardModelActor": "reward rank",
    "CriticModelActor": "critic rank",
    "PPOTrainer": "controller",
}
_LONGEST = 400
_WHERE = re.compile(r"ray::([\w.]+)[^\n]*?\(pid=(\d+), ip=([\w.:]+)").findall


def summarize(error: BaseException) -> str:
    """The cause of an error, in one line, and the process that it happened in."""
    if isinstance(error, LostProcess):
        return str(error)
    errors = list(cause_chain(error))
    cause = errors[-1]
    if isinstance(cause, ray.exceptions.RayActorError):
        return _dead_actor(cause)
    line = _cause_line(cause)
    # Ray writes a line for every process on the way, the innermost last.
    where = [
        w for e in errors if isinstance(e, ray.exceptions.RayTaskError) for w in _WHERE(str(e))
    ]
    if where:
        name, pid, ip = where[-1]
        line += f" (in {role_name(name)}, process {pid} on {ip})"
    return line


def save_traceback(error: BaseException, run_dir: Path) -> Path | None:
    """Add the error with all its tracebacks to the run's file; None where it cannot be written."""
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
        named = getattr(cause, "filename", None) or "the run"
        return f"no space left on the disk of {named}; make room"
    if isinstance(cause, ray.exceptions.OutOfMemoryError):
        return "the machine ran out of memory, and Ray ended a worker"
    lines = str(cause).strip().splitlines() or ["no message"]
    # Ray's own text of a worker's error ends with that error, as a traceback does.
    text = lines[-1] if isinstance(cause, ray.exceptions.RayTaskError) else lines[0]
    name = "" if isinstance(cause, ray.exceptions.RayTaskError) else f"{type(cause).__name__}: "
    return f"{name}{text.strip()}"[:_LONGEST]


def _dead_actor(error: ray.exceptions.RayActorError) -> str:
    text = str(error)
    found = dict(re.findall(r"^\t(class_name|pid|ip): (.+)$", text, re.MULTILINE))
    who = role_name(found.get("class_name", "a worker"))
    where = f"process {found['pid']} on {found.get('ip', 'its machine')}" if "pid" in found else ""
    if error.actor_init_failed:
        said = text.strip().splitlines()[-1].strip()
        named = re.search(r"pid=(\d+), ip=([\w.:]+), .*?repr=<[\w.]*?(\w+) object", text)
        if named:
            who, where = role_name(named[3]), f"process {named[1]} on {named[2]}"
        return f"{who}{f' ({where})' if where else ''} did not start: {said}"[:_LONGEST]
    # Ray's advice on common causes, after what it knows, speaks of nodes and memory in any case.
    known = text.split("common causes")[0]
    how = "out of memory" if "OOM" in known else "killed, or crashed"
    if "node" in known and "is dead" in known:
        how = "with its machine"
    return f"{who}{f' ({where})' if where else ''} died ({how})"


def role_name(name: str) -> str:
    """What a worker's class is to a user."""
    return next((role for part, role in ROLES.items() if part in name), name)
