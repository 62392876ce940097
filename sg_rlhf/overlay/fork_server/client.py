"""The driver's side of the fork server: when there is one, its start and its end.

Six processes of a run on CPUs (driver, controller, policy, reference, engine and the engine's core)
each spend 15 seconds of a core on the same imports. Here one process makes them, while the driver
checks the recipe and starts Ray, and the others are forked from it
(:mod:`sg_rlhf.overlay.fork_server.server`):
:mod:`sg_rlhf.overlay.fork_server.worker_launcher` takes the
place of the interpreter that Ray's workers and vLLM's core are started with. Only without CUDA,
whose state does not survive a fork, and only on a cluster that this run starts.
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

from sg_rlhf.overlay.fork_server import worker_launcher

#: 0 has Ray start its workers by itself.
VARIABLE = "SG_FORK_SERVER"
#: The stand-in for ``python``, in the environment of a worker that was forked.
PYTHON_VARIABLE = "SG_FORK_SERVER_PYTHON"

#: The module that the process runs.
SERVER = "sg_rlhf.overlay.fork_server.server"

#: What workers import, but nothing of Ray and what imports Ray (0.7 s): Ray reads its settings from
#: the environment at its import, and its generator of ids, once drawn from, would be shared.
MODULES = (
    "transformers.trainer",
    "vllm.v1.worker.cpu_worker",
    "vllm.engine.arg_utils",
    "vllm.model_executor.model_loader",
    "deepspeed",
    "torch.utils.tensorboard",
    "wandb",
)
#: Libraries that start threads at their import, where nothing runs yet: numpy's for products of
#: matrices and pyarrow's for memory. Workers have their own environment back, not those threads.
WITHOUT_THREADS = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


class ForkServer:
    """The process that workers are forked from; it starts to import at once.

    Args:
        modules: to import.

    Attributes:
        python: the stand-in for the interpreter.
        pid: of the process.
    """

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
        # A group of its own: Ctrl-C is the driver's, which then ends the rest.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={worker_launcher.ENV_ANCHOR: "1"} | os.environ | WITHOUT_THREADS,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
        listener.close()
        self.pid = self._process.pid

    def close(self) -> None:
        """End it, and what was forked of it if that is still there."""
        self._process.terminate()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def enabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this run's workers are to be forked: it starts a cluster of its own here."""
    return "RAY_ADDRESS" not in environment and environment.get(VARIABLE, "1") != "0"


def use_for_subprocesses() -> None:
    """In a worker that was forked: Python's multiprocessing starts its processes the same way."""
    import multiprocessing

    python = os.environ.get(PYTHON_VARIABLE)
    if python and os.path.exists(python):
        multiprocessing.set_executable(python)
