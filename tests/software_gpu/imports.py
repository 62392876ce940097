"""Case imports: the overlay with the CUDA builds of what it builds on."""

from __future__ import annotations

import importlib
import pkgutil

from tests.gpu import training_run
from tests.gpu.result import Job, Record


def run(record: Record, job: Job) -> None:
    """Install the overlay, then import all of it and all that it replaces."""
    training_run.environment(job)
    from sg_rlhf.overlay.patches import table

    table.install()
    module = importlib.import_module("sg_rlhf.overlay.driver.train")
    record.check("the training module imports", bool(module.train))
    import sg_rlhf.overlay

    modules = [
        module.name
        for module in pkgutil.walk_packages(sg_rlhf.overlay.__path__, "sg_rlhf.overlay.")
        # A program of its own, which runs when it is imported.
        if not module.name.endswith(("__main__", "fork_server.server"))
    ]
    patched = sorted({patch.module for patch in table.PATCHES})
    failed = []
    for name in [*modules, *patched]:
        try:
            importlib.import_module(name)
        except Exception as error:
            failed.append(f"{name}: {error}")
    record.figure("modules", {"overlay": len(modules), "replaced in": len(patched)})
    record.check("every module imports", not failed, failed[:5])
    due = [patch for patch in table.PATCHES if patch.when()]
    missing = [f"{patch.module}: {patch.name}" for patch in due if patch not in table._applied]
    record.figure("patches", {"all": len(table.PATCHES), "on CUDA": len(due)})
    record.check("every patch for CUDA is applied", bool(due) and not missing, missing[:5])
    import torch
    from deepspeed.accelerator import get_accelerator

    record.check("PyTorch sees the device", torch.cuda.device_count() == 1)
    found = get_accelerator()
    record.check("DeepSpeed uses CUDA", found.device_name() == "cuda", found.device_name())
    record.check("DeepSpeed uses NCCL", found.communication_backend_name() == "nccl")
