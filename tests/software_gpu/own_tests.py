"""Case device: the tests of the device and of its values, and the kernels' compilation."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET

from tests.gpu.result import Job, Record
from tests.software_gpu.environment import HERE, ROOT

#: Skipped where Triton is not installed, as in the environment of `make test`.
KERNELS = ROOT / "tests" / "unit" / "algo" / "log_probs" / "test_triton_compiles.py"


def run(record: Record, job: Job) -> None:
    """Each test is a check. Two processes: a unit test hides every GPU of its own."""
    for tests in (HERE, KERNELS):
        report = job.scratch / f"{tests.stem}.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        subprocess.run([*command, f"--junitxml={report}", str(tests)], cwd=ROOT, check=False)
        cases = list(ET.parse(report).iter("testcase"))
        for case in cases:
            problems = [part for part in case if part.tag in ("failure", "error", "skipped")]
            message = problems[0].get("message", "")[:300] if problems else None
            record.check(f"{case.get('name')}", not problems, message)
        record.check(f"there are tests in {tests.name}", bool(cases), len(cases))
