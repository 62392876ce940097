"""Makes the tables of docs/licences.md: the licences of every locked package, model and data set.

    python docs/make_licences.py [--check]

Licences of packages are what the installed packages say of themselves; run it in an environment of
requirements/cpu.lock. ``--check`` writes nothing and fails if the page would be another.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from made_tables import main  # noqa: E402

from sg_rlhf.config import load_config  # noqa: E402
from sg_rlhf.config.builtin_recipes import CONFIGS  # noqa: E402
from sg_rlhf.eval import suites  # noqa: E402

PAGE = ROOT / "docs" / "licences.md"
#: Of the models in recipes, by their model cards; written by hand, read by no script.
MODELS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": "Apache-2.0",
    "Qwen/Qwen2.5-3B": "Qwen Research (no commercial use)",
    "Qwen/Qwen2.5-3B-Instruct": "Qwen Research (no commercial use)",
    "Qwen/Qwen2.5-0.5B-Instruct": "Apache-2.0",
    "Qwen/Qwen2.5-0.5B": "Apache-2.0",
    "Qwen/Qwen2.5-7B": "Apache-2.0",
    "Qwen/Qwen2.5-7B-Instruct-1M": "Apache-2.0",
    "Qwen/Qwen3-4B-Instruct-2507": "Apache-2.0",
    "mistralai/Mistral-7B-Instruct-v0.3": "Apache-2.0",
    "meta-llama/Llama-3.1-8B-Instruct": "Llama 3.1 Community",
}
#: Classifiers that say no more than that there is a licence.
_VAGUE = {"OSI Approved", "Other/Proprietary License"}


def locked(name: str) -> dict[str, str]:
    """Package -> version of a lock file."""
    lines = (ROOT / "requirements" / f"{name}.lock").read_text().splitlines()
    found = (re.match(r"([A-Za-z0-9._-]+)==([^\s;]+)", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


def licence_of(package: str) -> str | None:
    """What an installed package says; None where it is not installed."""
    try:
        about = metadata.metadata(package)
    except metadata.PackageNotFoundError:
        return None
    if about.get("License-Expression"):
        return str(about["License-Expression"])
    names = [line.split(" :: ")[-1] for line in about.get_all("Classifier") or ()
             if line.startswith("License")]  # fmt: skip
    named = [name for name in names if name not in _VAGUE]
    if named:
        return ", ".join(sorted(named))
    text = " ".join(str(about.get("License") or "").split())
    return (text if len(text) <= 60 else f"{text[:57]}...") or "not stated in its metadata"


def packages() -> list[str]:
    """A row for each locked package."""
    cpu, cuda = locked("cpu"), locked("cuda")
    rows = ["| package | in | licence |", "| --- | --- | --- |"]
    for name in sorted({*cpu, *cuda}):
        where = "both" if name in cpu and name in cuda else "cpu" if name in cpu else "cuda"
        stated = licence_of(name) or "not read: installed with CUDA alone"
        rows.append(f"| {name} | {where} | {stated.replace('|', '/')} |")
    return rows


def models() -> list[str]:
    """A row for each model of a recipe."""
    found = set()
    for path in sorted(CONFIGS.glob("*/*.yaml")):
        name = load_config(path).value("actor.model_name_or_path")
        if name and not str(name).startswith("module:"):
            found.add(str(name))
    return [
        "| model | licence |",
        "| --- | --- |",
        *(f"| {n} | {MODELS[n]} |" for n in sorted(found)),
    ]


def benchmarks() -> list[str]:
    """A row for each set that an evaluation reads."""
    rows = ["| suite | set | licence |", "| --- | --- | --- |"]
    for name, suite in suites.all_suites().items():
        seen = dict.fromkeys((b.title, b.licence) for b in suite.benchmarks)
        rows += [f"| {name} | {title} | {licence} |" for title, licence in seen]
    return rows


if __name__ == "__main__":
    raise SystemExit(main(PAGE, {"models": models, "sets": benchmarks, "packages": packages}))
