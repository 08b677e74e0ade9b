"""GET /: a chat page, one file without outside assets."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_SCRIPTS = ("page_store.js", "page_markdown.js", "page_turns.js", "page_reply.js", "page_main.js")


def _assembled() -> bytes:
    """The page with its style and its scripts inside."""

    def part(name: str) -> str:
        return Path(__file__).with_name(name).read_text(encoding="utf-8")

    script = '"use strict";\nconst get = (id) => document.getElementById(id);\n' + "\n".join(map(part, _SCRIPTS))
    page = part("page.html").replace("/* page.css */", part("page.css")).replace("/* page.js */", script)
    return page.encode()


PAGE = _assembled()


def _hashes(tag: str) -> str:
    """CSP sources of the inline blocks of one kind: the browser runs these bytes and no others."""
    blocks = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), PAGE, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(b).digest()).decode()}'" for b in blocks)


HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def page(request: Request) -> Response:
    """The page. It talks to the API as any other client; with keys in use, the user types one."""
    return Response(PAGE, headers=HEADERS, media_type="text/html")
