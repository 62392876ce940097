"""The driver's side of the fork server: decides whether to use it, starts it and ends it.

A CPU run has six processes, of which each would spend 15 seconds of a core on the same imports. The
server (:mod:`.server`) imports once, while the driver checks the recipe and starts Ray; Ray and
vLLM start their workers with :mod:`.worker_launcher` instead of ``python``. It is used only without
CUDA, whose state does not survive a fork, and only on a cluster that this run starts.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from sg_rlhf.common import child_process
from sg_rlhf.overlay.fork_server import worker_launcher

#: "0" turns the fork server off.
VARIABLE = "SG_FORK_SERVER"
#: Path of the launcher, in the environment of a forked worker.
PYTHON_VARIABLE = "SG_FORK_SERVER_PYTHON"

#: The module of the server process.
SERVER = "sg_rlhf.overlay.fork_server.server"

#: Modules that workers import. Ray, and modules that import Ray (0.7 s), are left out: Ray reads
#: its settings from the environment at import, and forks would share its generator of ids.
MODULES = (
    "transformers.trainer",
    "vllm.v1.worker.cpu_worker",
    "vllm.engine.arg_utils",
    "vllm.model_executor.model_loader",
    "deepspeed",
    "torch.utils.tensorboard",
    "wandb",
)
#: Keeps numpy (matrix products) and pyarrow (memory) from starting threads at import. Only the
#: server has these variables; a worker gets its own environment back, but not the threads.
WITHOUT_THREADS = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
#: The first run compiles what it imports into ``.venv``, also where the user's shell forbids it:
#: otherwise every run would compile it again (10 s).
WITH_BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}


class ForkServer:
    """The process that workers are forked from. It starts to import at once."""

    def __init__(self, modules: Sequence[str] = MODULES) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="sg-fork-server-"))
        address = self._folder / "socket"
        interpreter = [sys.executable, "-I", "-S", worker_launcher.__file__, str(address)]
        self.python = self._folder / "python"
        self.python.write_text(f'#!/bin/sh\nexec {shlex.join(interpreter)} "$@"\n')
        self.python.chmod(0o700)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(address))
        listener.listen(64)
        command = [sys.executable, "-m", SERVER, str(listener.fileno()), str(self._folder)]
        command += modules
        # In its own session: Ctrl-C must reach only the driver, which then ends the rest.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={worker_launcher.ENV_ANCHOR: "1"} | os.environ | WITHOUT_THREADS | WITH_BYTECODE,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
        listener.close()
        self.pid = self._process.pid

    def close(self) -> None:
        """End the server and all of its forks that still run."""
        child_process.end(self._process, 5.0)
        shutil.rmtree(self._folder, ignore_errors=True)


def enabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this run starts its own cluster and the user has not turned the fork server off."""
    return "RAY_ADDRESS" not in environment and environment.get(VARIABLE, "1") != "0"


def use_for_subprocesses() -> None:
    """In a forked worker: have Python's multiprocessing start its processes by the launcher."""
    import multiprocessing

    python = os.environ.get(PYTHON_VARIABLE)
    if python and os.path.exists(python):
        multiprocessing.set_executable(python)
