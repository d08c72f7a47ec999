"""Checkpoints and the models that runs end with as Prefect assets: which key they have, and their events."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prefect_torch_elastic.artifacts.gangevents import PREFIX, EventSource, GangEvent, render_related

MATERIALIZED = "prefect.asset.materialization.succeeded"
MAX_KEY_CHARACTERS = 512
_SCHEMES = ("file", "s3", "gs", "az")
_FORBIDDEN = "\n\r\t\0 #?&%\"'<>[]{}|\\^`"  # by Prefect, of which some versions accept a few of them


def render_asset_key(store_url: str, *names: str) -> str:
    """Return the address of something in a store as a key of an asset; empty if it cannot be one.

    Args:
        store_url: The store: a URL or a directory. User, password and options of a URL do not get in.
        names: Of folders below it.
    """
    if "://" not in store_url:
        store_url = f"file://{Path(store_url).absolute()}"
    parts = urlsplit(store_url)
    host = parts.netloc.rpartition("@")[2]
    path = "/".join([parts.path.strip("/"), *names]).strip("/")
    key = f"{parts.scheme}://{host}/{path}"
    if parts.scheme not in _SCHEMES or len(key) > MAX_KEY_CHARACTERS or any(c in key for c in _FORBIDDEN):
        return ""
    return key


def render_materialization(key: str, source: EventSource, *, name: str, **metadata: Any) -> GangEvent:
    """Return the event by which Prefect knows that an asset was made."""
    tool = {"prefect.resource.id": PREFIX, "prefect.resource.role": "asset-materialized-by"}
    return GangEvent(
        event=MATERIALIZED,
        resource={"prefect.resource.id": key, "prefect.resource.name": name},
        related=[*render_related(source), tool],
        payload=metadata,
    )
