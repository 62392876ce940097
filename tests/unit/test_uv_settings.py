"""What pip is configured with counts for uv: scripts/uv_settings.py on pip's real configuration."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "uv_settings.py"
spec = importlib.util.spec_from_file_location("uv_settings", SCRIPT)
assert spec is not None and spec.loader is not None
uv_settings = importlib.util.module_from_spec(spec)
spec.loader.exec_module(uv_settings)
ALWAYS = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_NO_PROGRESS": "1"}


def settings(folder: Path, config: str = "", **variables: str) -> dict[str, str]:
    """What a shell that evaluates the script's lines has in its environment and options."""
    (folder / "pip.conf").write_text(config)
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), **variables}
    environment |= {"PIP_CONFIG_FILE": str(folder / "pip.conf")}
    done = subprocess.run(
        ["bash", "-euc", f"uv_options=(); eval \"$('{sys.executable}' '{SCRIPT}')\"; "
         "env; echo options=${uv_options[*]-}"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = dict(line.split("=", 1) for line in done.stdout.splitlines())
    names = ("UV_", "SSL_", "ALL_PROXY")
    return {k: v for k, v in found.items() if k.startswith(names) or (k == "options" and v)}


def test_files_and_variables_become_uvs(tmp_path: Path) -> None:
    found = settings(
        tmp_path,
        "[global]\nindex-url = file:///main/simple\ncert = /certs.pem\n"
        "extra-index-url = file:///one\n  file:///two\n"
        "[install]\nfind-links = /a folder/of\n  /wheels\n",
        PIP_DEFAULT_TIMEOUT="180",
    )
    # The machine may have a configuration of its own besides.
    assert found.items() >= (ALWAYS | {
        "UV_DEFAULT_INDEX": "file:///main/simple",
        "UV_INDEX": "file:///one file:///two",
        "UV_FIND_LINKS": "/a,folder/of,/wheels",  # pip takes a space for a separator, too
        "UV_HTTP_TIMEOUT": "180",
        "SSL_CERT_FILE": "/certs.pem",
    }).items()  # fmt: skip


def test_a_variable_of_pip_wins_over_its_file_and_one_of_uv_over_both(tmp_path: Path) -> None:
    config = "[global]\nindex-url = file:///global\n[install]\nindex-url = file:///install\n"
    assert settings(tmp_path, config)["UV_DEFAULT_INDEX"] == "file:///install"
    found = settings(tmp_path, config, PIP_INDEX_URL="file:///variable")
    assert found["UV_DEFAULT_INDEX"] == "file:///variable"
    found = settings(tmp_path, config, PIP_INDEX_URL="x", UV_DEFAULT_INDEX="file:///uv")
    assert found["UV_DEFAULT_INDEX"] == "file:///uv"


def test_without_a_configuration_nothing_but_the_way_indexes_are_searched() -> None:
    assert uv_settings.shell_lines(uv_settings.pip_settings("")) == [
        f"export {name}={value}" for name, value in ALWAYS.items()
    ]


def test_no_index_and_awkward_characters_survive_the_shell(tmp_path: Path) -> None:
    found = settings(tmp_path, PIP_NO_INDEX="1", PIP_INDEX_URL="file:///$(touch${IFS}x)'\";&")
    assert found["options"] == "--no-index"
    assert found["UV_DEFAULT_INDEX"] == "file:///$(touch${IFS}x)'\";&"
    assert not list(tmp_path.glob("x"))
