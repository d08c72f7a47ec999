"""The thread that watches this process's flow run: it looks for a stop, and says that the run is alive."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

import prefect
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.events.related import tags_as_related_resources
from prefect.events.schemas.events import RelatedResource
from prefect.events.utilities import emit_event
from prefect.settings import get_current_settings

from prefect_torch_elastic.dispatch.polling import open_client
from prefect_torch_elastic.hosting.asking import Outage

LOOK_SECONDS = 2.0
_LEAST_HEARTBEAT_SECONDS = 30  # as Prefect's engine has it
_LEAVE_SECONDS = 1.0

_log = logging.getLogger(__name__)


class RunWatcher(AbstractContextManager["RunWatcher"]):
    """Calls `look` every two seconds in a thread, and sends Prefect's heartbeat of the run.

    Args:
        run: The flow run.
        look: Reads it from the API; what it raises is an outage, or a line in the log.
        outage: Tells when the API goes away and when it is back.
    """

    def __init__(self, run: FlowRun, *, look: Callable[[SyncPrefectClient], Any], outage: Outage) -> None:
        self._run, self._look, self._outage = run, look, outage
        self._over = False
        self._wake: SimpleQueue[None] = SimpleQueue()  # the one thing that a signal handler may wake us with
        # Prefect's settings are in the context, and a thread begins with an empty one
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=[self._serve], name="own-run", daemon=True)

    def __enter__(self) -> RunWatcher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over = True
        self._wake.put(None)
        self._thread.join(_LEAVE_SECONDS)  # a request that hangs is not waited for: the thread is a daemon

    def look_now(self) -> None:
        """Look at once; a signal handler may call this."""
        self._wake.put(None)

    def _serve(self) -> None:
        every = heartbeat_seconds()
        next_heartbeat = time.monotonic()
        with open_client() as client:
            while not self._over:
                pause = self._look_once(client)
                if every is not None and time.monotonic() >= next_heartbeat:
                    next_heartbeat = time.monotonic() + every
                    send_heartbeat(self._run)
                with suppress(Empty):
                    self._wake.get(timeout=pause)

    def _look_once(self, client: SyncPrefectClient) -> float:
        """Look, and return how long to wait before the next time."""
        try:
            self._look(client)
        except Exception as error:  # noqa: BLE001  (the next look may succeed)
            if not self._outage.begins(error):
                _log.warning("This run cannot be read: %s: %s", type(error).__name__, error)
            return max(LOOK_SECONDS, self._outage.next_pause())
        self._outage.ends()
        return LOOK_SECONDS


def heartbeat_seconds() -> float | None:
    """Return what Prefect's settings say about heartbeats of flow runs; None sends none."""
    every = get_current_settings().flows.heartbeat_frequency
    return None if every is None else max(every, _LEAST_HEARTBEAT_SECONDS)


def send_heartbeat(run: FlowRun) -> None:
    """Send the event that Prefect's engine sends for a run that it carries out; automations wait for it."""
    flow = {"prefect.resource.id": f"prefect.flow.{run.flow_id}", "prefect.resource.role": "flow"}
    try:
        emit_event(
            event="prefect.flow-run.heartbeat",
            resource={
                "prefect.resource.id": f"prefect.flow-run.{run.id}",
                "prefect.resource.name": run.name,
                "prefect.version": prefect.__version__,
            },
            related=[RelatedResource(flow), *tags_as_related_resources(set(run.tags))],
        )
    except Exception as error:  # noqa: BLE001  (the next one is due soon)
        _log.debug("The heartbeat was not sent: %s", error)
