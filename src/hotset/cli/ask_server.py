"""Pages of a running server: asked for with its key.

Knows HTTP; what a page says, and what becomes of a server that refuses, is the caller's business.
"""

from __future__ import annotations

import json
from http.client import HTTPResponse
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen


def open_page(
    page: str, *, api_key: str | None, seconds: float, body: dict[str, Any] | None = None
) -> HTTPResponse:
    """What a server answers, to be read and closed.

    Args:
        api_key: that it asks for.
        seconds: without a byte, after which it counts as silent.
        body: sent as JSON; without one the page is only read.

    Raises:
        HTTPError: it refuses.
        URLError, OSError, HTTPException: it does not answer.
    """
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    opened: HTTPResponse = urlopen(Request(page, data, headers), timeout=seconds)
    return opened


def key_hint(error: HTTPError) -> str | None:
    """What to do about a refusal for want of a key; `None` for any other."""
    return "give its key with `--api-key`, or HOTSET_API_KEY" if error.code == 401 else None
