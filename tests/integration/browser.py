"""A real headless browser for the report page, and what it may not do while a page is open."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

#: Debian's name first.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NO_BROWSER = "no Chromium on this machine: apt-get install chromium"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


def executable() -> str | None:
    """The path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Opened:
    """A page, and what it did that a self-contained page does not do."""

    page: Page
    complaints: list[str] = field(default_factory=list)


@contextmanager
def started() -> Iterator[Browser]:
    """A browser, to the end of the block."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=list(FLAGS))
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Browser,
    page_at: Path | str,
    *,
    width: int = 1280,
    height: int = 900,
    dark: bool = False,
    loading: float = 30_000,
) -> Iterator[Opened]:
    """A page in a new profile of the browser.

    Args:
        page_at: its file, or its address, below which alone it may make requests.
        loading: milliseconds until it is loaded.
    """
    url = page_at.as_uri() if isinstance(page_at, Path) else page_at
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
    )
    page = context.new_page()
    found = Opened(page)
    page.on("console", lambda m: found.complaints.append(f"console {m.type}: {m.text}"))
    page.on("pageerror", lambda error: found.complaints.append(f"error: {error}"))
    page.on("dialog", lambda dialog: found.complaints.append(f"dialog: {dialog.message}"))
    page.on(
        "request",
        lambda request: (
            found.complaints.append(f"request: {request.url[:200]}")
            if not request.url.startswith((url, "data:"))
            else None
        ),
    )
    page.goto(url, timeout=loading)
    try:
        yield found
    finally:
        context.close()
