"""`/`: the page for browsers, a handful of files of the package. Knows nothing of what they show.

They are read once, and served by name: no path of a request is ever one of the disk. The browser
is told to load nothing from anywhere else, and to run no script that is not one of them.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Response
from starlette.exceptions import HTTPException

from hotset.server.guard import OPEN_FOLDER

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def routes() -> APIRouter:
    """The page, its files, and its icon."""
    router = APIRouter(include_in_schema=False)
    files = {path.name: path.read_bytes() for path in sorted(_FOLDER.iterdir())}

    def send(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, f"there is no file `{name}`")
        return Response(files[name], media_type=_TYPES[Path(name).suffix], headers=_HEADERS)

    @router.get("/")
    async def page() -> Response:
        return send("index.html")

    @router.get(OPEN_FOLDER + "{name}")
    async def static(name: str) -> Response:
        return send(name)

    @router.get("/favicon.ico")
    async def icon() -> Response:
        return send("icon.svg")

    return router
