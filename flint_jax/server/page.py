"""GET /: a chat page, one file without outside assets."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_PAGE = Path(__file__).with_name("page.html").read_bytes()


def _hashes(tag: str) -> str:
    """CSP sources of the inline blocks of one kind: the browser runs these bytes and no others."""
    blocks = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), _PAGE, re.DOTALL)
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
    return Response(_PAGE, headers=HEADERS, media_type="text/html")
