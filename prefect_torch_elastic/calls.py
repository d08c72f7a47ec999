"""One call of an elastic task, resolved in the driver before anything starts: gang, run, and store."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging import get_run_logger
from prefect.settings import get_current_settings

from prefect_torch_elastic import compat
from prefect_torch_elastic.caching import source_without_decorators
from prefect_torch_elastic.dispatch.mirror import StateMirror
from prefect_torch_elastic.dispatch.phases import Phase
from prefect_torch_elastic.errors import StoreError
from prefect_torch_elastic.local import Launcher
from prefect_torch_elastic.outcomes import CallRecord, derive_key
from prefect_torch_elastic.patience import Patience
from prefect_torch_elastic.payload import Payload, PythonPayload, name_arguments
from prefect_torch_elastic.rankstate import StopReason
from prefect_torch_elastic.runfolder import STORE_VARIABLE, RunPlace, resolve_store
from prefect_torch_elastic.runkey import CalledTask, CallIdentity, identify_call, render_run_key
from prefect_torch_elastic.runlog import RunLog
from prefect_torch_elastic.signing import fetch_run_secret
from prefect_torch_elastic.spec import Spec, build_spec, fields_without_meaning_here
from prefect_torch_elastic.spec_values import hide_secrets
from prefect_torch_elastic.store import Store, open_store, probe_store
from prefect_torch_elastic.store.blocks import fetch_credentials

RESULT_PROBE = "prefect-torch-elastic-write-test"
_probed: set[str] = set()
_probe_locks: dict[str, threading.Lock] = {}  # by store: one that is away holds up nobody else


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """One incarnation of a gang whose nodes are machines that somebody else starts, and starts again.

    Attributes:
        endpoint: `address:port` of this machine, which is the leader.
        gang: Name of the incarnation.
        attempt: From 1; one that was preempted goes on as the same.
        preemptions: Of the run so far.
        keep: Gets the launcher when its gang has ended: the other nodes leave at its word.
    """

    endpoint: str
    gang: str
    attempt: int
    preemptions: int
    keep: Callable[[Launcher], None]


@dataclass(frozen=True, kw_only=True)
class PoolJob:
    """The job of a work pool that this process is.

    Attributes:
        flow_run_id: Its flow run.
        sent_at: When the driver sent it, in unix seconds.
        work_pool, work_pool_id: Name and id, empty if they are not known.
    """

    flow_run_id: str
    sent_at: float
    work_pool: str = ""
    work_pool_id: str = ""


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a task run asks for.

    Attributes:
        payload: What the ranks run.
        spec: The gang.
        identity: The run and the call that this is.
        record: What the run folder knows about it.
        place: The store, and the directory of this machine for the files of attempts.
        credentials: For the store, as JSON.
        flow_run_id: Empty without a flow.
        task_run_id: The task run.
        task_run_name: Its name.
        task_name: The task.
        owner: The flow run's context, whose gangs after the first start warm.
        patience: For whatever asks the store; it knows whether the task is cancelled.
        retries: Of the Prefect task.
        log_prints: Of the Prefect task; None follows the settings where the body runs.
        log: The task run's logger.
        meeting: Where the nodes meet, if they are machines; None runs all of them here.
        stop_reason: What ranks are told when `patience` says that the task is cancelled.
        show: Shows a phase as the named state of the run, with a message.
        job: The pool's job that runs it; None in the driver.
    """

    payload: Payload
    spec: Spec
    identity: CallIdentity
    record: CallRecord
    place: RunPlace
    credentials: dict[str, Any]
    flow_run_id: str
    task_run_id: str
    task_run_name: str
    task_name: str
    owner: object | None
    patience: Patience
    retries: int
    log_prints: bool | None
    log: Any
    meeting: Meeting | None = None
    stop_reason: Callable[[], StopReason] = lambda: StopReason.CANCELLED
    show: Callable[[Phase, str], None] = lambda phase, message: None  # noqa: ARG005
    job: PoolJob | None = None

    def count_attempt(self, folder_number: int) -> int:
        """Return which attempt a gang is whose folder has this number; who starts machines counts those."""
        return self.meeting.attempt if self.meeting else folder_number

    def describe_storage(self, attempt: int) -> dict[str, Any]:
        """Return what ranks need for the run folder; it holds credentials, and goes through sockets only."""
        return {
            "url": self.record.store.url,
            "folder": self.identity.folder,
            "credentials": self.credentials,
            "call": self.identity.digest,
            "attempt": attempt,
            "by": self.task_run_id,
            "policy": asdict(self.spec.checkpoint),
        }


@contextmanager
def prepare_call(
    run: TaskRunContext, payload: PythonPayload, *, also_stop: Callable[[], bool]
) -> Generator[Call, None, None]:
    """Give the call of a task run, which counts as running meanwhile.

    Raises:
        SpecError: If a value is not accepted, or nothing tells the call from another one.
        StoreError: If the store cannot be used.
    """
    flow, log = FlowRunContext.get(), get_run_logger()
    spec = _build_spec(run, log)
    home = get_current_settings().home
    place = resolve_store(
        spec.store, from_environment=os.environ.get(STORE_VARIABLE), home=home, work_pool=spec.work_pool
    )
    block = spec.store_credentials
    credentials = fetch_credentials(block, option="store_credentials") if block else {}
    called = _describe_task(run, payload, spec, store=place.url)
    patience = _make_patience(run, flow, place, also_stop)
    with identify_call(called, flow) as identity:
        store = patience.wait_for(lambda: open_and_probe(place, credentials))
        yield Call(
            payload=payload,
            spec=spec,
            identity=identity,
            record=open_record(store, identity, log.warning),
            place=place,
            credentials=credentials,
            flow_run_id=str(run.task_run.flow_run_id or ""),
            task_run_id=str(run.task_run.id),
            task_run_name=run.task_run.name,
            task_name=cast("Any", run.task).name,
            owner=flow,
            patience=patience,
            retries=cast("Any", run.task).retries,
            log_prints=cast("Any", run.task).log_prints,
            log=log,
            show=StateMirror(run.task_run).show,
        )


def _build_spec(run: TaskRunContext, log: Any) -> Spec:
    fields = cast("Any", run.task).set_fields()
    spec = build_spec(fields)
    if pointless := fields_without_meaning_here(fields, work_pool=spec.work_pool):
        names = ", ".join(f"`{name}`" for name in pointless)
        log.warning("The gang runs on this machine: %s has no effect here.", names)
    return spec


def _make_patience(
    run: TaskRunContext, flow: FlowRunContext | None, place: RunPlace, also_stop: Callable[[], bool]
) -> Patience:
    runner = flow.task_runner if flow else None

    def cancelled() -> bool:
        return also_stop() or compat.task_cancel_requested(runner, run.task_run.id)

    return Patience(url=hide_secrets(place.url), warn=get_run_logger().warning, cancelled=cancelled)


def open_record(store: Store, identity: CallIdentity, warn: Callable[..., Any]) -> CallRecord:
    """Return what the run folder knows about a call.

    Raises:
        StoreError: If the key of its flow run cannot be read.
    """
    return CallRecord(
        store=store,
        folder=identity.folder,
        log=RunLog(store, identity.folder),
        call=identity.digest,
        key=derive_key(fetch_run_secret(identity.root), identity.digest),
        warn=warn,
    )


def _describe_task(run: TaskRunContext, payload: PythonPayload, spec: Spec, *, store: str) -> CalledTask:
    task: Any = run.task
    function, arguments = payload.function, name_arguments(payload.function, payload.args, payload.kwargs)
    again = task.refresh_cache
    outer = compat.outer_task_run(run)
    return CalledTask(
        name=task.name,
        function=function,
        source=source_without_decorators(function),
        arguments=arguments,
        env=spec.env,
        run_key=render_run_key(task.run_key, arguments),
        store=store,
        task_run_id=str(run.task_run.id),
        within=(str(outer.id), outer.run_count) if outer is not None else None,
        again=get_current_settings().tasks.refresh_cache if again is None else bool(again),
    )


def open_and_probe(place: RunPlace, credentials: dict[str, Any]) -> Store:
    """Open a store, and try once per process what a run folder needs of it.

    Raises:
        StoreError: If it cannot be used.
    """
    store = open_store(place.url, credentials or None)
    with _probe_locks.setdefault(store.url, threading.Lock()):  # one call of many at once tries for all
        if store.url not in _probed or not place.local.exists():  # somebody tidied up
            probe_store(store)
            _probed.add(store.url)
    return store


def probe_result_storage(run: TaskRunContext) -> None:
    """Try what the end of the call depends on, before anything is trained.

    Raises:
        StoreError: If the result is to be persisted, and Prefect's storage for it cannot be written.
    """
    if not run.persist_result:
        return
    from prefect.filesystems import LocalFileSystem
    from prefect.results import get_default_result_storage

    storage: Any = run.result_store.result_storage
    try:
        storage = storage or cast("Any", get_default_result_storage)(_sync=True)
        text = b"Written before a gang starts."
        compat.write_block(storage, RESULT_PROBE, text, is_async=bool(cast("Any", run.task).isasync))
    except Exception as error:  # any error of a storage block of any kind
        raise StoreError(
            f"the result of this task is to be persisted in `{type(storage).__name__}`, which cannot be "
            f"written: {type(error).__name__}: {error}. Nothing was trained yet. Correct `result_storage`, "
            "or pass `persist_result=False`."
        ) from error
    if isinstance(storage, LocalFileSystem) and storage.basepath:  # a bucket keeps the one small object
        (Path(storage.basepath).expanduser() / RESULT_PROBE).unlink(missing_ok=True)
