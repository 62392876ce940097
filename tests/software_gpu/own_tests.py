"""Case device: the tests of the device and of its values, and the kernels' compilation."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from tests.gpu.result import Job, Record
from tests.software_gpu.environment import HERE, ROOT

#: Skipped where Triton is not installed, as in the environment of `make test`.
KERNELS = ROOT / "tests" / "unit" / "algo" / "log_probs" / "test_triton_compiles.py"


def run(record: Record, job: Job) -> None:
    """Each test is a check."""
    report = job.scratch / "junit.xml"
    pytest.main(["-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(HERE), str(KERNELS)])
    cases = list(ET.parse(report).iter("testcase"))
    for case in cases:
        problems = [part for part in case if part.tag in ("failure", "error", "skipped")]
        message = problems[0].get("message", "")[:300] if problems else None
        record.check(f"{case.get('name')}", not problems, message)
    record.check("there are tests", bool(cases), len(cases))
