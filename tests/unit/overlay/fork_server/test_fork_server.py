"""Processes that are forked from one with its imports made: as good as fresh ones."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sg_rlhf.overlay.fork_server import client, worker_launcher
from sg_rlhf.overlay.fork_server.client import ForkServer

MODULE = "tabnanny"


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """One with a module that nothing here imports by itself."""
    made = ForkServer((MODULE, "numpy", "setproctitle", "not_a_module"))
    yield made
    made.close()


def run(server: ForkServer, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [server.python, *arguments], capture_output=True, text=True, timeout=300, **options
    )


def until(condition: Any, seconds: float = 300.0) -> bool:
    end = time.time() + seconds
    while time.time() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_the_modules_are_there_before_the_code_runs(server: ForkServer) -> None:
    code = f"import sys; print({MODULE!r} in sys.modules)"
    assert run(server, "-c", code).stdout == "True\n"


def test_arguments_environment_folder_and_status_are_the_callers(
    server: ForkServer, tmp_path: Path
) -> None:
    code = "import os, sys; print(sys.argv, os.environ['OURS'], os.getcwd()); sys.exit(7)"
    environment = {"OURS": "here"}
    done = run(server, "-u", "-W", "error", "-c", code, "a", "b", cwd=tmp_path, env=environment)
    assert done.stdout == f"['-c', 'a', 'b'] here {tmp_path}\n"
    assert done.returncode == 7


def test_imports_are_compiled_once_and_workers_keep_the_users_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first.py").touch()
    (tmp_path / "second.py").touch()
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = ForkServer(("first",))
    done = run(made, "-c", "import sys, second; print(sys.dont_write_bytecode)")
    made.close()
    assert done.stdout == "True\n"
    (compiled,) = (tmp_path / "__pycache__").iterdir()
    assert compiled.name.startswith("first.")


def test_a_file_runs_as_main_and_an_error_has_its_status(
    server: ForkServer, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(__name__, __file__, sys.argv)\nraise ValueError('ours')\n")
    done = run(server, str(script), "--flag")
    assert done.stdout == f"__main__ {script} ['{script}', '--flag']\n"
    assert done.returncode == 1
    assert "ValueError: ours" in done.stderr


def test_a_module_runs_by_its_name(server: ForkServer) -> None:
    done = run(server, "-m", "json.tool", input='{"a":1}')
    assert done.stdout == '{\n    "a": 1\n}\n'


def test_open_files_keep_their_numbers_and_no_others_are_open(
    server: ForkServer,
) -> None:
    read, write = os.pipe()
    code = f"import os; os.write({write}, b'ours'); print(sorted(os.listdir('/proc/self/fd')))"
    done = run(server, "-c", code, pass_fds=[write])
    os.close(write)
    assert os.read(read, 9) == b"ours"
    os.close(read)
    plain = subprocess.run(
        [sys.executable, "-c", code.replace(f"os.write({write}, b'ours'); ", "")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    inherited = eval(done.stdout)
    assert len(inherited) == len(eval(plain.stdout)) + 1  # the pipe


def test_niceness_and_cores_are_the_callers(server: ForkServer) -> None:
    core = min(os.sched_getaffinity(0))
    code = "import os; print(os.nice(0), os.sched_getaffinity(0))"
    nicer = ["nice", "-n", "3", "taskset", "-c", str(core), str(server.python), "-c", code]
    done = subprocess.run(nicer, capture_output=True, text=True, check=True)
    assert done.stdout == f"{min(os.nice(0) + 3, 19)} {{{core}}}\n"


def test_a_usual_limit_of_open_files_is_enough() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        made = ForkServer((MODULE,))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    done = run(made, "-c", f"import sys; print({MODULE!r} in sys.modules)")
    made.close()
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_a_file_with_a_high_number_is_left_to_the_plain_interpreter(server: ForkServer) -> None:
    read, write = os.pipe()
    high = fcntl.fcntl(write, fcntl.F_DUPFD, 700)
    done = run(server, "-c", f"import os; os.write({high}, b'ours')", pass_fds=[high])
    for file in (write, high):
        os.close(file)
    assert "too many open files to pass on" in done.stderr
    assert os.read(read, 9) == b"ours"
    os.close(read)


def test_a_signal_reaches_the_process(server: ForkServer) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))\n"
        "print('ready', flush=True)\ntime.sleep(3600)"
    )
    process = subprocess.Popen([server.python, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    assert process.wait(300) == 5


def test_the_process_ends_with_its_stand_in(server: ForkServer) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(3600)"
    process = subprocess.Popen([server.python, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    forked = int(process.stdout.readline())
    assert psutil.Process(forked).ppid() == server.pid
    process.kill()
    process.wait()
    assert until(lambda: not psutil.pid_exists(forked))


def test_a_killed_process_has_the_status_of_a_killed_one(server: ForkServer) -> None:
    assert run(server, "-c", "import os; os.kill(os.getpid(), 9)").returncode == 128 + 9


def test_random_numbers_differ_from_process_to_process(server: ForkServer) -> None:
    code = "import random, numpy; print(random.random(), numpy.random.random())"
    first, second = (run(server, "-c", code).stdout.split() for _ in range(2))
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_its_environment_is_the_requests_alone(server: ForkServer) -> None:
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    environment = {"PATH": os.environ["PATH"], "OURS": "here"}
    found = json.loads(run(server, "-c", code, env=environment).stdout)
    # A shell and the interpreter set the first two for a plain one, too.
    others = ("PWD", "LC_CTYPE", worker_launcher.ENV_ANCHOR)
    assert {k: v for k, v in found.items() if k not in others} == environment


def test_its_title_can_be_set(server: ForkServer) -> None:
    code = "import setproctitle; setproctitle.setproctitle('ours'); input()"
    process = subprocess.Popen(
        [server.python, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    process_of_server = psutil.Process(server.pid)
    assert until(
        lambda: "ours" in [" ".join(c.cmdline()).strip() for c in process_of_server.children()]
    )
    process.communicate(b"\n")


def _square(number: int) -> int:
    return number * number


def test_multiprocessing_starts_its_processes_there(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(client.PYTHON_VARIABLE, str(server.python))
    before = multiprocessing.spawn.get_executable()
    client.use_for_subprocesses()
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.map(_square, [3, 4]) == [9, 16]
            children = psutil.Process(server.pid).children()
            assert children
    finally:
        multiprocessing.set_executable(os.fsdecode(before))


def test_without_a_server_it_is_the_plain_interpreter() -> None:
    gone = ForkServer(())
    python = gone.python.read_text()
    gone.close()
    assert not gone.python.exists()
    done = subprocess.run(
        ["sh", "-c", python, "python", "-c", f"import sys; print({MODULE!r} in sys.modules)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "False\n"


def test_where_an_import_starts_threads_it_is_the_plain_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "busy.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    made = ForkServer(("busy",))
    done = run(made, "-c", "import os, sys; print('busy' in sys.modules); sys.exit(3)")
    made.close()
    assert done.stdout == "False\n"
    assert done.returncode == 3
    assert "sg_rlhf: without the fork server: its imports have started threads (2" in done.stderr


def test_threads_of_torch_are_those_of_a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(os.cpu_count()))
    code = (
        "import sys; print('torch' in sys.modules)\n"
        "import os, torch\n"
        "product = (torch.ones(400, 400) @ torch.ones(400, 400))[0, 0].item()\n"
        "print(torch.get_num_threads(), len(os.listdir('/proc/self/task')), product)\n"
    )
    made = ForkServer(("torch",))
    forked = run(made, "-c", code).stdout.splitlines()
    made.close()
    # numpy's threads, which the forked one has not, would be counted as well.
    environment = {**os.environ, **client.WITHOUT_THREADS}
    fresh = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout.splitlines()
    assert forked == ["True", fresh[1]]


@pytest.mark.full
def test_what_a_run_imports_starts_no_thread_and_shares_no_random_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SG_PLATFORM", "cpu")
    made = ForkServer()
    code = (
        "import sys; print('ray' in sys.modules, 'vllm' in sys.modules)\n"
        "import numpy, random, torch, uuid, openrlhf.cli.train_ppo_ray, ray\n"
        "print(random.random(), numpy.random.random(), torch.rand(1).item(), uuid.uuid4(),\n"
        "      ray.ObjectRef.from_random().hex())"
    )
    first, second = (run(made, "-c", code) for _ in range(2))
    made.close()
    assert "without the fork server" not in first.stderr
    (modules, drawn), (_, drawn_again) = first.stdout.splitlines(), second.stdout.splitlines()
    assert modules == "False True"
    assert not set(drawn.split()) & set(drawn_again.split())


def test_it_ends_with_the_driver_however_that_ends() -> None:
    code = (
        "import time\nfrom sg_rlhf.overlay.fork_server.client import ForkServer\n"
        "made = ForkServer(())\nprint(made.pid, made.python, flush=True)\n"
        "time.sleep(3600)"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pid, python = driver.stdout.readline().split()
    forked = subprocess.Popen([python, "-c", "import time; time.sleep(3600)"])
    assert until(lambda: len(psutil.Process(int(pid)).children()) == 1)
    driver.kill()
    driver.wait()
    assert until(lambda: not psutil.pid_exists(int(pid)) and not Path(python).exists())
    assert forked.wait(300) != 0


def test_only_for_a_cluster_of_ones_own() -> None:
    assert client.enabled({})
    assert not client.enabled({"RAY_ADDRESS": "127.0.0.1:6379"})
    assert not client.enabled({client.VARIABLE: "0"})


@pytest.mark.parametrize("module", client.MODULES)
def test_what_is_imported_is_there(module: str) -> None:
    # One that is gone is passed over, and the start would be slow without a word.
    import importlib.util

    assert importlib.util.find_spec(module) is not None
