"""Who may send what: host names, API keys and body sizes, checked before anything is parsed.

Plain ASGI, so that it holds for every path, known or not. Knows nothing of what a path does.
"""

from __future__ import annotations

import hmac
import json
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotset.core.units import format_bytes
from hotset.server.config import ServerConfig
from hotset.server.errors import Problem

# Open without a key: a probe has none, and a browser asks for its key on the page.
OPEN_PATHS = frozenset({"/", "/health", "/favicon.ico"})
OPEN_FOLDER = "/static/"


class Guard:
    """Refuses what a server must not take, and passes everything else on.

    Args:
        app: what is guarded.
        config: keys, names and limits.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app, self._config = app, config
        self._keys = [key.encode() for key in config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        problem = (
            self._long_head(scope)
            or self._wrong_host(headers)
            or self._wrong_key(scope["path"], headers)
            or self._too_large(headers)
        )
        if problem is not None:
            await _refuse(problem, scope["path"], send)
            return
        if scope["method"] == "HEAD":  # of which the HTTP server sends no more than the head
            scope = {**scope, "method": "GET"}
        await self._app(scope, self._counted(receive), send)

    def _long_head(self, scope: Scope) -> Problem | None:
        """The parser's own limit holds only for what comes in several pieces."""
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if (
            size + len(scope["raw_path"]) + len(scope["query_string"])
            <= self._config.max_header_bytes
        ):
            return None
        limit = format_bytes(self._config.max_header_bytes)
        return Problem(431, f"the request's head is larger than {limit}", code="head_too_large")

    def _wrong_host(self, headers: Headers) -> Problem | None:
        if not self._config.loopback:
            return None
        name = _host_name(headers.get("host", ""))
        if name == "localhost" or name in self._config.allowed_hosts or _is_loopback(name):
            return None
        message = f"the host name `{name}` is not allowed; start with `--allowed-host {name}`"
        return Problem(403, message, code="host_not_allowed")

    def _wrong_key(self, path: str, headers: Headers) -> Problem | None:
        if not self._keys or path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
            return None
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = headers.get("x-api-key") or (bearer if scheme.lower() == "bearer" else "")
        if not given:
            return Problem(
                401,
                "an API key is missing; send `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="invalid_api_key",
            )
        # Every key is compared, each in constant time: how long it takes tells nothing.
        found = [hmac.compare_digest(given.encode(), key) for key in self._keys]
        return None if any(found) else Problem(401, "wrong API key", code="invalid_api_key")

    def _too_large(self, headers: Headers) -> Problem | None:
        length = headers.get("content-length", "0")
        if not length.isdecimal():
            return Problem(400, "`Content-Length` is no number")
        return self._oversize() if int(length) > self._config.max_body_bytes else None

    def _oversize(self) -> Problem:
        limit = format_bytes(self._config.max_body_bytes)
        return Problem(413, f"the body is larger than {limit}", code="body_too_large")

    def _counted(self, receive: Receive) -> Receive:
        """Bodies without a length are counted as they come."""
        total = 0

        async def counted() -> Message:
            nonlocal total
            message = await receive()
            if message["type"] == "http.request":
                total += len(message.get("body", b""))
                if total > self._config.max_body_bytes:
                    raise HTTPException(413, self._oversize().message)
            return message

        return counted


def _host_name(host: str) -> str:
    """Of `name:port`, `[::1]:port`, or either without a port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


def _is_loopback(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


async def _refuse(problem: Problem, path: str, send: Send) -> None:
    body = json.dumps(problem.body(path)).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    headers += [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
