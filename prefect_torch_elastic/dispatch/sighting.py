"""What one look at the API shows of a child run, of the flow run that waits for it, and of its pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound, PrefectException

from prefect_torch_elastic.dispatch.mirror import LogFollower
from prefect_torch_elastic.errors import SpecError

PARENT_SECONDS = 2.0
POOL_SECONDS = 10.0
MOST_LAST_POLLS = 20
MOST_FAILURES = 3  # in a row, before it is said; one look may meet a server that restarts


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What one look at the API showed.

    Attributes:
        run: The child run; None if it was deleted.
        cancelled_run: The flow run around the task that is being cancelled, None as long as none is.
        cancelled_state: The name of its state.
        wait_reason: Why no worker takes the child, empty when nothing is in the way.
        troubles: What could not be read again and again.
    """

    run: FlowRun | None
    cancelled_run: UUID | None
    cancelled_state: str
    wait_reason: str
    troubles: tuple[str, ...]


class ApiEyes:
    """Looks at everything that a wait wants to know from the API; all of it runs in the caller's thread."""

    def __init__(
        self,
        child_id: UUID,
        *,
        parent_ids: Sequence[UUID],
        pool: str,
        explain: Callable[[SyncPrefectClient], str],
        log: Any,
        clock: Callable[[], float],
    ) -> None:
        self._child_id, self._pool, self._parent_ids, self._explain = child_id, pool, parent_ids, explain
        self._log, self._clock = log, clock
        self._follower: LogFollower | None = None
        self._due: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._wait_reason = self._cancelled_state = ""
        self._cancelled_run: UUID | None = None

    def look(self, client: SyncPrefectClient) -> Sight:
        """Read the child run first: whatever else cannot be read does not keep the wait from ending."""
        try:
            run = client.read_flow_run(self._child_id)
        except ObjectNotFound:
            run = None
        state_type = read_state(run)[0]
        troubles = [self._try("flow run of this task", PARENT_SECONDS, self._read_parents, client)]
        if state_type == "SCHEDULED":
            troubles.append(self._try("work pool", POOL_SECONDS, self._read_pool, client))
        else:
            self._wait_reason = ""
            troubles.append(self._try("log of the child run", 0.0, self._read_lines, client))
        return Sight(
            run=run,
            cancelled_run=self._cancelled_run,
            cancelled_state=self._cancelled_state,
            wait_reason=self._wait_reason,
            troubles=tuple(filter(None, troubles)),
        )

    def read_rest(self, client: SyncPrefectClient) -> None:
        """Print the child's last lines; the host sends them before it reports the end of the run."""
        self._try("log of the child run", 0.0, self._read_all_lines, client)

    def _try(self, what: str, every: float, read: Callable[[SyncPrefectClient], Any], client: Any) -> str:
        """Read something that the wait can do without, and return what to say if it fails again and again."""
        now = self._clock()
        if now < self._due.get(what, now):
            return ""
        self._due[what] = now + every
        try:
            read(client)
        except (httpx.HTTPError, PrefectException, ValueError) as error:
            self._failures[what] = self._failures.get(what, 0) + 1
            first_line = f"{type(error).__name__}: {error}".splitlines()[0]
            return (
                f"The {what} cannot be read ({first_line})." if self._failures[what] == MOST_FAILURES else ""
            )
        self._failures[what] = 0
        return ""

    def _read_parents(self, client: SyncPrefectClient) -> None:
        missing: ObjectNotFound | None = None
        for parent_id in self._parent_ids:
            try:
                state, name, _ = read_state(client.read_flow_run(parent_id))
            except ObjectNotFound as error:  # somebody deleted it; the others count all the same
                missing = error
                continue
            if state in ("CANCELLING", "CANCELLED"):
                self._cancelled_run, self._cancelled_state = parent_id, name
                return
        if missing is not None:
            raise missing

    def _read_pool(self, client: SyncPrefectClient) -> None:
        try:
            self._wait_reason = self._explain(client)
        except SpecError as error:  # the pool was deleted meanwhile
            self._wait_reason = str(error)

    def _read_lines(self, client: SyncPrefectClient) -> int:
        if self._follower is None:
            self._follower = LogFollower(client, self._child_id, self._log, source=self._pool)
        return self._follower.poll()

    def _read_all_lines(self, client: SyncPrefectClient) -> None:
        for _ in range(MOST_LAST_POLLS):  # whoever waits for this waits for seconds, and then goes on
            if not self._read_lines(client):
                return


def read_state(run: FlowRun | None) -> tuple[str, str, str]:
    """Return type, name and message of a run's state, empty if there is none."""
    if run is None or run.state is None:
        return "", "", ""
    return run.state.type.value, run.state.name or "", run.state.message or ""
