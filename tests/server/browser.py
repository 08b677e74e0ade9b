"""A real browser for tests of the chat page; they skip where there is none."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.fake_engine import Script
from tests.server.harness import tokenizer

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
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
TOOLS = json.dumps([{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}])

MARKDOWN = """# Title

Some **bold**, *slanted*, `code <b>` and [a link](https://example.org/x_(y)).
1. one
2. two
   - inner

| a | b |
|---|---|
| 1 | `x|y` |

> quoted

```python
def f():
    return "<script>"
```
"""


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


def send(page, text, *, wait=True):
    """Type a message, press Enter, and wait for the end of the reply."""
    page.locator("#input").fill(text)
    page.keyboard.press("Enter")
    if wait:
        idle(page)


def idle(page) -> None:
    """Wait for the end of the reply."""
    page.locator("#send").wait_for(state="visible")


def texts(page, selector) -> list[str]:
    """What all elements show."""
    return page.locator(selector).all_inner_texts()


def answers(server, *replies, **how) -> None:
    """Reply by reply; the last one again and again."""
    left = [tokenizer().encode(r) for r in replies]
    server.engine.script = lambda prompt, params: Script(left.pop(0) if len(left) > 1 else left[0], **how)


def with_tools(page) -> None:
    """Offer the tool ``look``."""
    page.locator("#open").click()
    page.locator("#tools").fill(TOOLS)
    page.get_by_role("button", name="Done").click()
