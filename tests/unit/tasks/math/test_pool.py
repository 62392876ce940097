"""The pool of grading workers: limits, threads, forks, start methods, breakdowns, and its end."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from sg_rlhf.tasks.math.answers.pool import WALL_FACTOR, WorkerPool, shared_pool
from sg_rlhf.tasks.math.grading import Reason, compare, grade, grade_many

ROOT = Path(__file__).parents[4]
# Needs math-verify, and so a worker.
SYMBOLIC = (r"\boxed{1+x}", "x+1")
ENDLESS = r"\boxed{9^{9^9}}"


def workers_of(process):
    return [child for child in psutil.Process(process).children() if is_worker(child)]


def is_worker(process):
    with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
        return "answers.worker" in " ".join(process.cmdline())
    return False


def run_python(*arguments, stdin=None, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        input=stdin,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SG_MATH_WORKERS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def own_pool():
    pool = WorkerPool(workers=1, limit_s=0.6)
    yield pool
    pool.close()


def test_threads_share_a_pool(pool):
    with ThreadPoolExecutor(8) as threads:
        grades = list(threads.map(lambda n: grade(rf"\boxed{{{n}+x}}", "x+3", pool), range(16)))
    assert [n for n, g in enumerate(grades) if g.correct] == [3]
    assert {g.reason for g in grades} == {Reason.CORRECT, Reason.WRONG}


def test_many_threads_start_one_pool(own_pool):
    others = [w.pid for w in workers_of(os.getpid())]
    barrier = threading.Barrier(6)

    def first(_):
        barrier.wait()
        return grade(*SYMBOLIC, own_pool).correct

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(first, range(6)))
    assert len([w for w in workers_of(os.getpid()) if w.pid not in others]) == own_pool.workers


def test_a_worker_that_is_killed_is_replaced(own_pool):
    others = [w.pid for w in workers_of(os.getpid())]
    assert grade(*SYMBOLIC, own_pool).correct
    [worker] = [w for w in workers_of(os.getpid()) if w.pid not in others]
    # In the middle of an answer: the answer is lost, and says so.
    verdict = own_pool.submit(compare, "9^{9^9}", ("5",))
    busy_since = sum(worker.cpu_times()[:2])
    while sum(worker.cpu_times()[:2]) < busy_since + 0.1:
        time.sleep(0.01)
    worker.kill()
    assert verdict.result() is Reason.CRASH
    assert grade(*SYMBOLIC, own_pool).correct
    # While idle: the pool breaks down and is replaced.
    [worker] = [w for w in workers_of(os.getpid()) if w.pid not in others]
    time.sleep(1.0)  # it gives back a lock just after its verdict
    worker.kill()
    time.sleep(0.5)
    assert grade(*SYMBOLIC, own_pool).correct


def test_a_time_out_ends_the_worker_and_is_a_reason(own_pool):
    others = {w.pid for w in workers_of(os.getpid())}
    assert grade(*SYMBOLIC, own_pool).correct
    first = {w.pid for w in workers_of(os.getpid())} - others
    reasons = [g.reason for g in grade_many([(ENDLESS, "5"), SYMBOLIC], own_pool)]
    assert reasons == [Reason.TIMEOUT, Reason.CORRECT]
    second = {w.pid for w in workers_of(os.getpid())} - others
    assert len(first) == len(second) == 1 and first != second


@pytest.mark.full
def test_a_worker_without_a_processor_ends_by_the_wall_clock():
    """A stopped process uses no processor time, as on a machine that is starved."""
    others = {w.pid for w in workers_of(os.getpid())}
    pool = WorkerPool(workers=1, limit_s=0.2)
    try:
        assert grade(*SYMBOLIC, pool).correct
        [worker] = [w for w in workers_of(os.getpid()) if w.pid not in others]
        busy_since = sum(worker.cpu_times()[:2])
        begun = time.monotonic()
        verdict = pool.submit(compare, "9^{9^9}", ("5",))
        while sum(worker.cpu_times()[:2]) < busy_since + 0.05:
            time.sleep(0.002)
        worker.suspend()
        assert verdict.result() is Reason.TIMEOUT
        assert time.monotonic() - begun >= WALL_FACTOR * 0.2
        assert grade(*SYMBOLIC, pool).correct
    finally:
        pool.close()


def test_a_forked_child_grades_and_leaves_the_parent_alone(pool):
    assert grade(*SYMBOLIC, pool).correct
    child = os.fork()
    if child == 0:
        # Leave without pytest's clean-up, whatever happens.
        code = 1
        try:
            code = 0 if grade(*SYMBOLIC, pool).correct else 2
            pool.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert grade(*SYMBOLIC, pool).correct


SCRIPT = textwrap.dedent(
    """
    import os, sys
    with open({started!r}, "a") as file:
        file.write("started\\n")
    from sg_rlhf.tasks.math.grading import grade
    print(grade({response!r}, {gold!r}).reason)
    """
)


@pytest.mark.parametrize("how", ["file", "-c", "stdin"])
def test_main_is_not_imported_again_and_nothing_keeps_the_process(how, tmp_path):
    """A script without a `__main__` guard: it runs once, and ends although its pool is idle."""
    script = SCRIPT.format(
        started=str(tmp_path / "started"), response=SYMBOLIC[0], gold=SYMBOLIC[1]
    )
    if how == "file":
        (tmp_path / "script.py").write_text(script)
        result = run_python(str(tmp_path / "script.py"))
    elif how == "-c":
        result = run_python("-c", script)
    else:
        result = run_python("-", stdin=script)
    assert (result.returncode, result.stdout, result.stderr) == (0, "correct\n", "")
    assert (tmp_path / "started").read_text() == "started\n"


WAYS = textwrap.dedent(
    """
    import multiprocessing, sys
    from concurrent.futures import ProcessPoolExecutor
    from sg_rlhf.tasks.math.grading import grade

    RESPONSES = [r"\\boxed{1+x}", r"\\boxed{2+x}"]

    def is_correct(response):
        return grade(response, "x+1").correct

    def expect(verdicts):
        assert list(verdicts) == [True, False], verdicts

    def child():
        expect(map(is_correct, RESPONSES))

    def main(way):
        if way == "executor":
            with ProcessPoolExecutor(1) as pool:
                expect(pool.map(is_correct, RESPONSES))
        elif way == "pool":
            with multiprocessing.Pool(1) as pool:
                expect(pool.map(is_correct, RESPONSES))
        elif way == "joblib":
            import joblib
            expect(joblib.Parallel(2)(map(joblib.delayed(is_correct), RESPONSES)))
        elif way == "ray":
            import ray
            ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
            expect(ray.get([ray.remote(is_correct).remote(r) for r in RESPONSES]))
        else:
            process = multiprocessing.get_context(way).Process(target=child)
            process.start()
            process.join()
            assert process.exitcode == 0
        print("ended")

    if __name__ == "__main__":
        main(sys.argv[1])
    """
)


@pytest.mark.parametrize(
    "way",
    [
        "executor", "pool", "joblib", "fork", "spawn", "forkserver",
        pytest.param("ray", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_a_process_that_grades_ends_by_itself(way, tmp_path):
    """`multiprocessing` joins a process's children at its end, whatever they are doing."""
    script = tmp_path / "script.py"
    script.write_text(WAYS)
    result = run_python(str(script), way)
    assert (result.returncode, result.stdout) == (0, "ended\n"), result.stderr
    deadline = time.monotonic() + 300
    while left := [
        p.pid
        for p in psutil.process_iter(["cmdline"])
        if str(script) in " ".join(p.info["cmdline"] or [])
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_workers_end_with_a_process_that_is_killed(tmp_path):
    code = (
        "import os, time\nfrom sg_rlhf.tasks.math.grading import grade\n"
        f"print(grade(*{SYMBOLIC!r}).reason, flush=True)\ntime.sleep(3600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SG_MATH_WORKERS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "correct\n"
        workers = workers_of(process.pid)
        assert workers
        process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(workers, timeout=300)
    assert alive == []


def test_grading_does_not_import_sympy():
    """The trainer pays for sympy neither in seconds nor in memory."""
    code = (
        "import sys\nfrom sg_rlhf.tasks.math.grading import grade\n"
        "print(grade(r'\\boxed{0.5}', '1/2').correct, 'sympy' in sys.modules)"
    )
    assert run_python("-c", code).stdout == "True False\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [("SG_MATH_WORKERS", "0"), ("SG_MATH_WORKERS", "1.5"), ("SG_MATH_LIMIT_S", "soon")],
)
def test_bad_settings_are_named(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    shared_pool.cache_clear()
    try:
        with pytest.raises(ValueError, match=f"{name}='{value}': expected a positive number"):
            shared_pool()
    finally:
        shared_pool.cache_clear()


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="workers=0, limit_s=2"):
        WorkerPool(workers=0)
