"""A test may fail because something is wrong, and never because the machine is busy.

Its limits only end what hangs: ten times what is needed on a quiet machine, and more. How long
something takes is measured in lab/bench/.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
#: Seconds that a test has, waits for a process, and may ask of what it times, at the least.
OF_A_TEST, OF_A_WAIT, OF_A_DURATION = 600, 300, 30
WAITS = {"run", "communicate", "wait", "wait_procs"}
CLOCKS = {"time", "monotonic", "perf_counter"}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.func.attr, node


def seconds(node: ast.AST) -> float | None:
    value = node.value if isinstance(node, ast.Constant) else None
    return float(value) if isinstance(value, (int, float)) else None


def too_short(source: str) -> list[int]:
    """Lines of limits that a busy machine may exceed."""
    tree, found = ast.parse(source), []
    for name, call in calls(tree):
        limits = [seconds(k.value) for k in call.keywords if k.arg == "timeout"]
        if name == "timeout":
            limits, least = [seconds(argument) for argument in call.args], OF_A_TEST
        elif name in WAITS and ast.unparse(call.func) != "ray.wait":
            limits, least = limits, OF_A_WAIT
        else:
            continue
        found += [call.lineno for limit in limits if limit is not None and limit < least]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assert) or not isinstance(node.test, ast.Compare):
            continue
        clocks = [call for name, call in calls(node.test) if name in CLOCKS]
        sides = zip(node.test.ops, node.test.comparators, strict=True)
        limits = [seconds(side) for op, side in sides if isinstance(op, (ast.Lt, ast.LtE))]
        if clocks and any(limit is not None and limit < OF_A_DURATION for limit in limits):
            found.append(node.lineno)
    return found


def test_no_limit_is_one_that_a_busy_machine_exceeds() -> None:
    for path in sorted(TESTS.rglob("*.py")):
        lines = too_short(path.read_text())
        assert not lines, f"{path.relative_to(TESTS)}, lines {lines}"


def test_short_limits_are_found() -> None:
    source = """
@pytest.mark.timeout(60)
def test():
    subprocess.run(["x"], timeout=20)
    assert time.monotonic() - started < 2
    assert 1 <= time.perf_counter() - started < 5
    assert time.monotonic() < deadline
    process.communicate(timeout=300)
    assert ray.wait([call], timeout=2) == ([], [call])
"""
    assert too_short(source) == [2, 4, 5, 6]
