"""`sg-rlhf`: hands its arguments over unchanged, teaches, and starts without a heavy import."""

from __future__ import annotations

import configparser
import importlib
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sg_rlhf import __version__
from sg_rlhf.__main__ import COMMANDS, REMOVED, main
from sg_rlhf.weights import command as weights
from tests.unit.command_parser import parser_of

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml")


def run(*words: str, code: str = "import runpy; runpy.run_module('sg_rlhf', run_name='__main__')"):
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.argv[1:] = {list(words)!r}; {code}"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_the_help_teaches() -> None:
    result = run("--help")
    assert result.returncode == 0
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.summary)}$", result.stdout, re.MULTILINE)
    assert result.stdout.count("    sg-rlhf ") >= 3
    for path in re.findall(r"\b(?:docs|configs)/[\w./-]+\w", result.stdout):
        assert (ROOT / path).is_file(), path
    assert max(map(len, result.stdout.splitlines())) <= 110


def test_the_help_comes_at_once() -> None:
    listed = run(
        "--help",
        code="""
from sg_rlhf.__main__ import main
main(sys.argv[1:])
print(sorted({"numpy", "omegaconf", "pydantic", "rich", "torch", "yaml"} & {*sys.modules}))
""",
    )
    assert listed.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["wieghts"], "sg-rlhf wieghts: no such command; did you mean weights?"),
        (["study", "--list"], "sg-rlhf study: removed, because it is not part of the package: in"),
        (["measure"], "sg-rlhf measure: removed, because it is not part of the package: in the"),
        (["measure", "sharpness"], "sg-rlhf measure: removed, because it is not part of the"),
        (["--frobnicate"], "sg-rlhf --frobnicate: no such command; expected one of data, "),
        (["serve-replicas", "--replicas", "2"], "sg-rlhf serve-replicas: removed, because several"),
        (["Train"], "sg-rlhf Train: no such command; did you mean train?"),
    ],
)
def test_an_unknown_command_is_one_line_with_the_nearest_name(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == "" and line.startswith(f"error: {message}")


def test_the_docs_name_commands_that_there_are() -> None:
    pages = [*(ROOT / "docs").glob("**/*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]
    for page in pages:
        for words in re.findall(r"`sg-rlhf ([a-z][\w-]*(?: [\w-]+)?)", page.read_text()):
            name = words.split()[0]
            is_gone = page.name == "CHANGELOG.md" and name in REMOVED
            assert name in COMMANDS or is_gone, f"{page.name}: sg-rlhf {words}"


def test_without_a_command_the_help_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "  train " in err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"sg-rlhf {__version__}\n"


@pytest.mark.parametrize(
    "argv", [[], ["--json"], ["sg.weighting.upper=1.2"], ["sg.uper=1.2"], ["--jsn"]]
)
def test_arguments_output_and_exit_status_are_the_commands_own(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    def outcome(main_of_command, words: list[str]) -> tuple[object, str, str]:
        try:
            status = main_of_command(words)
        except SystemExit as error:
            status = error.code
        return (status, *capsys.readouterr())

    assert outcome(main, ["weights", *argv]) == outcome(weights.main, argv)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_in_the_words_of_the_command(capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*name.split(), "--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: sg-rlhf {name} ")
    usage = out.partition("\n\n")[0].splitlines()
    assert {len(line) - len(line.lstrip()) for line in usage[1:]} <= {
        len(f"usage: sg-rlhf {name} ")
    }
    assert not re.search(r"python -m sg_rlhf\.", out)
    for words in re.findall(r"sg-rlhf ([a-z_-]+(?: [a-z_-]+)?)", out):
        assert any(words == c or words.startswith(f"{c} ") for c in COMMANDS), words


def test_a_package_that_is_missing_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "sg_rlhf.retrieval.server", raising=False)
    assert main(["serve", "--index", "x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "error: sg-rlhf serve: uvicorn is not installed; pip install '.[search]' in the "
        "repository, or run scripts/bootstrap.sh, then .venv/bin/python -m sg_rlhf serve --index x"
    )


def test_a_reader_that_ends_is_no_error() -> None:
    words = f"'{sys.executable}' -m sg_rlhf weights"
    script = f"{words} | true; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("141\n", "")


def test_every_command_has_its_section_with_examples_that_parse() -> None:
    """docs/commands.md: the commands in the order of the help."""
    text = (ROOT / "docs" / "commands.md").read_text()
    sections = dict(re.findall(r"^### `sg-rlhf ([a-z_ -]+)`\n(.*?)(?=^##|\Z)", text, re.M | re.S))
    assert list(sections) == list(COMMANDS)
    for name, section in sections.items():
        lines = re.sub(r"\\\n\s*", "", "\n".join(re.findall(r"```\n(.*?)```", section, re.S)))
        examples = [
            line for line in lines.splitlines() if f"{line} ".startswith(f"sg-rlhf {name} ")
        ]
        assert examples, name
        for example in examples:
            argv = shlex.split(example)[1 + len(name.split()) :]
            parser_of(COMMANDS[name].module, argv).parse_args(argv)


def test_a_recipe_is_found_by_its_name_outside_the_repository(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "sg_rlhf", "weights", "--config",
         "configs/kk/grpo_sg_tiny_cpu.yaml", "--json"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0 and '"upper": 1.2' in result.stdout


def absent_without_extras() -> list[str]:
    """The modules installed here that installing this package without extras does not bring."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    wanted = [*filter(None, setup["options"]["install_requires"].splitlines())]
    brought = {"sg-rlhf"}
    while wanted:
        requirement = Requirement(wanted.pop())
        name = canonicalize_name(requirement.name)
        extras = {"", *requirement.extras}
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": e}) for e in extras):
            continue
        if name not in brought:
            brought.add(name)
            wanted += importlib.metadata.requires(name) or []
    return sorted(
        module
        for module, packages in importlib.metadata.packages_distributions().items()
        if not brought & {*map(canonicalize_name, packages)}
    )


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["eval", "--list"], "--suite qa"),
        (["weights"], "0.211"),
        (["data", "kk", "--help"], "--generate"),
        (["train", "--config", TINY, "--dry-run"], "OpenRLHF is not installed; run"),
    ],
)
def test_a_command_that_needs_no_extra_goes_without_them(words: list[str], shown: str) -> None:
    absent = absent_without_extras()
    assert {"aiohttp", "vllm", "openrlhf", "transformers"} <= {*absent}
    assert not {"torch", "numpy", "sg_rlhf"} & {*absent}
    code = f"""
import runpy
sys.modules.update(dict.fromkeys({absent!r}))  # None: as if it were not installed
runpy.run_module('sg_rlhf', run_name='__main__')
"""
    result = run(*words, code=code)
    assert result.returncode == 0, result.stderr
    assert shown in result.stdout


@pytest.mark.parametrize(
    "way", [["-m", "sg_rlhf.weights"], [str(Path(sys.executable).parent / "sg-rlhf"), "weights"]]
)
def test_a_module_of_the_current_folder_is_found_either_way(way: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from sg_rlhf.algo.weightings import Weighting\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Half(Weighting):\n"
        '    """w = p"""\n'
        "    def weights(self, p_BT, context):\n"
        "        return p_BT\n"
    )
    result = subprocess.run(
        [sys.executable, *way, "sg.weighting={type: mine:Half}"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
