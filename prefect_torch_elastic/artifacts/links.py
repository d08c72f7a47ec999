"""Where people find an artifact: Prefect's UI has two versions, and older servers have one."""

from __future__ import annotations

from urllib.parse import urlsplit
from uuid import UUID

import httpx

ASK_SECONDS = 3.0
_PATH = "artifacts/artifact"


def fetch_base(ui_url: str, *, transport: httpx.BaseTransport | None = None) -> str:
    """Return the address of the newer UI of a server, or `ui_url` itself where there is none.

    The newer one shows more of a page, and a link without its name opens the older one.

    Args:
        ui_url: Prefect's setting; empty without a UI.
        transport: For tests.

    Raises:
        httpx.RequestError: If the server does not answer.
    """
    if not ui_url:
        return ""
    ui_url = ui_url.rstrip("/")
    with httpx.Client(timeout=ASK_SECONDS, transport=transport) as client:
        answer = client.get(f"{ui_url}/ui-settings")
    try:
        path = answer.json().get("v2_base_url") if answer.is_success else None
    except (ValueError, AttributeError):  # a page of a proxy, or of another UI
        path = None
    if not isinstance(path, str) or not path.startswith("/"):
        return ui_url
    parts = urlsplit(ui_url)
    return f"{parts.scheme}://{parts.netloc}{path.rstrip('/')}"


def render_link(base: str, artifact_id: UUID) -> str:
    """Return the address of an artifact's page, empty without a UI."""
    return f"{base}/{_PATH}/{artifact_id}" if base else ""
