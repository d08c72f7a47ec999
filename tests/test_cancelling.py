"""A task that was stopped is Cancelled, costs nothing later, and ends its flow run if that was cancelled."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect import flow
from prefect.cache_policies import INPUTS
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import CancelledRun, TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelling

from prefect_torch_elastic import cancelling, compat, elastic_task, launch
from prefect_torch_elastic.cancelling import FlowCancelled, conclude_stop, end_flow, name_stop
from prefect_torch_elastic.dispatch import driver
from prefect_torch_elastic.dispatch.endings import Ending
from prefect_torch_elastic.dispatch.order import CallKind
from prefect_torch_elastic.dispatch.stopping import StopEnd
from prefect_torch_elastic.dispatch.waiting import ChildEnd, ChildVerdict
from prefect_torch_elastic.errors import PoolRunFailed
from prefect_torch_elastic.local import GangCancelled
from prefect_torch_elastic.patience import Patience
from prefect_torch_elastic.wire import GangStatus


@pytest.fixture
def client(prefect_server: str) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def gangs(prefect_server: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the gangs of the test do, one after the other; they run nowhere."""
    endings: list[Any] = []

    def run(*_: Any) -> Any:
        ending = endings.pop(0)
        if callable(ending):
            ending = ending()
        if isinstance(ending, BaseException):
            raise ending
        return ending

    monkeypatch.setattr(launch, "_run", run)
    return endings


def train(number: int = 0) -> int:
    """Be replaced by `gangs`."""
    raise AssertionError(number)


async def train_async() -> int:
    """Be replaced by `gangs`."""
    raise AssertionError


# ---------------------------------------------------------------- the task


def test_task_that_was_stopped_is_cancelled_and_spends_no_retry(gangs: list[Any]):
    gangs[:] = [GangCancelled("somebody cancelled it")]

    @flow
    def main() -> Any:
        state = elastic_task(retries=3)(train)(return_state=True)
        return [state.name, state.message]

    assert main() == ["Cancelled", "somebody cancelled it"]


@pytest.mark.parametrize("how", ["call", "submit"])
def test_value_of_a_task_that_was_stopped_is_an_exception(gangs: list[Any], how: str):
    gangs[:] = [GangCancelled("somebody cancelled it")]

    @flow
    def main() -> None:
        task = elastic_task(train)
        with pytest.raises(CancelledRun, match="somebody cancelled it"):
            task() if how == "call" else task.submit().result()

    main()


async def test_value_of_an_async_task_that_was_stopped_is_an_exception(gangs: list[Any]):
    gangs[:] = [GangCancelled("somebody cancelled it")]

    @flow
    async def main() -> None:
        with pytest.raises(CancelledRun, match="somebody cancelled it"):
            await elastic_task(train_async)()

    await main()


def test_stop_goes_into_no_cache(gangs: list[Any]):
    gangs[:] = [GangCancelled("somebody cancelled it"), 7]
    task = elastic_task(cache_policy=INPUTS, persist_result=True)(train)
    number = uuid4().int

    @flow
    def main() -> list[Any]:
        first, second, third = (task(number, return_state=True) for _ in range(3))
        return [first.name, second.name, second.result(), third.name, third.result()]

    assert main() == ["Cancelled", "Completed", 7, "Cached", 7]


def test_sigterm_that_is_no_cancellation_goes_on():
    with pytest.raises(TerminationSignal):
        conclude_stop(TerminationSignal(signal.SIGTERM))


def test_task_whose_flow_goes_on_elsewhere_is_not_called_cancelled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compat, "flow_goes_on_elsewhere", lambda: True)
    with pytest.raises(GangCancelled):
        conclude_stop(GangCancelled("Prefect has cancelled the submitted task."))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (GangCancelled("It was cancelled."), "It was cancelled."),
        (KeyboardInterrupt(), "The flow was interrupted (Ctrl-C)."),
        (TimeoutError(), "The task or its flow timed out."),
        (TerminationSignal(signal.SIGTERM), "The process of the flow was asked to end (SIGTERM)."),
        (SystemExit(3), "The task was stopped (SystemExit)."),
    ],
    ids=["cancelled", "ctrl-c", "timeout", "sigterm", "other"],
)
def test_stop_has_a_reason(error: BaseException, reason: str):
    assert name_stop(error) == reason


# ---------------------------------------------------------------- the flow run


@pytest.fixture
def in_thread() -> Callable[[Callable[[], Any]], BaseException | None]:
    """Run something in a thread, and return what it raised."""

    def run(work: Callable[[], Any]) -> BaseException | None:
        raised: list[BaseException] = []

        def serve() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  (the test looks at it)
                raised.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        thread.join()
        return raised[0] if raised else None

    return run


@pytest.mark.parametrize("how", ["call", "submit"])
def test_flow_in_a_thread_ends_cancelled_c031(
    gangs: list[Any], client: SyncPrefectClient, in_thread: Any, how: str
):
    """C031: no signal reaches it, so it ends by an exception that nobody takes for a failure."""
    ids: list[UUID] = []

    def is_cancelled() -> BaseException:
        error = FlowCancelled("The flow run of this task is Cancelling.", ids[0])
        cancelling.wake_flow(error)
        end_flow(error, given_up=lambda: False, log=SimpleNamespace())
        return error

    gangs[:] = [is_cancelled]

    @flow
    def main() -> None:
        ids.append(UUID(flow_run.id))
        client.set_flow_run_state(ids[0], Cancelling())
        task = elastic_task(retries=1)(train)
        try:
            task() if how == "call" else task.submit().result()
        except Exception:  # noqa: BLE001  (a user's own: it must not see the end of its flow)
            return

    assert isinstance(in_thread(main), TerminationSignal)
    assert client.read_flow_run(ids[0]).state_name == "Cancelled"


def test_supervisor_that_says_nothing_is_not_waited_for_for_ever(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(uuid4()))
    monkeypatch.setattr(cancelling, "SUPERVISOR_SECONDS", 0.3)
    run = client.create_flow_run(flow(train), state=Cancelling())
    error = FlowCancelled("The flow run is Cancelling.", run.id)
    cancelling.wake_flow(error)
    assert client.read_flow_run(run.id).state_name == "Cancelling", "the supervisor may be on its way"
    end_flow(error, given_up=lambda: False, log=SimpleNamespace())
    assert client.read_flow_run(run.id).state_name == "Cancelled"


# ---------------------------------------------------------------- the child


class Scene:
    """A dispatch whose wait ends by an exception; notes what becomes of the child."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *errors: BaseException) -> None:
        self.done: list[str] = []
        self.dispatch: Any = object.__new__(driver._Dispatch)
        self.errors = list(errors)
        monkeypatch.setattr(driver, "wait_for_child", self.fail)
        monkeypatch.setattr(driver, "stop_child", self.stop)
        self.dispatch._leave = lambda _: self.done.append("left")
        self.dispatch._unheard = set()
        self.end = StopEnd.OVER
        self.dispatch._forget = lambda: self.done.append("forgotten")
        self.dispatch._mirror = SimpleNamespace(show=lambda *_: None)
        self.dispatch._pool = SimpleNamespace(name="train")
        spec = SimpleNamespace(grace_seconds=60.0, inadmissible_grace_seconds=None)
        patience = SimpleNamespace(cancelled=lambda: False)
        self.dispatch._call = SimpleNamespace(
            spec=spec,
            patience=patience,
            flow_run_id="",
            record=None,
            log=None,
            identity=SimpleNamespace(digest="0" * 32),
        )

    def fail(self, *_: Any, **__: Any) -> None:
        raise self.errors.pop(0)

    def stop(self, *_: Any, leave_after_seconds: float | None, **__: Any) -> StopEnd:
        self.done.append(f"stopped, {leave_after_seconds}")
        if self.errors:
            raise self.errors.pop(0)
        return self.end

    def wait(self) -> None:
        self.dispatch._wait(SimpleNamespace(id=uuid4()))


@pytest.mark.parametrize(
    ("answer", "done"), [(None, ["forgotten"]), (OSError("away"), [])], ids=["unknown", "away"]
)
def test_order_is_kept_for_a_child_that_may_exist(
    monkeypatch: pytest.MonkeyPatch, answer: Any, done: list[str]
):
    scene = Scene(monkeypatch)
    scene.dispatch._ask_aside = lambda _: answer
    monkeypatch.setattr(driver, "RECALL_SECONDS", 0.1)
    scene.dispatch._recall(KeyboardInterrupt(), number=0)
    assert scene.done == done


@pytest.mark.parametrize("has_arrived", [True, False])
def test_child_that_was_just_ordered_is_stopped_too(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch, has_arrived: bool
):
    scene = Scene(monkeypatch)
    run = client.create_flow_run(flow(train))
    answers = [None, run] if has_arrived else []
    scene.dispatch._find = lambda: (None, 3)
    scene.dispatch._request = lambda _: None
    scene.dispatch._client = None
    monkeypatch.setattr(driver, "open_child", scene.fail)
    monkeypatch.setattr(driver, "find_child", lambda *_, **__: answers.pop(0) if answers else None)
    monkeypatch.setattr(driver, "RECALL_SECONDS", 1.0)
    scene.errors.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        scene.dispatch._open(1)
    assert scene.done == (["stopped, None", "left"] if has_arrived else ["forgotten"])


def test_child_is_stopped_before_an_exception_goes_on(monkeypatch: pytest.MonkeyPatch):
    scene = Scene(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        scene.wait()
    assert scene.done == ["stopped, None", "left"]


def test_child_is_asked_again_when_sigterm_comes_meanwhile(monkeypatch: pytest.MonkeyPatch):
    scene = Scene(monkeypatch, GangCancelled("cancelled"), TerminationSignal(signal.SIGTERM))
    with pytest.raises(TerminationSignal):
        scene.wait()
    assert scene.done == ["stopped, None", "stopped, 15.0", "left"]


@pytest.mark.parametrize(
    "error", [TerminationSignal(signal.SIGTERM), GangCancelled("asked to stop")], ids=["main", "submitted"]
)
def test_child_of_a_flow_that_goes_on_elsewhere_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
):
    scene = Scene(monkeypatch, error)
    monkeypatch.setattr(compat, "flow_goes_on_elsewhere", lambda: True)
    with pytest.raises(type(error)):
        scene.wait()
    assert scene.done == []


def test_child_of_a_cancelled_flow_is_stopped_wherever_the_process_goes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compat, "flow_goes_on_elsewhere", lambda: True)
    assert not cancelling.goes_on_elsewhere(FlowCancelled("The flow run is Cancelling.", uuid4()))


@pytest.mark.parametrize("is_supervised", [True, False], ids=["supervised", "by-hand"])
def test_submitted_task_leaves_before_its_process_is_killed(
    monkeypatch: pytest.MonkeyPatch, is_supervised: bool
):
    scene = Scene(monkeypatch, GangCancelled("asked to stop"))
    monkeypatch.setattr(compat, "flow_is_being_cancelled", lambda: True)
    monkeypatch.setattr(cancelling, "is_supervised", lambda: is_supervised)
    with pytest.raises(GangCancelled):
        scene.wait()
    assert scene.done == ["stopped, 15.0" if is_supervised else "stopped, None", "left"]


@pytest.mark.parametrize("end", StopEnd)
def test_child_that_may_still_start_keeps_what_it_needs(monkeypatch: pytest.MonkeyPatch, end: StopEnd):
    scene = Scene(monkeypatch, KeyboardInterrupt())
    scene.end = end
    del scene.dispatch._leave  # the real one
    scene.dispatch._tell_api = lambda *_: scene.done.append("marked")
    with pytest.raises(KeyboardInterrupt):
        scene.wait()
    left = [] if end is StopEnd.UNHEARD else ["marked", "forgotten"]
    assert scene.done == ["stopped, None", *left]


def test_child_that_starts_too_late_is_no_cancellation(monkeypatch: pytest.MonkeyPatch):
    scene = Scene(monkeypatch)
    scene.dispatch._kind = CallKind.BODY
    scene.dispatch._call.patience = SimpleNamespace(wait_for=lambda work: work())
    stopped = Ending(status=GangStatus.STOPPED, message="its driver asked for it")
    monkeypatch.setattr(driver, "fetch_ending", lambda *_: stopped)
    late = ChildEnd(
        verdict=ChildVerdict.NOT_STARTED, state_message="It has not started within 600 s.", run=None
    )
    with pytest.raises(PoolRunFailed, match="has not started within 600 s"):
        scene.dispatch._conclude(late, SimpleNamespace(id=uuid4(), name="train-1"))


def test_store_that_hangs_holds_nobody_who_forgets_a_call(monkeypatch: pytest.MonkeyPatch):
    scene = Scene(monkeypatch)
    del scene.dispatch._forget  # the real one
    asked = threading.Event()
    scene.dispatch._call.patience = Patience(url="s3://bucket", warn=print, cancelled=lambda: True)
    monkeypatch.setattr(driver, "LAST_WORD_SECONDS", 0.3)
    monkeypatch.setattr(driver, "forget_call", lambda _: asked.wait(60))
    began = time.monotonic()
    scene.dispatch._forget()
    assert time.monotonic() - began < 5
    asked.set()
