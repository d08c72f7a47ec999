"""One call in a work pool, as its driver sees it: sent once, found after a restart, waited for, concluded."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar, assert_never, cast
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.context import TagsContext, TaskRunContext
from prefect.exceptions import TerminationSignal
from prefect.states import Crashed
from prefect.utilities.urls import url_for

from prefect_torch_elastic.calls import Call
from prefect_torch_elastic.cancelling import (
    FlowCancelled,
    end_flow,
    flow_runs_here,
    goes_on_elsewhere,
    name_stop,
    wake_flow,
    will_be_killed,
)
from prefect_torch_elastic.dispatch.asides import ask_aside
from prefect_torch_elastic.dispatch.childruns import ChildRequest, find_child, mark_seen, open_child, was_seen
from prefect_torch_elastic.dispatch.childtimes import render_times
from prefect_torch_elastic.dispatch.concluding import conclude_ending, fetch_setback, give_up
from prefect_torch_elastic.dispatch.console import outlive_console
from prefect_torch_elastic.dispatch.endings import StoreEvidence, fetch_ending
from prefect_torch_elastic.dispatch.mirror import StateMirror
from prefect_torch_elastic.dispatch.order import CallKind, render_command
from prefect_torch_elastic.dispatch.phases import Phase
from prefect_torch_elastic.dispatch.polling import insist
from prefect_torch_elastic.dispatch.pools import build_job_variables, check_pool, explain_wait, fetch_pool
from prefect_torch_elastic.dispatch.reprs import short_reprs
from prefect_torch_elastic.dispatch.sending import forget_call, send_call
from prefect_torch_elastic.dispatch.stopping import StopEnd, stop_child
from prefect_torch_elastic.dispatch.verdicts import AWAY_SECONDS
from prefect_torch_elastic.dispatch.waiting import ChildEnd, ChildVerdict, wait_for_child
from prefect_torch_elastic.errors import StoreError
from prefect_torch_elastic.local import GangCancelled
from prefect_torch_elastic.payload import PythonPayload, name_arguments
from prefect_torch_elastic.signing import forget_key
from prefect_torch_elastic.wire import GangStatus

LAST_WORD_SECONDS = 10.0
RECALL_SECONDS = 2.0  # a request that was cut off reaches the API within, or not at all
LEAVE_SECONDS = 15.0  # Prefect's supervisor sends SIGKILL 30 s after SIGTERM; the state has to be reported
API_SECONDS = 2.0  # between two tries; Prefect's client has waited for a minute by then
T = TypeVar("T")

# A mark on the run is for other processes; the API may be away just then, and a retry of ours comes here.
_concluded: set[UUID] = set()


def run_in_pool(run: TaskRunContext, call: Call, payload: PythonPayload) -> Any:
    """Run a call in its work pool and return its value.

    Raises:
        SpecError: If the pool cannot run it.
        GangFailed, GangTimedOut: If its gang ended without a value.
        PoolRunFailed: If its job ended without one, and without an exception that could be raised here.
        Exception: What the body of a `pool_task` raised.
        GangCancelled: If the task was asked to stop; the job is over, or has been told.
    """
    kind = cast("Any", run.task).kind
    outlive_console()  # the wait may take days
    with get_client(sync_client=True) as client:
        dispatch = _Dispatch(run, call, payload, kind, client)
        return dispatch.run()


class _Dispatch:
    def __init__(
        self,
        run: TaskRunContext,
        call: Call,
        payload: PythonPayload,
        kind: CallKind,
        client: SyncPrefectClient,
    ) -> None:
        self._run, self._call, self._payload, self._kind = run, call, payload, kind
        self._client = client
        assert call.spec.work_pool is not None
        spec, pool = call.spec, call.spec.work_pool
        self._pool = self._ask_api(lambda: fetch_pool(client, pool, spec=spec))
        check_pool(self._pool, kind=kind, nnodes=spec.nnodes, max_nodes=spec.max_nodes)
        self._mirror = StateMirror(run.task_run)
        self._in_the_way = ""
        self._unheard: set[UUID] = set()

    def run(self) -> Any:
        """Send the call again as long as its job is lost and the budget lasts."""
        used = 0
        while True:
            used += 1
            child = self._open(used)
            end = self._wait(child)
            self._tell_times(child)
            if end.verdict is ChildVerdict.NOT_STARTED and self._in_the_way:
                end = replace(end, state_message=f"{end.state_message} {self._in_the_way}")
            try:
                if not (reason := self._send_again(end, child, used)):
                    return self._conclude(end, child)
                self._call.log.warning("%s The call is sent again: %s.", end.state_message, reason)
            finally:
                self._leave(child)

    def _open(self, used: int) -> FlowRun:
        """Return the child run that nobody has concluded yet: one of an earlier driver, or a new one."""
        child, number = self._ask_api(self._find)
        if child is not None:
            self._call.log.info("Flow run '%s' runs this call already: it is waited for.", child.name)
            return child
        try:
            request = self._request(used)
            child = self._ask_api(lambda: open_child(self._client, request, number=number))
        except Exception:  # nobody will fetch it
            self._forget()
            raise
        except BaseException as error:
            self._recall(error, number=number)
            raise
        sent = f"Sent to work pool `{self._pool.name}` as flow run '{child.name}'"
        self._call.log.info("%s", f"{sent}: {url}" if (url := url_for(child)) else f"{sent}.")
        return child

    def _find(self) -> tuple[FlowRun | None, int]:
        """Return the child to wait for and its number, or no child and the number of the next one."""
        number, digest = 0, self._call.identity.digest
        while child := find_child(self._client, digest, number=number):
            is_usable = child.state is not None and not child.state.is_cancelled()
            if is_usable and not was_seen(child) and child.id not in _concluded:
                return child, number
            number += 1
        return None, number

    def _ask_api(self, ask: Callable[[], T]) -> T:
        """Return what the API answers; one that is away is waited for, as it is while the child runs."""
        call = self._call

        def ask_unless_cancelled() -> T:
            if call.patience.cancelled():
                raise GangCancelled("The task was asked to stop before its work pool was asked.")
            return ask()

        def say(outage: str) -> None:
            call.log.warning("The Prefect API does not answer (%s); it is asked again.", outage)

        return insist(ask_unless_cancelled, seconds=AWAY_SECONDS, pause_seconds=API_SECONDS, say=say)

    def _request(self, used: int) -> ChildRequest:
        call = self._call
        left = call.spec.max_attempts - (used - 1)
        reference = send_call(call, self._payload, kind=self._kind, max_attempts=left)
        nproc = call.spec.nproc_per_node if self._kind is CallKind.GANG else None
        command = render_command(reference, nproc_per_node=nproc)
        spec = replace(call.spec, max_attempts=left)
        job = build_job_variables(self._pool, command=command, spec=spec, kind=self._kind)
        if job.ignored:
            names = ", ".join(f"`{name}`" for name in job.ignored)
            text = "Work pool `%s` has no job variable for %s, which has no effect there."
            call.log.warning(text, self._pool.name, names)
        arguments = name_arguments(self._payload.function, self._payload.args, self._payload.kwargs)
        return ChildRequest(
            task_name=call.task_name,
            run_name=call.task_run_name,
            parameters=short_reprs(arguments),
            pool=self._pool.name,
            job_variables=job.values,
            digest=call.identity.digest,
            task_run_id=UUID(call.task_run_id),
            flow_run_id=UUID(call.flow_run_id) if call.flow_run_id else None,
            tags=frozenset(TagsContext.get().current_tags),
        )

    def _wait(self, child: FlowRun) -> ChildEnd:
        call = self._call
        try:
            return wait_for_child(
                child.id,
                pool=self._pool,
                parent_flow_run_ids=flow_runs_here() if call.flow_run_id else [],
                evidence=StoreEvidence(record=call.record, child_id=child.id),
                explain=self._explain,
                mirror=self._mirror,
                log=call.log,
                cancelled=call.patience.cancelled,
                start_within_seconds=call.spec.inadmissible_grace_seconds,
            )
        except BaseException as error:  # timeouts, cancellation and Ctrl-C of Prefect arrive as any exception
            self._give_up(child, error)
            raise

    def _tell_times(self, child: FlowRun) -> None:
        """Say how long a run that is over waited in the queue of its cluster, if it did."""
        if not self._pool.starts_gangs_again:
            return
        answer = self._ask_aside(lambda client: client.read_flow_run_states(child.id))
        if isinstance(answer, Exception):
            return
        if said := render_times(answer, until=datetime.now(UTC)):
            self._call.log.info("%s", said)

    def _recall(self, error: BaseException, *, number: int) -> None:
        """Stop a child that was just ordered: the API may have heard it, and its answer was cut off."""
        digest = self._call.identity.digest
        until, found = time.monotonic() + RECALL_SECONDS, None
        while time.monotonic() < until:
            found = self._ask_aside(lambda client: find_child(client, digest, number=number))
            if isinstance(found, FlowRun):
                return self._give_up(found, error)
            time.sleep(API_SECONDS / 4)
        if found is None and not goes_on_elsewhere(error):  # an API that is away may have opened it
            self._forget()
        return None

    def _give_up(self, child: FlowRun, error: BaseException) -> None:
        """Stop a child that nobody waits for any more."""
        if goes_on_elsewhere(error):
            return  # the next process of this flow run finds it
        reason, is_short = name_stop(error), will_be_killed(error)
        try:
            if isinstance(error, FlowCancelled):
                wake_flow(error)
            self._stop(child, reason, leave_after_seconds=LEAVE_SECONDS if is_short else None)
        except TerminationSignal:  # whoever cancels the flow tells its process too, as soon as they know
            self._stop(child, reason, leave_after_seconds=LEAVE_SECONDS)
            raise
        finally:
            self._leave(child)
        if isinstance(error, FlowCancelled):
            end_flow(error, given_up=self._call.patience.cancelled, log=self._call.log)

    def _stop(self, child: FlowRun, reason: str, *, leave_after_seconds: float | None = None) -> None:
        self._mirror.show(Phase.STOPPING, reason)
        self._unheard.add(child.id)  # until the API has heard it
        end = stop_child(
            child.id,
            reason=reason,
            grace_seconds=self._call.spec.grace_seconds,
            log=self._call.log,
            leave_after_seconds=leave_after_seconds,
        )
        if end is not StopEnd.UNHEARD:
            self._unheard.discard(child.id)

    def _explain(self, client: SyncPrefectClient) -> str:
        self._in_the_way = explain_wait(fetch_pool(client, self._pool.name))
        return self._in_the_way

    def _send_again(self, end: ChildEnd, child: FlowRun, used: int) -> str:
        """Return why the call is sent again after a job that is gone, empty when it is not.

        A gang goes on from its checkpoint; a plain function may have done half of its work, so that is for
        the retries of the task to say.
        """
        if end.verdict is ChildVerdict.NOT_STARTED:  # a worker that comes later must not take it
            self._stop(child, end.state_message)
        if end.verdict is ChildVerdict.LOST:  # for the UI: nobody else knows
            crashed = Crashed(message=end.state_message)
            self._tell_api(child, lambda client: client.set_flow_run_state(child.id, crashed, force=True))
        is_gone = end.verdict in (ChildVerdict.CRASHED, ChildVerdict.LOST)
        most = self._call.spec.max_attempts
        if not is_gone or self._kind is CallKind.BODY or used >= most or self._has_ended(child):
            return ""
        return f"attempt {used + 1} of {most}"

    def _has_ended(self, child: FlowRun) -> bool:
        evidence = StoreEvidence(record=self._call.record, child_id=child.id)
        return self._call.patience.wait_for(evidence.has_ending)

    def _conclude(self, end: ChildEnd, child: FlowRun) -> Any:
        call = self._call
        ending = call.patience.wait_for(lambda: fetch_ending(call.record, child.id))
        # a child that started when its time was over was stopped by us; nobody has cancelled it
        is_late = end.verdict is ChildVerdict.NOT_STARTED
        if ending is not None and not (is_late and ending.status is GangStatus.STOPPED):
            return conclude_ending(call, ending, child)
        if ending is None and (setback := fetch_setback(call, end, child)):
            return conclude_ending(call, setback, child)
        forget_key()  # a job that trusts nothing of ours leaves none; the next try has to know what it knows
        match end.verdict:
            case ChildVerdict.CANCELLED:
                raise GangCancelled(end.state_message)
            case ChildVerdict.ENDED | ChildVerdict.CRASHED | ChildVerdict.LOST | ChildVerdict.NOT_STARTED:
                raise give_up(end, child, kind=self._kind, pool=self._pool.name)
            case _:
                assert_never(end.verdict)

    def _leave(self, child: FlowRun) -> None:
        """Let the next try of the task open another child, and remove what only this one needed.

        One that could not be stopped needs it still, and the next try finds it.
        """
        if child.id in self._unheard:
            return
        _concluded.add(child.id)
        self._tell_api(child, lambda client: mark_seen(client, child.id))
        self._forget()

    def _forget(self) -> None:
        call = self._call
        with suppress(StoreError):  # what is left is removed with the run
            call.patience.wait_for(lambda: forget_call(call), seconds=LAST_WORD_SECONDS)

    def _tell_api(self, child: FlowRun, work: Callable[[SyncPrefectClient], Any]) -> None:
        """Tell the API something about a child that is over; it may be away, and nobody waits long for it."""
        answer = self._ask_aside(work)
        if isinstance(answer, Exception):
            text = "The Prefect API was not told about flow run '%s': %s"
            self._call.log.warning(text, child.name, answer)

    def _ask_aside(self, ask: Callable[[SyncPrefectClient], Any]) -> Any:
        return ask_aside(ask, seconds=LAST_WORD_SECONDS)
