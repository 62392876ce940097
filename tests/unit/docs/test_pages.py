"""Pages: links, names, statements, and errors that readers look up."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from pathlib import Path

import nbformat
import pytest
import yaml

from sg_rlhf.__main__ import COMMANDS
from sg_rlhf.launch.job import USED_BY

# -- What a reader of the pages relies on: links, lengths, a map that shows what is checked ------


ROOT = Path(__file__).parents[3]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")


def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Those of its headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in _LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        place = (page.parent / target).resolve() if target else page
        assert place.exists(), target
        if anchor and place.suffix == ".md":
            assert anchor in anchors(place), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_whole(page: Path) -> None:
    """A row with more or fewer cells than its heading loses some of them."""
    cells = 0
    for line in prose(page).splitlines():
        if not line.startswith("|"):
            cells = 0
            continue
        here = len(re.sub(r"\\\|", "", line).strip().strip("|").split("|"))
        assert here == (cells or here), line
        cells = here


def test_every_page_is_in_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    navigation = yaml.safe_load("nav:" + site.split("\nnav:")[1])["nav"]
    named = set(re.findall(r"[\w/]+\.md", str(navigation)))
    top = {"index.md", "contributing.md", "changelog.md", "security.md"}
    docs = ROOT / "docs"
    assert named == {str(page.relative_to(docs)) for page in docs.glob("**/*.md")} | top


# -- What the pages say of commands, flags and files is so ---------------------------------------


#: The changelog tells of older days.
CURRENT_PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
SOURCES = [
    path
    for folder in ("sg_rlhf", "eval", "configs", "scripts", "lab", "docker", "examples")
    for kind in ("py", "yaml", "sh", "Dockerfile")
    for path in sorted(ROOT.glob(f"{folder}/**/*.{kind}"))
]


@pytest.mark.parametrize("page", CURRENT_PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    for name in re.findall(r"sg-rlhf ([a-z][\w-]*)", page.read_text()):
        assert name in COMMANDS, f"{page.name}: sg-rlhf {name}"


@pytest.mark.parametrize("page", CURRENT_PAGES, ids=lambda page: page.name)
def test_modules_exist(page: Path) -> None:
    for module in re.findall(r"python -m ((?:sg_rlhf|eval|lab|tests)[\w.]*)", page.read_text()):
        assert importlib.util.find_spec(module.rstrip(".")), f"{page.name}: python -m {module}"


def test_pages_that_the_code_names_exist() -> None:
    assert len(SOURCES) > 300
    for source in SOURCES:
        text = source.read_text()
        for name in re.findall(r"\bdocs/[a-z_]+\.md\b", text):
            assert (ROOT / name).exists(), f"{source}: {name}"
        # Decisions by number were of notes that are in no page.
        assert not re.search(r"\.md,? D\d", text), source


def test_flags_of_job_files() -> None:
    page = (ROOT / "docs" / "running.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `--") and "NAME" in line]
    rows += [line for line in page.splitlines() if line.startswith("| `--time")]
    named = {flag for row in rows for flag in re.findall(r"`(--[a-z]+) [A-Z]", row.split("|")[1])}
    assert named == {f"--{name}" for name in USED_BY}


def test_what_the_plain_installation_has() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    row = next(line for line in page.splitlines() if "`pip install .`" in line)
    plain = [name for name, command in COMMANDS.items() if not command.extra]
    assert [name for name in plain if f"`{name}" not in row] == []


# -- Every message that docs/troubleshooting.md explains is one that the code prints -------------


PAGE = ROOT / "docs" / "troubleshooting.md"


def strings(path: Path) -> list[str]:
    """The constant texts of a module; those of an f-string with ``...`` for what it inserts."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [v.value if isinstance(v, ast.Constant) else "..." for v in node.values]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


@functools.cache
def printed() -> str:
    """Every text that the code may print."""
    modules = ROOT.glob("sg_rlhf/**/*.py")
    scripts = [*ROOT.glob("scripts/*.sh"), *ROOT.glob("examples/scripts/*.sh")]
    texts = [text for path in modules for text in strings(path)]
    return "\n".join([*texts, *(path.read_text() for path in scripts)])


def quoted() -> list[str]:
    """Every message in the first column of the tables of messages.

    Cells that do not begin with a message describe a symptom in words.
    """
    messages: list[str] = []
    inside = False
    for line in PAGE.read_text().splitlines():
        inside = line.startswith("| message |") or (inside and line.startswith("|"))
        if inside and line.startswith("| `"):
            messages += re.findall(r"`([^`]+)`", line.split(" | ")[0])
    return [re.sub(r"^(bootstrap|stopped|failed): ", "", message) for message in messages]


def test_the_page_quotes_messages() -> None:
    assert len(quoted()) > 50


@pytest.mark.parametrize("message", quoted())
def test_message_is_printed_by_the_code(message: str) -> None:
    for fragment in re.split(r"\s*\.\.\.\s*", message):
        fragment = fragment.strip()
        assert not fragment or fragment in printed(), fragment


# -- docs/known_problems.md: every test that it names exists in the file that it links -----------


def test_every_row_has_its_test() -> None:
    page = ROOT / "docs" / "known_problems.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| [")]
    assert len(rows) > 10
    for row in rows:
        named = re.findall(r"\[`(test_\w+)`\]\(([^)]+)\)", row)
        assert named, row
        for name, path in named:
            assert f"def {name}(" in (page.parent / path).read_text(), row


# -- The committed notebook is as a reader gets it: no outputs, no paths of a machine ------------


FILE = ROOT / "examples" / "notebooks" / "first_run.ipynb"


def test_it_has_no_outputs_and_no_absolute_paths() -> None:
    notebook = nbformat.read(FILE, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells
    for cell in cells:
        assert cell.outputs == [] and cell.execution_count is None
        compile(cell.source, FILE.name, "exec")
        assert not any(text in cell.source for text in ('"/', "'/"))
    assert notebook.metadata.kernelspec.name == "python3"
