"""What a reader of the pages relies on: links, lengths, a map that shows what is checked."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

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


@pytest.mark.parametrize("script", ["make_map.py", "make_processes.py"])
def test_a_picture_of_the_code_is_up_to_date(script: str) -> None:
    subprocess.run([sys.executable, f"docs/{script}", "--check"], cwd=ROOT, check=True)
