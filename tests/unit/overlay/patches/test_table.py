"""The table of replaced names: applied in every process, and nothing is replaced beside it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sg_rlhf.overlay.cpu import platform
from sg_rlhf.overlay.patches import flash_attn_shim, table
from sg_rlhf.overlay.patches.version import UpstreamChanged

OVERLAY = Path(table.__file__).parents[1]
FILES = sorted(OVERLAY.rglob("*.py"))
#: Makes modules of its own where flash-attn is not installed.
FLASH_ATTN_SHIM = Path(flash_attn_shim.__file__)
FORK_SERVER = OVERLAY / "fork_server" / "server.py"


def foreign_names(tree: ast.AST) -> set[str]:
    """Names of the source that stand for another package's module, class or function."""
    ours = {*sys.stdlib_module_names, "sg_rlhf"}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                found |= {alias.asname or top} if top not in ours else set()
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] not in ours:
            found |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):  # cuda = torch.cuda
        if isinstance(node, ast.Assign) and root_of(node.value) in found:
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def root_of(node: ast.AST) -> str:
    """`torch` of `torch.cuda.synchronize`; `sys.modules` of anything looked up there."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if ast.unparse(node.value) == "sys.modules":
            return "sys.modules"
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def replacements(source: str) -> Iterator[str]:
    """Each statement that puts something under a foreign name, or waits for an import to do so."""
    tree = ast.parse(source)
    foreign = {*foreign_names(tree), "sys.modules"}
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.startswith("wrapt."):
                yield ast.unparse(node)
            if called in ("setattr", "delattr", "vars"):
                targets = [ast.Attribute(node.args[0], "_")]
            if called.endswith(".__dict__.update"):
                targets = [node.func]
        for target in targets:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            for part in parts:
                if isinstance(part, (ast.Attribute, ast.Subscript)) and root_of(part) in foreign:
                    yield ast.unparse(node)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(OVERLAY)))
def test_only_the_table_replaces_names(path: Path) -> None:
    found = list(replacements(path.read_text()))
    if path == Path(table.__file__):
        assert len(found) == 2 and all("register_post_import_hook" in call for call in found)
    elif path == FLASH_ATTN_SHIM:
        assert found == ["sys.modules[name] = module"]
    elif path == FORK_SERVER:
        assert found == ["sys.modules['__main__'] = main"]  # the process's own, as Python's is
    else:
        assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import openrlhf.trainer.ppo_trainer as upstream\nupstream.PPOTrainer = object",
        "import torch\ncuda = torch.cuda\ncuda.synchronize = print",
        "def f():\n    import torch\n    torch.cuda.empty_cache, x = print, 1",
        "from transformers import modeling_utils as m\nm.ALL_ATTENTION_FUNCTIONS['sdpa'] = print",
        "import deepspeed\nsetattr(deepspeed.zero.Init, 'x', 1)",
        "import sys\nsys.modules['torch'].ones = print",
        "import torch\ndel torch.cuda.synchronize",
        "import vllm\nvllm.__dict__.update(LLM=None)",
        "import wrapt\nwrapt.register_post_import_hook(print, 'torch')",
    ],
)
def test_what_counts_as_a_replacement(source: str) -> None:
    assert len(list(replacements(source))) == 1


APPLIED = """
import importlib, sys
from sg_rlhf.overlay.patches import table
from sg_rlhf.overlay.cpu import platform
{first}
table.install()
for patch in table.PATCHES:
    importlib.import_module({order})
for patch in table.PATCHES:
    importlib.import_module(patch.module)
    ours, _, name = patch.replacement.partition(":")
    new, found = getattr(importlib.import_module(ours), name), patch.current()
    if patch.wraps:
        code = getattr(found, "__code__", None)
        is_ours = code is not None and code.co_filename == new.__code__.co_filename
        inner = getattr(getattr(found, "__wrapped__", None), "__code__", None)
        assert inner is None or inner.co_filename != code.co_filename, ("twice", patch)
    else:
        is_ours = found is new
    print(is_ours, patch in table._applied, patch.module, patch.name)
"""


def applied(platform_name: str, order: str, first: str = "") -> dict[str, bool]:
    """`module name` -> whether our object is there, of a process that installs the overlay."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", APPLIED.format(order=order, first=first)],
        env={"PATH": "", "SG_PLATFORM": platform_name, "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    found = {}
    for line in result.stdout.splitlines():
        if line.split(" ")[0] in ("True", "False"):
            is_ours, was_applied, name = line.split(" ", 2)
            assert is_ours == was_applied, line
            found[name] = is_ours == "True"
    return found


#: Of the machine's kind, and of flash-attn, which the locks do not have.
OF_CPU = (platform.is_cpu, platform.emulates_bf16)
OF_FLASH_ATTN = (flash_attn_shim.installed,)


def rows_but(*conditions: Callable[[], bool]) -> dict[str, bool]:
    """As :func:`applied`: those with one of these conditions are left out."""
    return {f"{p.module} {p.name}": p.when not in conditions for p in table.PATCHES}


def test_every_row_is_applied_where_upstreams_code_imports_its_modules() -> None:
    found = applied("cpu", "patch.module", first="platform.has_bf16_units = lambda: False")
    assert found == rows_but(*OF_FLASH_ATTN)


@pytest.mark.full
def test_rows_are_applied_where_ray_imports_ours_by_name_and_torch_is_there_already() -> None:
    """Those whose condition does not hold are left out."""
    first = "import torch; before = torch.cuda.synchronize; platform.has_bf16_units = lambda: True"
    found = applied("cpu", "patch.replacement.split(':')[0]", first=first)
    assert found == rows_but(platform.emulates_bf16, *OF_FLASH_ATTN)


@pytest.mark.full
def test_rows_of_a_machine_with_cuda() -> None:
    found = applied("cuda", "patch.module")
    assert found == rows_but(*OF_CPU, *OF_FLASH_ATTN)


@pytest.mark.parametrize("name", ["Gone", "JSONDecoder.gone", "REGISTRY[gone]"])
def test_a_name_that_the_module_no_longer_has_is_an_error(name: str) -> None:
    patch = table.Patch("json", name, "sg_rlhf.overlay.cpu.platform:synchronize", "")
    with pytest.raises(UpstreamChanged) as error:
        table.apply_at_import([patch])
    assert str(error.value) == f"json: {name} no longer exists, but the overlay replaces it"


def test_every_row_says_why() -> None:
    assert all(len(patch.why.split()) > 2 for patch in table.PATCHES)
    assert len({(patch.module, patch.name) for patch in table.PATCHES}) == len(table.PATCHES)


def test_torch_is_imported_after_the_number_of_threads_is_set() -> None:
    script = "import sys; import sg_rlhf.overlay.patches.table; print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert found.stdout == "False\n"
