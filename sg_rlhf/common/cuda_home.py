"""Name the machine's CUDA toolkit in the environment. Needs the standard library alone."""

from __future__ import annotations

import os
from pathlib import Path

HOME = "CUDA_HOME"
#: Where a toolkit is installed that nothing names.
DEFAULT = Path("/usr/local/cuda")


def install(default: Path = DEFAULT) -> None:
    """Name the toolkit in this process, as scripts/bootstrap.sh does; before torch looks for one.

    torch takes the folder above the first nvcc on the path, which is wrong where that is a link or
    a wrapper. In every worker: nodes of a cluster differ.
    """
    if not os.environ.get(HOME) and os.access(default / "bin" / "nvcc", os.X_OK):
        os.environ[HOME] = str(default)
