"""Look up the known vulnerabilities of every lock, and write a CycloneDX bill of materials of each.

    make audit

Run in the environment of ``requirements/tools.lock``. Bills go to ``out/sbom/LOCK.cdx.json``; they
need no network. The advisories come from PyPI, or from OSV with ``--service osv``.

Exit status:
    0: nothing is found but what ``requirements/accepted_vulnerabilities.txt`` lists.
    1: something else is found, or an accepted advisory is no longer found.
    3: no advisories can be read here, so nothing was audited.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements"
LOCKS = ("cpu", "cuda", "docs", "tools", "integrations")
ACCEPTED = REQUIREMENTS / "accepted_vulnerabilities.txt"
#: A release with an old, well-known advisory. A service that does not know it knows nothing: an
#: index that mirrors PyPI's files alone answers "not found" for every package.
KNOWN_VULNERABLE = "jinja2==2.4.1"


def accepted(text: str) -> dict[str, str]:
    """Advisory ID -> reason, from the lines of the accepted list.

    Raises:
        SystemExit: a line has no ID or no reason.
    """
    reasons = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(r"((?:CVE|GHSA|PYSEC|MAL)-\S+)\s+(\S.*)", line)
        if match is None:
            raise SystemExit(f"{ACCEPTED.name}:{number}: expected an advisory's ID and a reason")
        reasons[match[1]] = match[2]
    return reasons


def write_bill(lock: str, folder: Path) -> None:
    """Write one lock's bill of materials."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [sys.executable, "-m", "cyclonedx_py", "requirements", "--output-reproducible",
         "--output-format", "JSON", "--output-file", folder / f"{lock}.cdx.json",
         REQUIREMENTS / f"{lock}.lock"],
        check=True,
    )  # fmt: skip


def pins(lock: str) -> list[str]:
    """``name==version`` of each package, as PyPI names the release."""
    text = (REQUIREMENTS / f"{lock}.lock").read_text()
    found = re.findall(r"^([A-Za-z0-9._-]+)={2,3}([^\s+]+)", text, re.M)
    return sorted({f"{name}=={version}" for name, version in found})


def look_up(requirements: list[str], service: str) -> tuple[dict[str, dict], list[str], str]:
    """Ask for the advisories of exact pins.

    Returns:
        "NAME VERSION ID" -> the advisory; the packages that the service does not know; the error,
        "" without one.
    """
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "requirements.txt"
        listed.write_text("\n".join(requirements))
        answer = subprocess.run(
            [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--aliases", "on",
             "--progress-spinner", "off", "--format", "json", "--vulnerability-service", service,
             "--requirement", listed],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    try:
        packages = json.loads(answer.stdout)["dependencies"]
    except ValueError:
        return {}, [], (answer.stderr.strip().splitlines() or ["no answer"])[-1]
    found = {
        f"{package['name']} {package['version']} {advisory['id']}": advisory
        for package in packages
        for advisory in package.get("vulns", [])
    }
    return found, [package["name"] for package in packages if "skip_reason" in package], ""


def verdict(found: dict[str, dict], reasons: dict[str, str]) -> list[str]:
    """One line for each finding that is not accepted and each acceptance without a finding."""
    lines, used = [], set()
    for name, advisory in sorted(found.items()):
        known = {advisory["id"], *advisory["aliases"]} & reasons.keys()
        used |= known
        if not known:
            fixed = " or ".join(advisory["fix_versions"]) or "no release yet"
            aliases = ", ".join(advisory["aliases"])
            lines.append(f"{name} ({aliases}): mended in {fixed}")
    lines += [f"{ID}: accepted, and no longer found: delete its line" for ID in set(reasons) - used]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--service", choices=("pypi", "osv"), default="pypi")
    parser.add_argument("--bills", type=Path, default=ROOT / "out" / "sbom", metavar="FOLDER")
    options = parser.parse_args()
    reasons = accepted(ACCEPTED.read_text())
    for lock in LOCKS:
        write_bill(lock, options.bills)
    print(f"audit: bills of materials of {len(LOCKS)} locks in {options.bills}")

    known, _, error = look_up([KNOWN_VULNERABLE], options.service)
    if not known:
        print(
            f"audit: NOT AUDITED: {options.service} gives no advisories here"
            f" ({error or f'none for {KNOWN_VULNERABLE}'})",
            file=sys.stderr,
        )
        return 3
    everything = sorted({pin for lock in LOCKS for pin in pins(lock)})
    found, unknown, error = look_up(everything, options.service)
    lines = [error] if error else verdict(found, reasons)
    lines += [f"{name}: {options.service} does not know this release" for name in unknown]
    for line in lines:
        print(f"audit: {line}", file=sys.stderr)
    print(f"audit: {len(everything)} packages, {len(found)} findings, {len(reasons)} accepted")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
