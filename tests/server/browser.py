"""A real browser for tests of the chat page; they skip where there is none."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDE = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 780}


def _missing() -> str:
    """What a browser test lacks, and how to get it; empty when all is there."""
    if importlib.util.find_spec("playwright") is None:
        return "needs Playwright: pip install -c constraints.txt -e '.[browser]'"
    if not chromium():
        return "needs a Chromium: apt-get install chromium, or set CHROMIUM=/path/to/it"
    return ""


def chromium() -> str | None:
    """The browser's path."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


needs_browser = pytest.mark.skipif(bool(_missing()), reason=_missing())


@contextlib.contextmanager
def open_browser() -> Iterator:
    """Playwright's browser object."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), headless=True, args=list(_FLAGS))
        try:
            yield browser
        finally:
            browser.close()


def screenshot(page, name: str) -> None:
    """Keep a picture in the folder PAGE_SCREENSHOTS, for people to look at; nothing without it."""
    folder = os.environ.get("PAGE_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"{name}.png")
