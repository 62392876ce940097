"""One rank of a test: a script of this folder, and then the end of its process group.

    python one_rank.py SCRIPT [ARGUMENTS]

Ranks wait for each other before they end. Without this the first one closes connections on which
the others' threads still listen, and those abort.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    del sys.argv[0]
    sys.path.insert(0, str(Path(__file__).parent))  # a forked interpreter does not
    runpy.run_path(sys.argv[0], run_name="__main__")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
