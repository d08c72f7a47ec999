"""The leader of a gang of pods: what it counts over incarnations, and with which code all of them leave."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import httpx
import pytest
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Crashed, Failed, Pending

from prefect_torch_elastic.channel import ChannelClosed
from prefect_torch_elastic.diagnosis import diagnose_lost_node, diagnose_missing_nodes
from prefect_torch_elastic.dispatch.endings import Ending
from prefect_torch_elastic.errors import SpecError, StoreError
from prefect_torch_elastic.evidence import Category, Diagnosis
from prefect_torch_elastic.hosting import gangs, leaving, persistence
from prefect_torch_elastic.hosting import host as host_room
from prefect_torch_elastic.hosting import leader as leader_room
from prefect_torch_elastic.hosting.arrival import Arrival
from prefect_torch_elastic.hosting.leader import Incarnation, Leader, follow_up
from prefect_torch_elastic.hosting.ownrun import OwnRun
from prefect_torch_elastic.hosting.reports import Report
from prefect_torch_elastic.hosting.stops import SIGNALLED, Stop, StopCause
from prefect_torch_elastic.local import GangCancelled
from prefect_torch_elastic.outcomes import CallRecord
from prefect_torch_elastic.pod import ExitCode, Pod, Why
from prefect_torch_elastic.runlog import RunLog
from prefect_torch_elastic.spec import build_spec
from prefect_torch_elastic.store import open_store
from prefect_torch_elastic.wire import Dismiss, GangEnded, GangStatus

LOG = logging.getLogger("tests.leader")
CANCELLED = Stop(cause=StopCause.CANCELLED, reason="the run was cancelled")
NEVER, AT_ONCE, WHILE_IT_HOLDS = None, 0, 3


class Own:
    """The leader's run; SIGTERM comes when `signalled_at` has been looked at so many times, None is never."""

    def __init__(self, *, stop: Stop | None = None, signal: int | None = NEVER) -> None:
        self.id, self.logger, self.stop, self.run = UUID(int=1), LOG, stop, None
        self._left = signal

    @property
    def signalled_at(self) -> float | None:
        if self._left is None:
            return None
        self._left -= 1
        return time.monotonic() if self._left < 0 else None

    @property
    def stop_reason(self) -> str:
        return self.stop.reason if self.stop else ""

    def stop_requested(self) -> bool:
        return self.stop is not None

    def stopped_state(self) -> State[Any]:
        assert self.stop
        return Crashed() if self.stop.cause is StopCause.SIGNAL else Cancelled()


class Launcher:
    """What keeps the other pods; it may be dead."""

    def __init__(self, *, is_dead: bool = False) -> None:
        self.codes: list[int] = []
        self.is_closed, self._is_dead = False, is_dead
        self.channel = self

    def send(self, message: Dismiss) -> None:
        if self._is_dead:
            raise ChannelClosed
        assert not self.is_closed
        self.codes.append(message.exit_code)

    def close(self) -> None:
        self.is_closed = True


def make_pod(folder: Path, *, nnodes: int = 4, attempt: int = 0, grace_seconds: float = -10.0) -> Pod:
    """Return a pod that holds for 10 s more than its grace, by default not at all."""
    return Pod(
        node=0,
        nnodes=nnodes,
        leader_host="train-node-0-0.train",
        leader_port=29400,
        gang=f"train-{attempt}",
        attempt=attempt,
        name="train-node-0-0-abcde",
        address="10.0.0.4",
        machine="gpu-1",
        grace_seconds=grace_seconds,
        termination_log=str(folder / "termination-log"),
    )


def make_leader(folder: Path, own: Own | None = None, **pod: Any) -> Leader:
    return Leader(make_pod(folder, **pod), cast("OwnRun", own or Own()))


def make_record(folder: Path) -> CallRecord:
    store = open_store(str(folder))
    return CallRecord(
        store=store, folder="run", log=RunLog(store, "run"), call="c0", key=b"k" * 32, warn=pytest.fail
    )


# ---------------------------------------------------------------- incarnations

FIRST = Incarnation(attempt=0, newest="5/a")


@pytest.mark.parametrize(
    ("before", "attempt", "newest", "now"),
    [
        pytest.param(None, 0, "", Incarnation(attempt=0), id="first"),
        pytest.param(None, 2, "7/b", Incarnation(attempt=2, newest="7/b"), id="first-that-came-so-far"),
        pytest.param(FIRST, 0, "7/b", Incarnation(attempt=0, newest="7/b", preemptions=1), id="preempted"),
        pytest.param(FIRST, 1, "7/b", Incarnation(attempt=1, newest="7/b"), id="progress"),
        pytest.param(FIRST, 1, "5/a", Incarnation(attempt=1, newest="5/a", fruitless=1), id="no-progress"),
        pytest.param(
            Incarnation(attempt=1, preemptions=2, fruitless=3),
            2,
            "",
            Incarnation(attempt=2, preemptions=2, fruitless=4),
            id="no-progress-again",
        ),
        pytest.param(
            Incarnation(attempt=1, preemptions=2, fruitless=3),
            1,
            "",
            Incarnation(attempt=1, preemptions=3),
            id="preempted-without-progress-does-not-rest",
        ),
    ],
)
def test_incarnation_follows_the_one_before(
    before: Incarnation | None, attempt: int, newest: str, now: Incarnation
):
    assert follow_up(before, attempt=attempt, newest=newest) == now


def test_attempts_without_progress_wait_ever_longer_up_to_a_minute():
    rests = [Incarnation(attempt=0, fruitless=count).rest_seconds for count in range(7)]
    assert rests == [0, 5, 10, 20, 40, 60, 60]


def begin(folder: Path, *, attempt: int, record: CallRecord | None = None) -> tuple[int, int]:
    meeting = make_leader(folder, attempt=attempt).begin(record or make_record(folder))
    return meeting.attempt, meeting.preemptions


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long leaders have rested."""
    rested: list[float] = []
    monkeypatch.setattr(leader_room, "rest", lambda seconds, give_up: rested.append(seconds))
    return rested


def test_leader_counts_attempts_and_preemptions_over_incarnations(tmp_path: Path, rests: list[float]):
    counts = [begin(tmp_path, attempt=attempt) for attempt in (0, 0, 1, 1, 2)]
    assert counts == [(1, 0), (1, 1), (2, 1), (2, 2), (3, 2)]
    assert rests == [5, 5]


def test_leader_rests_longer_with_each_attempt_that_saved_nothing(tmp_path: Path, rests: list[float], caplog):
    for attempt in range(4):
        begin(tmp_path, attempt=attempt)
    assert rests == [5, 10, 20]
    assert (
        caplog.messages[-1]
        == "The last 3 attempts in a row have made no progress; the next one begins in 20 s."
    )


def test_leader_rests_until_its_run_has_to_stop(tmp_path: Path):
    begin(tmp_path, attempt=0)
    own = Own(stop=SIGNALLED)
    began = time.monotonic()
    make_leader(tmp_path, own, attempt=1).begin(make_record(tmp_path))
    assert time.monotonic() - began < 1.0


def test_note_whose_answer_got_lost_is_no_other_incarnation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rests: list[float]
):
    record = make_record(tmp_path)
    put, errors = record.store.put, [StoreError("the answer was lost")]

    def put_and_lose(key: str, data: Any, **options: Any) -> Any:
        put(key, data, **options)
        if errors:
            raise errors.pop()

    monkeypatch.setattr(persistence, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(type(record.store), "put", lambda _, *args, **options: put_and_lose(*args, **options))
    assert begin(tmp_path, attempt=0, record=record) == (1, 0)
    assert begin(tmp_path, attempt=0, record=record) == (1, 1)


def test_note_that_is_not_understood_costs_the_counts_only(tmp_path: Path, caplog):
    record = make_record(tmp_path)
    record.store.put(f"run/calls/c0/begun-{UUID(int=1)}", b"not ours")
    assert begin(tmp_path, attempt=1) == (2, 0)
    assert "What the gang was before is not known" in caplog.text


def test_plain_function_is_begun_by_one_pod_alone(tmp_path: Path):
    record = make_record(tmp_path)
    assert not make_leader(tmp_path).has_begun(record)
    assert make_leader(tmp_path).has_begun(record)


def test_leader_says_where_its_nodes_meet(tmp_path: Path):
    meeting = make_leader(tmp_path).begin(make_record(tmp_path))
    assert (meeting.endpoint, meeting.gang) == ("10.0.0.4:29400", "train-0")


# ---------------------------------------------------------------- who judges a failure


def diagnose(category: Category, **fields: Any) -> Diagnosis:
    return Diagnosis(category=category, summary="node 3 was lost.", cure="See.", **fields)


@pytest.mark.parametrize(
    ("diagnosis", "most", "nnodes", "again"),
    [
        pytest.param(diagnose(Category.KILLED), 3, 4, True, id="machine"),
        pytest.param(diagnose(Category.KILLED), 1, 4, False, id="machine-and-no-attempt-left"),
        pytest.param(diagnose(Category.KILLED, non_retryable=True), 3, 4, False, id="non-retryable"),
        pytest.param(diagnose(Category.USER_ERROR), 3, 4, False, id="user-error"),
        pytest.param(diagnose(Category.NODE_LOST), 1, 4, True, id="a-pod-that-may-have-been-taken-away"),
        pytest.param(diagnose(Category.PEER_LOST), 1, 4, True, id="its-peers"),
        pytest.param(diagnose(Category.NODE_LOST), 1, 1, False, id="alone"),
        pytest.param(diagnose(Category.NODE_LOST, pods_remain=True), 3, 4, True, id="nobody-was-taken-away"),
        pytest.param(diagnose(Category.NODE_LOST, pods_remain=True), 1, 4, False, id="and-no-attempt-left"),
    ],
)
def test_jobset_judges_what_another_attempt_may_mend(
    tmp_path: Path, diagnosis: Diagnosis, most: int, nnodes: int, again: bool
):
    spec = build_spec({"max_attempts": most, "work_pool": "gpus"})
    assert make_leader(tmp_path, nnodes=nnodes).starts_again(diagnosis, spec) is again


def conclude(folder: Path, diagnosis: Diagnosis, *, nnodes: int = 4, attempt: int = 3) -> Report:
    spec = build_spec({"max_attempts": 3, "work_pool": "gpus"})
    patience = SimpleNamespace(cancelled=lambda: False)
    call: Any = SimpleNamespace(spec=spec, record=make_record(folder), log=LOG, patience=patience)
    ended = GangEnded(status=GangStatus.FAILED, diagnosis=asdict(diagnosis))
    return gangs._conclude(call, ended, attempt, make_leader(folder, nnodes=nnodes))


@pytest.mark.parametrize(("nnodes", "is_victim"), [(4, True), (1, False)])
def test_attempt_that_may_be_repeated_leaves_a_setback_with_its_number(
    tmp_path: Path, nnodes: int, is_victim: bool
):
    report = conclude(tmp_path, diagnose(Category.NODE_LOST), nnodes=nnodes)
    assert (report.state, report.exit_code, report.is_victim) == (None, ExitCode.LOST, is_victim)
    assert report.ending
    assert report.ending.attempt == 3


@pytest.mark.parametrize(
    "diagnosis",
    [
        pytest.param(diagnose_missing_nodes("only 1 of 2 nodes have joined."), id="never-whole"),
        pytest.param(diagnose_lost_node(1, reason="its agent failed", pods_remain=True), id="agent-died"),
    ],
)
def test_nobody_waits_for_the_end_of_a_pod_that_did_not_go_away(tmp_path: Path, diagnosis: Diagnosis):
    report = conclude(tmp_path, diagnosis)
    assert (report.state, report.exit_code, report.is_victim) == (None, ExitCode.LOST, False)


def test_failure_that_no_attempt_mends_is_final(tmp_path: Path):
    report = conclude(tmp_path, diagnose(Category.USER_ERROR))
    assert report.state
    assert (report.state.is_failed(), report.exit_code, report.is_victim) == (True, ExitCode.FAILED, False)


# ---------------------------------------------------------------- stops


def test_pod_that_is_taken_away_reports_nothing(tmp_path: Path):
    report = make_leader(tmp_path, Own(stop=SIGNALLED)).report_stop()
    assert (report.state, report.ending, report.exit_code) == (None, None, ExitCode.STOPPED)


def test_plain_function_that_is_taken_away_does_not_come_back(tmp_path: Path):
    leader = make_leader(tmp_path, Own(stop=SIGNALLED))
    leader.comes_back = False
    report = leader.report_stop()
    assert report.state
    assert report.state.is_crashed()


def test_cancelled_gang_is_over(tmp_path: Path):
    report = make_leader(tmp_path, Own(stop=CANCELLED)).report_stop()
    assert report.state
    assert report.ending
    assert (report.state.is_cancelled(), report.ending.status) == (True, GangStatus.STOPPED)
    assert (report.exit_code, report.why) == (ExitCode.DONE, Why.STOPPED)


def test_gang_that_another_pod_has_to_leave_reports_nothing(tmp_path: Path):
    report = make_leader(tmp_path).report_stop()
    assert (report.state, report.is_victim) == (None, True)


def host(folder: Path, monkeypatch: pytest.MonkeyPatch, own: Own, work: Callable[[], Any]) -> Report:
    """Return what a leader reports whose store does this."""
    spec = build_spec({"work_pool": "gpus"})
    call = SimpleNamespace(
        spec=spec, record=SimpleNamespace(find=work), patience=SimpleNamespace(wait_for=lambda work: work())
    )
    monkeypatch.setattr(gangs, "describe_call", lambda *_: call)
    return gangs.host_gang(cast("Arrival", None), cast("OwnRun", own), make_leader(folder, own))


@pytest.mark.parametrize("error", [GangCancelled("stop"), StoreError("away"), OSError("full")])
def test_pod_that_is_taken_away_while_it_waits_for_its_store_reports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
):
    def fail() -> None:
        raise error

    report = host(tmp_path, monkeypatch, Own(stop=SIGNALLED), fail)
    assert (report.state, report.ending, report.exit_code) == (None, None, ExitCode.STOPPED)


def test_store_that_cannot_be_read_is_an_error_while_nobody_wants_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail() -> None:
        raise StoreError("away")

    with pytest.raises(StoreError):
        host(tmp_path, monkeypatch, Own(), fail)


def test_pod_that_is_taken_away_while_its_call_arrives_reports_nothing(tmp_path: Path):
    own = Own(stop=SIGNALLED)
    report = host_room._report_error(StoreError("away"), cast("OwnRun", own), make_leader(tmp_path, own))
    assert (report.state, report.ending, report.exit_code) == (None, None, ExitCode.STOPPED)


def test_pod_whose_call_cannot_be_fetched_leaves_it_to_another_attempt(tmp_path: Path):
    own = Own()
    report = host_room._report_error(StoreError("away"), cast("OwnRun", own), make_leader(tmp_path, own))
    assert (report.state, report.exit_code, report.message) == (None, ExitCode.LOST, "StoreError: away")


@pytest.mark.parametrize("has_leader", [True, False])
def test_store_that_is_lost_under_way_leaves_no_ending_where_another_attempt_may_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_leader: bool
):
    source = SimpleNamespace(record=make_record(tmp_path), credentials={})
    own: Any = Own()
    left: list[Ending] = []

    def lose(*_: object, **__: object) -> None:
        raise StoreError("away")

    monkeypatch.setattr(host_room, "open_source", lambda *_: source)
    monkeypatch.setattr(host_room, "SignOfLife", lambda *_, **__: nullcontext())
    monkeypatch.setattr(host_room, "receive", lose)
    monkeypatch.setattr(host_room, "_leave", lambda record, own, ending, is_final: left.append(ending))
    leader = make_leader(tmp_path) if has_leader else None
    report = host_room._try_to_run(cast("Any", None), own, leader)
    assert (report.state is None, len(left)) == (has_leader, 0 if has_leader else 1)
    assert report.exit_code is (ExitCode.LOST if has_leader else ExitCode.CONFIGURATION)


# ---------------------------------------------------------------- leaving


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        pytest.param(SpecError("`--call` is odd."), 78, "`--call` is odd.", id="ours"),
        pytest.param(SystemExit("no id of a flow run"), 78, "no id of a flow run", id="exit"),
        pytest.param(PermissionError(13, "denied"), 78, "PermissionError: [Errno 13] denied", id="disk"),
        pytest.param(ModuleNotFoundError("No `x`"), 78, "ModuleNotFoundError: No `x`", id="import"),
        pytest.param(OSError(28, "full"), 1, "OSError: [Errno 28] full", id="full-disk"),
        pytest.param(StoreError("away"), 1, "away", id="store"),
        pytest.param(httpx.ConnectError("away"), 1, "ConnectError: away", id="api"),
    ],
)
def test_pod_whose_program_cannot_go_on_says_why(
    tmp_path: Path, error: BaseException, code: int, message: str
):
    path = str(tmp_path / "termination-log")
    environment = {"JOB_COMPLETION_INDEX": "3", "PREFECT_TORCH_ELASTIC_TERMINATION_LOG": path}
    assert leaving.refuse(environment, error) == code
    assert read_words(tmp_path) == {"exit_code": code, "why": "refused", "message": message, "node": 3}


SUCCEEDED = Report(
    ending=Ending(status=GangStatus.SUCCEEDED), state=Completed(message="Rank 0 has returned.")
)
FAILED = Report(
    ending=Ending(status=GangStatus.FAILED),
    state=Failed(),
    exit_code=ExitCode.FAILED,
    why=Why.FAILED,
    diagnosis=diagnose(Category.USER_ERROR, rank=3, step=120),
)
CULPRIT = Report(
    ending=None,
    state=None,
    exit_code=ExitCode.LOST,
    why=Why.FAILED,
    diagnosis=diagnose(Category.KILLED, rank=3),
)
VICTIM = Report(
    ending=None,
    state=None,
    exit_code=ExitCode.LOST,
    why=Why.FAILED,
    diagnosis=diagnose(Category.NODE_LOST),
    is_victim=True,
)
STOPPED = Report(ending=None, state=None, exit_code=ExitCode.STOPPED, why=Why.STOPPED)
WITH_ANOTHER = Report(
    ending=None,
    state=None,
    exit_code=ExitCode.STOPPED,
    why=Why.STOPPED,
    message="Another pod of the gang has to go.",
    is_victim=True,
)
CANCELLED_RUN = Report(ending=Ending(status=GangStatus.STOPPED), state=Cancelled(), why=Why.STOPPED)
REFUSED = Report(ending=None, state=Failed(message="No."), exit_code=ExitCode.CONFIGURATION, why=Why.REFUSED)
NO_STORE = Report(
    ending=None, state=None, exit_code=ExitCode.LOST, why=Why.REFUSED, message="StoreError: away"
)


@pytest.mark.parametrize(
    ("report", "signal", "code", "told", "why"),
    [
        pytest.param(SUCCEEDED, NEVER, 0, [0], "done", id="succeeded"),
        pytest.param(SUCCEEDED, AT_ONCE, 143, [], "stopped", id="succeeded-and-asked-to-end"),
        pytest.param(FAILED, NEVER, 65, [65], "failed", id="failed"),
        pytest.param(FAILED, AT_ONCE, 143, [], "stopped", id="failed-and-asked-to-end"),
        pytest.param(REFUSED, NEVER, 78, [78], "refused", id="refused"),
        pytest.param(NO_STORE, NEVER, 1, [1], "refused", id="no-store"),
        pytest.param(CANCELLED_RUN, NEVER, 0, [0], "stopped", id="cancelled"),
        pytest.param(CANCELLED_RUN, AT_ONCE, 143, [], "stopped", id="cancelled-and-deleted"),
        pytest.param(CULPRIT, NEVER, 1, [1], "failed", id="lost-a-rank"),
        pytest.param(CULPRIT, AT_ONCE, 143, [], "stopped", id="lost-a-rank-and-asked-to-end"),
        pytest.param(STOPPED, AT_ONCE, 143, [], "stopped", id="preempted"),
        pytest.param(VICTIM, WHILE_IT_HOLDS, 143, [], "lost-node", id="victim-whose-signal-comes"),
        pytest.param(VICTIM, NEVER, 1, [], "lost-node", id="victim-whose-signal-never-comes"),
        pytest.param(WITH_ANOTHER, WHILE_IT_HOLDS, 143, [], "stopped", id="drained-pod-and-its-signal"),
        pytest.param(WITH_ANOTHER, NEVER, 1, [], "lost-node", id="drained-pod-and-no-signal"),
    ],
)
def test_all_pods_leave_as_the_report_says(
    tmp_path: Path, report: Report, signal: int | None, code: int, told: list[int], why: str
):
    grace_seconds = 0.0 if signal == WHILE_IT_HOLDS else -10.0
    leader, launcher = make_leader(tmp_path, Own(signal=signal), grace_seconds=grace_seconds), Launcher()
    leader._keep(cast("Any", launcher))
    assert leader.leave(report) == code
    assert (launcher.codes, launcher.is_closed) == (told, True)
    words = read_words(tmp_path)
    assert (words["exit_code"], words["why"], words["node"]) == (code, why, 0)


def read_words(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "termination-log").read_text())


def test_last_words_name_the_culprit(tmp_path: Path):
    make_leader(tmp_path).leave(FAILED)
    assert read_words(tmp_path) == {
        "exit_code": 65,
        "why": "failed",
        "message": "node 3 was lost.",
        "node": 0,
        "rank": 3,
        "category": "UserError",
        "step": 120,
    }


@pytest.mark.parametrize(
    ("report", "message"),
    [
        pytest.param(SUCCEEDED, "Rank 0 has returned.", id="state"),
        pytest.param(NO_STORE, "StoreError: away", id="no-state"),
        pytest.param(WITH_ANOTHER, "Another pod of the gang has to go.", id="victim"),
        pytest.param(CANCELLED_RUN, "stopped", id="nothing-to-say"),
    ],
)
def test_last_words_have_a_message_for_people(tmp_path: Path, report: Report, message: str):
    make_leader(tmp_path).leave(report)
    assert read_words(tmp_path)["message"] == message


def test_pod_leaves_although_its_launcher_is_dead(tmp_path: Path):
    leader, launcher = make_leader(tmp_path), Launcher(is_dead=True)
    leader._keep(cast("Any", launcher))
    assert leader.leave(CULPRIT) == 1
    assert launcher.is_closed


@pytest.mark.parametrize(
    ("state", "code", "why"),
    [
        pytest.param(Completed(), 0, "done", id="completed"),
        pytest.param(Failed(), 65, "refused", id="failed"),
        pytest.param(Cancelled(), 65, "refused", id="cancelled"),
        pytest.param(Pending(), 65, "refused", id="may-not-start"),
        pytest.param(None, 65, "refused", id="deleted"),
    ],
)
def test_pod_whose_run_is_over_ends_the_gang(tmp_path: Path, state: State[Any] | None, code: int, why: str):
    own = Own()
    own.run = cast("Any", SimpleNamespace(state=state)) if state else None
    assert make_leader(tmp_path, own).turn_back() == code
    words = read_words(tmp_path)
    assert words["why"] == why
    assert code == 0 or "run its flow again" in words["message"].lower()


@pytest.mark.parametrize(
    ("signal", "grace_seconds", "leaves"), [(NEVER, -1, False), (AT_ONCE, 60, False), (AT_ONCE, 0, True)]
)
def test_report_that_does_not_reach_the_api_is_given_up_when_the_grace_is_over(
    tmp_path: Path, signal: int | None, grace_seconds: float, leaves: bool
):
    leader = make_leader(tmp_path, Own(signal=signal), grace_seconds=grace_seconds)
    assert leader.must_leave() is leaves
