"""The dashboard: one self-contained page at `/`. It holds no secret; it asks for the token and brings it with each call."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Final

from fastapi import FastAPI, Request, Response, WebSocket

from elastic_reshard.supervisor.app import Shell
from elastic_reshard.supervisor.live import Lens, serve_live

__all__ = ["add_page", "page"]

_FILE: Final = Path(__file__).with_name("page.html")
_INLINE: Final = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def page() -> tuple[bytes, dict[str, str]]:
    """The page, and the headers that it goes with: only its own script and style run, and it talks to its own origin only."""
    text = _FILE.read_text(encoding="utf-8")
    digests: dict[str, list[str]] = {"script": [], "style": []}
    for kind, body in _INLINE.findall(text):
        digests[kind].append(f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'")
    policy = (
        f"default-src 'none'; script-src {' '.join(digests['script'])}; style-src {' '.join(digests['style'])}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cross-Origin-Opener-Policy": "same-origin",
    }


def add_page(app: FastAPI, shell: Shell) -> None:
    """Serve `/`, `/metrics` and the WebSocket /v1/live."""
    body, headers = page()
    lens = Lens(shell)

    @app.get("/", include_in_schema=False)
    async def dashboard() -> Response:
        return Response(body, media_type="text/html; charset=utf-8", headers=headers)

    @app.get("/metrics", include_in_schema=False)
    async def metrics(request: Request) -> Response:
        text, kind = shell.metrics.text(request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": kind})

    @app.websocket("/v1/live")
    async def live(socket: WebSocket) -> None:
        await serve_live(lens, socket)
