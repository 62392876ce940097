"""What a checkpoint's manifest costs: SHA-256 of files that are in memory still, on one core.

    python bench/checkpoint_hash.py --out bench/results/checkpoint_hash.json

Processor time, so that other work on the machine does not count; and sha256 of memory beside it,
which reads no file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from arguments import as_json
from machine import provenance

from sg_rlhf.overlay.checkpoints import manifest

SIZE = 2**29


def speed(work: Callable[[], object], repeats: int) -> float:
    """Median GB a second of processor time."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return round(SIZE / statistics.median(times) / 1e9, 2)


def main() -> None:
    """Time both and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=7, help="timed passes of each [7]")
    arguments = parser.parse_args()
    data = bytes(SIZE)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(data)
        names = manifest.names(folder)
        result = {
            **provenance("checkpoint_hash.py"),
            "bytes": SIZE,
            "file_gb_per_s": speed(lambda: manifest.hash_files(folder, names), arguments.repeats),
            "memory_gb_per_s": speed(lambda: hashlib.sha256(data), arguments.repeats),
        }
    arguments.out.write_text(as_json(result))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
