"""What an unfinished build is of: the same command goes on with it, another one is refused."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from typing import Any

from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.retrieval import manifest
from sg_rlhf.retrieval.corpus import Scan, load_offsets, save_offsets
from sg_rlhf.retrieval.job import KEPT, PLAN, Build


def known_scan(job: Build) -> Scan | None:
    """The corpus as an unfinished build has read it, if its size and time stamp are those still."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        known = json.loads((job.partial / PLAN).read_text(encoding="utf-8"))["corpus"]
        status = job.corpus.stat()
        if (status.st_size, status.st_mtime_ns) == (known["bytes"], known["mtime_ns"]):
            offsets = load_offsets(job.partial / manifest.OFFSETS, known["rows"])
            return Scan(offsets, known["sha256"])
    return None


def plan(job: Build, found: Scan, request: Mapping[str, Any], what: Mapping[str, Any]) -> None:
    """Say what is built, or find that it is what an unfinished build has begun.

    Args:
        request: the manifest's entries `corpus` and `encoder`.
        what: else has to be the same.

    Raises:
        ValueError: an unfinished build of something else is there.
    """
    file = job.partial / PLAN
    encoder = {key: value for key, value in request["encoder"].items() if key != "path"}
    wanted = {"corpus_sha256": found.sha256, "encoder": encoder, **what}
    # Without a plan it is not known of what the rest is: the plan is dropped first, and a build may
    # be killed while it drops what it does not go on with.
    if job.restart or not file.exists():
        for name in KEPT:
            path = job.partial / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    if file.exists():
        before = json.loads(file.read_text(encoding="utf-8"))
        for key, value in wanted.items():
            if before.get(key) != value:
                raise ValueError(
                    f"{job.partial}: an unfinished build with {key} {before.get(key)}, "
                    f"this one has {value}; give the same arguments to go on with it, "
                    "or --restart to drop it"
                )
        if not (job.partial / manifest.OFFSETS).exists():
            save_offsets(job.partial / manifest.OFFSETS, found.offsets)
        return
    save_offsets(job.partial / manifest.OFFSETS, found.offsets)
    write_whole(file, json.dumps({**wanted, "corpus": request["corpus"]}, indent=2), sync=True)
