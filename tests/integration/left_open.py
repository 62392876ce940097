"""One rank of a test: leaves its process group as it is, and says at its end what became of it."""

from __future__ import annotations

import atexit

import torch

if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    atexit.register(lambda: print(rank, torch.distributed.is_initialized()))
