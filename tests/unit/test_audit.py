"""scripts/audit.py: what counts as a finding, and that silence of the service is no pass."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "audit.py"
spec = importlib.util.spec_from_file_location("audit", SCRIPT)
assert spec is not None and spec.loader is not None
audit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(audit)

#: Stands in for pip-audit: knows the advisories of $ADVISORIES, by package name.
PIP_AUDIT = """\
import json, os, sys
advisories = json.loads(os.environ["ADVISORIES"])
packages = []
for line in open(sys.argv[sys.argv.index("--requirement") + 1]):
    name, _, version = line.strip().partition("==")
    packages.append({"name": name, "version": version, "vulns": advisories.get(name, [])})
print(json.dumps({"dependencies": packages}))
"""
OLD = {"id": "PYSEC-2019-217", "aliases": ["CVE-2019-10906"], "fix_versions": ["2.10.1"]}


def run(folder: Path, advisories: dict[str, list[dict]]) -> subprocess.CompletedProcess[str]:
    """The whole script, beside stand-ins of the two tools that it starts."""
    (folder / "pip_audit.py").write_text(PIP_AUDIT)
    (folder / "cyclonedx_py.py").write_text("")
    return subprocess.run(
        [sys.executable, SCRIPT, "--bills", folder / "bills"],
        env=os.environ | {"PYTHONPATH": str(folder), "ADVISORIES": json.dumps(advisories)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_service_that_knows_nothing_is_no_pass(tmp_path: Path) -> None:
    done = run(tmp_path, {})
    assert done.returncode == 3
    assert "NOT AUDITED" in done.stderr


def test_a_finding_fails_with_its_package_and_the_release_that_mends_it(tmp_path: Path) -> None:
    found = {"id": "GHSA-abcd", "aliases": ["CVE-2026-1"], "fix_versions": ["99.0"]}
    done = run(tmp_path, {"jinja2": [OLD], "ray": [found]})
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "ray" in line]
    assert "GHSA-abcd (CVE-2026-1): mended in 99.0" in line


@pytest.mark.parametrize("ID", ["GHSA-abcd", "CVE-2026-1"])
def test_an_accepted_finding_passes_by_either_name(ID: str) -> None:
    found = {"ray 1 GHSA-abcd": {"id": "GHSA-abcd", "aliases": ["CVE-2026-1"], "fix_versions": []}}
    assert audit.verdict(found, {ID: "a reason"}) == []
    assert len(audit.verdict(found, {})) == 1


def test_an_acceptance_without_a_finding_is_named() -> None:
    (line,) = audit.verdict({}, {"CVE-2026-1": "a reason"})
    assert line.startswith("CVE-2026-1: accepted, and no longer found")


def test_an_acceptance_needs_a_reason() -> None:
    assert audit.accepted("# comment\n\nCVE-2026-1  not on our path\n") == {
        "CVE-2026-1": "not on our path"
    }
    with pytest.raises(SystemExit, match="txt:1: expected an advisory's ID and a reason"):
        audit.accepted("CVE-2026-1\n")


def test_the_committed_list_is_well_formed() -> None:
    audit.accepted(audit.ACCEPTED.read_text())


def test_every_lock_is_audited_by_pypis_names() -> None:
    locks = {path.stem for path in audit.REQUIREMENTS.glob("*.lock")}
    assert set(audit.LOCKS) == locks
    assert "torch==2.13.0" in audit.pins("cpu") and "torch==2.13.0" in audit.pins("cuda")
