"""What the driver shows of a child run: named states on its own task run, and the child's log lines."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import LogFilter
from prefect.client.schemas.objects import Log, State, TaskRun
from prefect.client.schemas.sorting import LogSort
from prefect.states import Running

from prefect_torch_elastic import compat
from prefect_torch_elastic.dispatch.phases import Phase
from prefect_torch_elastic.kubernetes.phases import GangPhase

PAGE_LINES = 200  # what a server gives at most for one request
MOST_NEW_PAGES = 5  # for one poll: whoever waits behind it must not wait long
# Lines of several processes arrive in batches of seconds, each with the clock of its machine: one with an
# older time than the newest may still come. A run that says a lot is read back less far.
OVERLAP = timedelta(seconds=60)
OVERLAP_LINES = 400
MOST_MESSAGE = 1000


class StateMirror:
    """Shows phases as named states of a running task run; its retries and run count stay as they are.

    Call it in the context of the task run: Prefect reads from there which flow run the task belongs to.

    Args:
        task_run: The object that Prefect's engine works with (`TaskRunContext.get().task_run`). Its state is
            read and never set: the engine computes the run time from the state it set itself.
    """

    def __init__(self, task_run: TaskRun) -> None:
        self._task_run = task_run
        self._shown: tuple[Phase | GangPhase, str] | None = None
        self._state: State[Any] | None = task_run.state
        self._event: Any = None

    def show(self, phase: Phase | GangPhase, message: str) -> None:
        """Show a phase once per change; an API that is away is no error here."""
        if (phase, message) == self._shown:
            return
        self._shown = (phase, message)
        # Always of type Running: the task runs, and whatever it shows last is followed by its end.
        state = Running(name=str(phase), message=message[:MOST_MESSAGE])
        self._event = compat.emit_task_state(self._task_run, self._state, state, follows=self._event)
        self._state = state


class LogFollower:
    """Prints the new log lines of a run on the console of this process, in order and each one once.

    They are in the API already, on the page of that run, so they are not sent there again.

    Args:
        client: Asks the API; only `poll` uses it.
        flow_run_id: The run.
        logger: The logger of the task run.
        source: What stands before each line, such as the pool's name.
        since: Lines from before this time are left out.
    """

    def __init__(
        self,
        client: SyncPrefectClient,
        flow_run_id: UUID,
        logger: Any,
        *,
        source: str = "",
        since: datetime | None = None,
    ) -> None:
        self._client, self._flow_run_id, self._logger = client, flow_run_id, logger
        self._prefix = f"[{source}] " if source else ""
        self._after = since
        self._printed: dict[UUID, datetime] = {}

    def poll(self) -> int:
        """Print what is new and return how many lines that were; raises what the client raises."""
        count = offset = news = 0
        while news < MOST_NEW_PAGES:
            lines = self._read_page(offset)
            offset += len(lines)
            if new := self._print(lines):
                count, news = count + new, news + 1
            if len(lines) < PAGE_LINES:
                break
        self._forget_old()
        return count

    def _read_page(self, offset: int) -> list[Log]:
        return self._client.read_logs(
            log_filter=LogFilter.model_validate(
                {
                    "flow_run_id": {"any_": [self._flow_run_id]},
                    "timestamp": {"after_": self._after} if self._after else None,
                }
            ),
            limit=PAGE_LINES,
            offset=offset,
            sort=LogSort.TIMESTAMP_ASC,
        )

    def _print(self, lines: list[Log]) -> int:
        new = [line for line in lines if line.id not in self._printed]
        for line in new:
            self._printed[line.id] = line.timestamp
            self._logger.log(line.level, "%s%s", self._prefix, line.message, extra={"send_to_api": False})
        return len(new)

    def _forget_old(self) -> None:
        """Begin the next poll a little before the newest line, and forget what lies before that."""
        if not self._printed:
            return
        times = sorted(self._printed.values(), reverse=True)
        self._after = max([times[0] - OVERLAP, *times[OVERLAP_LINES - 1 : OVERLAP_LINES]])
        self._printed = {key: at for key, at in self._printed.items() if at >= self._after}
