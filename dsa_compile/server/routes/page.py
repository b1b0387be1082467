"""``/``: a page to chat with the model, one file that loads nothing else."""

import base64
import hashlib
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from dsa_compile.server.service import Service

_FILE = Path(__file__).parents[1] / "static" / "chat.html"


def page_router(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter()
    page = _FILE.read_bytes()
    headers = {
        "content-security-policy": _policy(page.decode()),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }

    @router.get("/", include_in_schema=False)
    async def chat_page() -> Response:
        return Response(page, media_type="text/html", headers=headers)

    return router


def _policy(page: str) -> str:
    """Only the page's own script and style, and requests to this server alone."""

    def own(tag: str) -> str:
        text = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    return (
        "default-src 'none'; connect-src 'self'; img-src data:; form-action 'none'; "
        "base-uri 'none'; frame-ancestors 'none'; "
        f"script-src 'sha256-{own('script')}'; style-src 'sha256-{own('style')}'"
    )
