"""No code of ours loads what may run while it is loaded, nor trusts a model's own code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.glob("sg_rlhf/**/*.py"))
#: Modules that unpickle.
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def faults(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) of each call or import that loads code with data."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (
                (node.lineno, alias.name)
                for alias in node.names
                if alias.name.split(".")[0] in MODULES
            )
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in MODULES:
            yield node.lineno, str(node.module)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if name.endswith("torch.load") and given.get("weights_only") != "True":
                yield node.lineno, "torch.load without weights_only=True"
            if name.endswith("np.load") and given.get("allow_pickle", "False") != "False":
                yield node.lineno, "np.load with allow_pickle"
            if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
                yield node.lineno, name
            if given.get("trust_remote_code") == "True":
                yield node.lineno, "trust_remote_code=True"
            loads = name.endswith(".from_pretrained") and name.startswith("Auto")
            if loads and given.get("trust_remote_code") != "False":
                yield node.lineno, f"{name} without trust_remote_code=False"
            if given.get("shell") == "True" or name in ("os.system", "os.popen"):
                yield node.lineno, f"{name} through a shell"


def test_no_file_of_ours_runs_what_it_loads() -> None:
    found = [
        (str(path.relative_to(ROOT)), line, what)
        for path in FILES
        for line, what in faults(path.read_text())
    ]
    assert FILES and not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from joblib import load", "torch.load(p)",
        "np.load(p, allow_pickle=True)", "torch.load(p, weights_only=False)",
        "yaml.load(f, Loader=L)", "os.system(x)",
        "AutoModel.from_pretrained(x)", "f(trust_remote_code=True)", "run(x, shell=True)",
    ],
)  # fmt: skip
def test_what_would_be_found(source: str) -> None:
    assert [*faults(source)]
