"""What makes the site of the pages that GitHub shows too: links out of docs/, and formulas.

A page in docs/ links to files elsewhere in the repository (``../lab/bench/claims.py``). Each file
so linked becomes part of the site, in its own folder: Markdown and code as pages, the rest as
it is, a folder as a list. A link to nothing is a warning, which ``mkdocs build --strict`` refuses.
Formulas become MathML while the site is built, so that no page loads a script from elsewhere.
"""

from __future__ import annotations

import html
import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

log = logging.getLogger("mkdocs.hooks.site")
ROOT = Path(__file__).parents[2]
#: Pages that live at the top of the repository, and their places in the site.
AT_THE_TOP = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
#: The language that a file is shown in; other files are copied.
CODE = {
    ".py": "python",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".sh": "bash",
    ".cfg": "ini",
    ".cff": "yaml",
}
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[\[(](.*?)\\[\])]</\1>', re.DOTALL)
_THIN = '<mspace width="0.17em"/>'

#: Path in the repository -> path in the site.
places: dict[str, str] = {}


def in_docs(path: str) -> bool:
    """Whether mkdocs has the file already; code it leaves out (`exclude_docs`)."""
    return path.startswith("docs/") and not path.endswith(".py")


def place(path: str) -> str:
    """Where a file of the repository is in the site."""
    if in_docs(path):
        return path.removeprefix("docs/")
    if path in AT_THE_TOP:
        return AT_THE_TOP[path]
    source = ROOT / path
    if source.is_dir():
        return f"source/{path}/index.md"
    return f"source/{path}" + (".md" if source.suffix in CODE else "")


def links(text: str) -> list[str]:
    """The local files that a page links to, as it writes them."""
    prose = _FENCE.sub("", text)
    return [target for target, _ in _LINK.findall(prose) if not re.match(r"[a-z]+:|/", target)]


def resolve(page: str, target: str) -> str:
    """The path in the repository of what ``page`` calls ``target``."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def content(path: str) -> str:
    """What the site shows of a file that has no page of its own."""
    source = ROOT / path
    if source.is_dir():
        names = sorted(entry.name for entry in source.iterdir())
        listed = "\n".join(f"- `{name}`" for name in names)
        return f"# {path}\n\nThe files of this folder of the repository:\n\n{listed}\n"
    if source.suffix in CODE:
        return f"# {path}\n\n~~~{CODE[source.suffix]}\n{source.read_text()}~~~\n"
    return source.read_text()


def on_files(files: Files, config: Any) -> Files:
    """Add what is linked and lies outside docs/, and what those pages link in turn."""
    places.clear()
    todo = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    todo += list(AT_THE_TOP)
    while todo:
        path = todo.pop()
        if path in places:
            continue
        places[path] = place(path)
        source = ROOT / path
        if not source.exists():
            continue  # mkdocs itself warns of the link
        if not in_docs(path):
            if places[path].endswith(".md"):
                files.append(File.generated(config, places[path], content=content(path)))
            else:
                files.append(File.generated(config, places[path], abs_src_path=str(source)))
        if path.endswith(".md"):
            todo += [resolve(path, target) for target in links(source.read_text())]
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links of the repository at the site's own places."""
    here = page.file.src_uri
    # Code and results are linked, not searched: they would hide the pages that explain them.
    if here.startswith("source/") and not here.startswith("source/examples/"):
        page.meta["search"] = {"exclude": True}
    origin = next((path for path, where in places.items() if where == here), None)
    if origin is None or not origin.endswith(".md"):
        return markdown

    def moved(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        if re.match(r"[a-z]+:|/", target):
            return match[0]
        path = resolve(origin, target)
        if not (ROOT / path).exists():
            log.warning("%s links to %s, which is not there", origin, target)
            return match[0]
        return posixpath.relpath(place(path), posixpath.dirname(here)) + anchor

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(moved, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(moved, markdown[end:])])


def on_page_content(text: str, **_: Any) -> str:
    """LaTeX as MathML."""

    def formula(match: re.Match[str]) -> str:
        display = "block" if match[1] == "div" else "inline"
        found = convert(html.unescape(match[2]).strip(), display=display)
        # "log p", not "logp": browsers put no space between a function and its argument.
        return re.sub(r"(<m[io]>(?:log|min|max)</m[io]>)(?=<m(?:i|sub)>)", r"\1" + _THIN, found)

    return _FORMULA.sub(formula, text)
