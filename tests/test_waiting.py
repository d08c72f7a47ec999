"""The wait for a child run: what ends it, what is said meanwhile, and that it always ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.states import Cancelling, Completed, Pending, Running, Scheduled

from prefect_torch_elastic.dispatch.polling import Means, ThreadCaller
from prefect_torch_elastic.dispatch.pools import Pool
from prefect_torch_elastic.dispatch.sighting import ApiEyes
from prefect_torch_elastic.dispatch.verdicts import ChildVerdict
from prefect_torch_elastic.dispatch.waiting import ChildEnd, wait_for_child
from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.local import GangCancelled
from tests.simulators.childruns import (
    FINAL,
    Away,
    FakeApi,
    FakeStore,
    SeenLog,
    SeenMirror,
    VirtualTime,
    make_outage,
)

pytestmark = pytest.mark.timeout(60)

STARTS = [(0.0, "SCHEDULED"), (2.0, "PENDING"), (4.0, "RUNNING")]


def make_pool(type: str = "process") -> Pool:
    return Pool(
        name="train",
        type=type,
        is_paused=False,
        workers=1,
        workers_online=1,
        has_command=True,
        variables=frozenset(),
        limit=None,
    )


@dataclass
class Scene:
    """One wait: states and lines happen, the host lives in `alive`, and the wait is over at `time.now`."""

    states: Sequence[tuple[float, str]]
    ending_at: float = float("inf")
    alive: list[tuple[float, float]] = field(default_factory=list)
    api_away: list[Away] = field(default_factory=list)
    store_away: list[Away] = field(default_factory=list)
    parent: list[tuple[float, str]] = field(default_factory=lambda: [(0.0, "RUNNING")])
    deleted_at: float = float("inf")
    gone_at: float = float("inf")
    lines: list[tuple[float, str]] = field(default_factory=list)
    pool: Pool = field(default_factory=make_pool)
    reason: Callable[[float], str] = lambda _: ""
    limit: float = 10_000.0
    stride: float = 0.0

    def __post_init__(self) -> None:
        self.time = VirtualTime(limit=self.limit, stride=self.stride)
        self.mirror, self.log = SeenMirror(), SeenLog(self.time)
        self.api = FakeApi(
            self.time,
            self.states,
            away=self.api_away,
            deleted_at=self.deleted_at,
            parent=self.parent,
            lines=self.lines,
        )
        self.store = FakeStore(self.time, self.ending_at, self.alive, self.store_away, self.gone_at)

    def wait(
        self, *, cancelled_at: float = float("inf"), start_within_seconds: float | None = None
    ) -> ChildEnd:
        return wait_for_child(
            self.api.child_id,
            pool=self.pool,
            parent_flow_run_ids=[self.api.parent_id],
            evidence=self.store,
            explain=lambda _: self.reason(self.time.now),
            mirror=self.mirror,  # pyright: ignore[reportArgumentType]
            log=self.log,
            cancelled=lambda: self.time.now >= cancelled_at,
            start_within_seconds=start_within_seconds,
            means=self.time.means(self.api),
        )


def test_wait_ends_when_the_ending_is_there_and_the_run_over():
    scene = Scene([*STARTS, (9.5, "COMPLETED")], ending_at=9.0, alive=[(4, 9)])
    end = scene.wait()
    assert (end.verdict, end.run and end.run.state and end.run.state.name) == (
        ChildVerdict.ENDED,
        "Completed",
    )
    assert scene.time.now < 11
    assert scene.mirror.phases == ["WaitingForWorker", "Starting", "Running"]
    assert scene.log.texts("warning") == []


def test_ending_ends_the_wait_although_the_run_never_becomes_final():
    scene = Scene(STARTS, ending_at=20.0, alive=[(4, 100)])
    assert scene.wait().verdict is ChildVerdict.ENDED
    assert 25 <= scene.time.now < 33


@pytest.mark.parametrize("how", ["refused", 503, 500, 401, 429])
def test_ending_ends_the_wait_although_the_api_is_away(how):
    scene = Scene(STARTS, ending_at=100.0, alive=[(4, 100)], api_away=[Away(10, how=how)])
    assert scene.wait().verdict is ChildVerdict.ENDED
    assert scene.time.now < 107


def test_api_that_is_away_is_said_once_and_when_it_is_back():
    scene = Scene([*STARTS, (200, "COMPLETED")], ending_at=199, alive=[(4, 199)], api_away=[Away(50, 140)])
    assert scene.wait().verdict is ChildVerdict.ENDED
    (away,) = scene.log.texts("warning")
    assert "Prefect API does not answer (ConnectError: [Errno 111] Connection refused)" in away
    assert [text for text in scene.log.texts("info") if "answers again" in text]


def test_short_restart_of_the_server_is_not_worth_a_line():
    scene = Scene([*STARTS, (60, "COMPLETED")], ending_at=59, alive=[(4, 59)], api_away=[Away(30, 33)])
    scene.wait()
    assert scene.log.texts("warning") == []


def test_api_away_for_long_is_no_end_while_the_child_gives_signs_of_life():
    scene = Scene(STARTS, ending_at=4000, alive=[(4, 4000)], api_away=[Away(50)])
    assert scene.wait().verdict is ChildVerdict.ENDED
    assert 4000 <= scene.time.now < 4010


def test_api_away_for_long_and_no_sign_of_life_is_lost():
    scene = Scene(STARTS, alive=[(4, 1000)], api_away=[Away(50)])
    end = scene.wait()
    assert end.verdict is ChildVerdict.LOST
    assert "has not answered for 30 minutes" in end.state_message
    assert 1850 <= scene.time.now < 1900


def test_api_and_store_away_for_long_is_lost():
    scene = Scene(STARTS, alive=[(4, 9000)], api_away=[Away(50)], store_away=[Away(60)])
    end = scene.wait()
    assert end.verdict is ChildVerdict.LOST
    assert "neither does the store" in end.state_message
    assert scene.time.now < 1900


@pytest.mark.parametrize(
    ("last", "verdict"), [("CRASHED", ChildVerdict.CRASHED), ("RUNNING", ChildVerdict.LOST)]
)
def test_store_that_fails_now_and_then_keeps_no_wait_from_ending(last, verdict):
    flaps = [Away(begin, begin + 20) for begin in range(60, 2000, 40)]
    scene = Scene([*STARTS, (50, last)], alive=[(4, 45)], store_away=flaps)
    assert scene.wait().verdict is verdict
    assert scene.time.now < 400


def test_completed_run_gets_some_time_for_its_ending():
    scene = Scene([*STARTS, (10, "COMPLETED")], ending_at=25, alive=[(4, 10)])
    assert scene.wait().verdict is ChildVerdict.ENDED
    assert 25 <= scene.time.now < 27


def test_completed_run_without_an_ending_is_reported_all_the_same():
    scene = Scene([*STARTS, (10, "COMPLETED")], alive=[(4, 10)])
    end = scene.wait()
    assert end.verdict is ChildVerdict.ENDED
    assert "Completed" in end.state_message
    assert 30 <= scene.time.now < 45
    assert "its ending is not in the store" in scene.log.texts("warning")[0]


def test_completed_run_is_waited_for_while_its_store_is_away():
    scene = Scene([*STARTS, (10, "COMPLETED")], ending_at=9, alive=[(4, 9)], store_away=[Away(5, 500)])
    assert scene.wait().verdict is ChildVerdict.ENDED
    assert 500 <= scene.time.now < 540
    assert "The store does not answer" in scene.log.texts("warning")[0]


def test_store_that_stays_away_ends_the_wait_for_a_run_that_is_over():
    scene = Scene([*STARTS, (10, "COMPLETED")], ending_at=9, store_away=[Away(5)])
    assert "store does not answer" in scene.wait().state_message
    assert scene.time.now < 1850


def test_failed_run_that_never_gave_a_sign_of_life_ends_the_wait_at_once():
    scene = Scene([*STARTS, (5, "FAILED")])
    end = scene.wait()
    assert (end.verdict, end.state_message) == (
        ChildVerdict.ENDED,
        "The child run is Failed: message of FAILED",
    )
    assert scene.time.now < 10


def test_crashed_run_is_final_when_its_sign_of_life_stands_still():
    scene = Scene([*STARTS, (50, "CRASHED")], alive=[(4, 70)])
    end = scene.wait()
    assert (end.verdict, end.state_message) == (
        ChildVerdict.CRASHED,
        "The child run is Crashed: message of CRASHED",
    )
    assert 90 <= scene.time.now < 110


def test_crashed_run_is_final_at_once_when_its_host_is_known_to_be_gone():
    scene = Scene([*STARTS, (50, "CRASHED")], alive=[(4, 49)], gone_at=51)
    end = scene.wait()
    assert end.verdict is ChildVerdict.CRASHED
    assert end.state_message == "The child run is Crashed: message of CRASHED"
    assert 51 <= scene.time.now < 54
    assert scene.log.texts("warning") == []


def test_running_run_is_lost_soon_when_its_host_is_known_to_be_gone():
    scene = Scene(STARTS, alive=[(4, 49)], gone_at=51)
    end = scene.wait()
    assert end.verdict is ChildVerdict.LOST
    assert "The child run is Running, but its process was killed" in end.state_message
    assert 54 <= scene.time.now < 64


def test_ending_counts_although_its_host_was_killed_after_it():
    scene = Scene(STARTS, alive=[(4, 49)], ending_at=50, gone_at=51)
    assert scene.wait().verdict is ChildVerdict.ENDED


def test_crashed_run_that_runs_again_is_waited_for():
    states = [*STARTS, (50, "CRASHED"), (75, "RUNNING"), (200, "COMPLETED")]
    scene = Scene(states, ending_at=199, alive=[(4, 45), (75, 199)])
    assert scene.wait().verdict is ChildVerdict.ENDED
    assert scene.time.now > 199


def test_crashed_run_that_gives_signs_of_life_is_waited_for():
    scene = Scene([*STARTS, (50, "CRASHED")], ending_at=600, alive=[(4, 600)])
    assert scene.wait().verdict is ChildVerdict.ENDED


def test_crash_is_not_decided_while_the_store_is_away():
    scene = Scene([*STARTS, (50, "CRASHED")], alive=[(4, 45)], ending_at=300, store_away=[Away(45, 320)])
    assert scene.wait().verdict is ChildVerdict.ENDED


def test_running_run_without_a_sign_of_life_is_lost():
    scene = Scene(STARTS, alive=[(4, 300)])
    end = scene.wait()
    assert end.verdict is ChildVerdict.LOST
    assert "no sign of life for 120 s" in end.state_message
    assert 410 <= scene.time.now < 435
    assert "gives no sign of life" in scene.log.texts("warning")[-1]


@pytest.mark.parametrize(("api", "store"), [(True, False), (False, True)], ids=["api", "store"])
def test_run_is_not_lost_while_api_or_store_is_away(api, store):
    away = [Away(200, 905)]
    scene = Scene(
        STARTS,
        alive=[(4, 300)],
        ending_at=900,
        api_away=away if api else [],
        store_away=away if store else [],
    )
    assert scene.wait().verdict is ChildVerdict.ENDED


def test_deleted_run_is_crashed_when_it_stays_away():
    scene = Scene(STARTS, alive=[(4, 500)], deleted_at=100)
    end = scene.wait()
    assert (end.verdict, end.state_message) == (ChildVerdict.CRASHED, "The child run was deleted.")
    assert 110 <= scene.time.now < 115


def test_one_404_is_no_end():
    scene = Scene([*STARTS, (60, "COMPLETED")], ending_at=59, alive=[(4, 60)])
    scene.time.at = {
        30: lambda: setattr(scene.api, "deleted_at", 30),
        35: lambda: setattr(scene.api, "deleted_at", 1e9),
    }
    assert scene.wait().verdict is ChildVerdict.ENDED


def test_run_that_somebody_cancelled_is_cancelled():
    scene = Scene([*STARTS, (50, "CANCELLED")], alive=[(4, 50)])
    assert scene.wait().verdict is ChildVerdict.CANCELLED


def test_run_cancelled_before_it_started_ends_the_wait_at_once():
    scene = Scene([(0, "SCHEDULED"), (50, "CANCELLED")])
    assert scene.wait().verdict is ChildVerdict.CANCELLED
    assert scene.time.now < 57


def test_cancelled_run_whose_host_still_stops_is_waited_for():
    scene = Scene([*STARTS, (50, "CANCELLED")], alive=[(4, 115)], ending_at=115)
    assert scene.wait().verdict is ChildVerdict.ENDED


def test_cancelling_run_without_a_host_is_cancelled():
    scene = Scene([*STARTS, (50, "CANCELLING")], alive=[(4, 45)])
    assert scene.wait().verdict is ChildVerdict.CANCELLED
    assert "Stopping" in scene.mirror.phases


def test_task_that_is_asked_to_stop_gives_up_the_wait():
    scene = Scene(STARTS, alive=[(4, 500)])
    with pytest.raises(GangCancelled, match="asked to stop"):
        scene.wait(cancelled_at=100)
    assert scene.time.now < 100.5
    assert scene.mirror.phases[-1] == "Stopping"


@pytest.mark.parametrize("state", ["CANCELLING", "CANCELLED"])
def test_cancelled_parent_gives_up_the_wait(state):
    scene = Scene(STARTS, alive=[(4, 500)], parent=[(0, "RUNNING"), (100, state)])
    with pytest.raises(GangCancelled, match=f"flow run of this task is {state.capitalize()}"):
        scene.wait()
    assert scene.time.now < 103


def test_deleted_parent_hides_no_cancelled_one():
    time, cancelled = VirtualTime(), [(0.0, "CANCELLING")]
    api = FakeApi(time, STARTS, parent=cancelled)
    api.deleted_at = 0.0
    options: Any = {"pool": "train", "explain": lambda _: "", "log": SeenLog(time), "clock": time.clock}
    eyes = ApiEyes(uuid4(), parent_ids=[uuid4(), api.parent_id], **options)
    assert eyes.look(cast("SyncPrefectClient", api)).cancelled_run == api.parent_id


@pytest.mark.parametrize("states", [[(0.0, "SCHEDULED")], [(0.0, "SCHEDULED"), (5.0, "PENDING")]])
def test_run_that_does_not_start_in_time_is_not_started(states):
    scene = Scene(states)
    end = scene.wait(start_within_seconds=600)
    assert end.verdict is ChildVerdict.NOT_STARTED
    assert "has not started within 600 s" in end.state_message
    assert 600 <= scene.time.now < 606


def test_time_to_start_is_no_limit_once_it_has_run():
    scene = Scene([*STARTS, (900, "COMPLETED")], ending_at=900, alive=[(4, 900)])
    assert scene.wait(start_within_seconds=60).verdict is ChildVerdict.ENDED


def test_reason_of_the_wait_is_said_at_once_and_every_five_minutes():
    states = [(0, "SCHEDULED"), (700, "RUNNING"), (710, "COMPLETED")]
    reason = "Pool `train` has no worker: `prefect worker start`."
    scene = Scene(states, reason=lambda _: reason, ending_at=709)
    scene.wait()
    said = [(at, text) for at, which, text in scene.log.lines if which == "warning"]
    assert [round(at / 100) for at, _ in said] == [0, 3, 6]
    assert said[0][1] == reason
    assert said[2][1].endswith("(10 minutes so far)")
    assert scene.mirror.shown[0] == (
        "WaitingForWorker",
        "Pool `train` has no worker: `prefect worker start`.",
    )


def test_reason_that_changes_is_said_and_shown():
    scene = Scene([(0, "SCHEDULED")], reason=lambda now: "no worker" if now < 50 else "pool is paused")
    with pytest.raises(GangCancelled):
        scene.wait(cancelled_at=100)
    assert scene.log.texts("warning") == ["no worker", "pool is paused"]


def test_pool_that_was_deleted_is_the_reason():
    def explain(now: float) -> str:
        raise SpecError("There is no work pool `train`.")

    scene = Scene([(0, "SCHEDULED")], reason=explain)
    with pytest.raises(GangCancelled):
        scene.wait(cancelled_at=20)
    assert scene.log.texts("warning") == ["There is no work pool `train`."]


@pytest.mark.parametrize(
    ("state", "text"),
    [
        pytest.param("SCHEDULED", "no worker has taken the child run", id="busy workers"),
        pytest.param(
            "PENDING:InfrastructurePending", "it does not start (`InfrastructurePending`)", id="pending"
        ),
        pytest.param("PAUSED", "when somebody resumes it", id="paused"),
    ],
)
def test_run_that_does_not_move_is_said(state, text):
    scene = Scene([(0, state)])
    with pytest.raises(GangCancelled):
        scene.wait(cancelled_at=200)
    (warning,) = scene.log.texts("warning")
    assert text in warning


def test_lines_of_the_child_are_followed_to_the_last():
    scene = Scene(
        [*STARTS, (9, "COMPLETED")],
        ending_at=8,
        alive=[(4, 8)],
        lines=[(3, "worker takes it"), (5, "step 1"), (8.9, "done")],
    )
    scene.wait()
    assert scene.log.texts("child") == ["[train] worker takes it", "[train] step 1", "[train] done"]


def test_last_lines_are_printed_although_they_are_many():
    lines = [(8 + number / 10_000, str(number)) for number in range(5000)]
    scene = Scene([*STARTS, (9, "COMPLETED")], ending_at=9, alive=[(4, 8)], lines=lines)
    scene.wait()
    assert scene.log.texts("child") == [f"[train] {number}" for number in range(5000)]


def test_log_that_cannot_be_read_ends_nothing(monkeypatch):
    scene = Scene([*STARTS, (60, "COMPLETED")], ending_at=59, alive=[(4, 60)])

    def read_logs(**_: Any) -> Any:
        raise make_outage(500)

    monkeypatch.setattr(scene.api, "read_logs", read_logs)
    assert scene.wait().verdict is ChildVerdict.ENDED
    (warning,) = scene.log.texts("warning")
    assert "The log of the child run cannot be read" in warning


def test_request_that_the_server_refuses_is_raised():
    scene = Scene(STARTS, api_away=[Away(10, how=422)])
    with pytest.raises(Exception, match="error"):
        scene.wait()


# --- a gang that a cluster queues, and starts again ---


def cluster(states: Sequence[tuple[float, str]], **facts: Any) -> Scene:
    return Scene(states, pool=make_pool("torch-elastic"), stride=1.0, **facts)


DAY = 86400.0
QUEUED = [(0.0, "SCHEDULED"), (2.0, "PENDING"), (4.0, "PENDING:Queued")]


def test_gang_is_shown_by_the_names_that_its_worker_gives_it():
    states = [*QUEUED, (50, "PENDING:Admitted"), (60, "PENDING:Starting"), (70, "RUNNING")]
    scene = cluster([*states, (90, "COMPLETED")], ending_at=89, alive=[(70, 89)])
    assert scene.wait().verdict is ChildVerdict.ENDED
    names = ["WaitingForWorker", "Starting", "Queued", "Admitted", "Starting", "Running"]
    assert scene.mirror.phases == names
    said = [text for text in scene.log.texts("info") if text.startswith("Pool `train`: ")]
    assert said[2] == "Pool `train`: Queued: The gang is Queued."
    assert len(said) == len(names)


def test_gang_that_waits_in_its_queue_for_days_is_waited_for():
    states = [*QUEUED, (2 * DAY, "RUNNING"), (2 * DAY + 100, "COMPLETED")]
    scene = cluster(states, ending_at=2 * DAY + 99, alive=[(2 * DAY, 2 * DAY + 99)], limit=3 * DAY)
    scene.time.stride = 20.0
    assert scene.wait(start_within_seconds=60).verdict is ChildVerdict.ENDED
    assert scene.log.texts("warning") == []


def test_gang_that_was_preempted_is_waited_for_without_limit():
    back = 0.5 * DAY
    states = [
        *QUEUED,
        (50, "RUNNING"),
        (100, "PENDING:Preempted"),
        (back, "RUNNING"),
        (back + 50, "COMPLETED"),
    ]
    scene = cluster(states, ending_at=back + 49, alive=[(50, 100), (back, back + 49)], limit=DAY)
    scene.time.stride = 10.0
    assert scene.wait(start_within_seconds=60).verdict is ChildVerdict.ENDED
    assert scene.mirror.phases[-3:] == ["Running", "Preempted", "Running"]
    assert scene.log.texts("warning") == []


@pytest.mark.parametrize("gone_at", [float("inf"), 101.0], ids=["still", "gone"])
def test_gang_that_comes_back_is_not_lost_meanwhile(gone_at):
    """Its worker is down, so that nobody takes the state Running from it."""
    scene = cluster(
        [*QUEUED, (50, "RUNNING")], alive=[(50, 100), (1600, 1700)], ending_at=1700, gone_at=gone_at
    )
    scene.time.at = {1600: lambda: setattr(scene.store, "gone_at", float("inf"))}
    assert scene.wait().verdict is ChildVerdict.ENDED


def test_gang_that_gives_no_sign_of_life_for_long_is_lost():
    scene = cluster([*QUEUED, (50, "RUNNING")], alive=[(50, 100)], gone_at=105)
    end = scene.wait()
    assert end.verdict is ChildVerdict.LOST
    assert "has given no sign of life for 1800 s" in end.state_message
    assert 1900 <= scene.time.now < 1930
    assert "After 1800 s it counts as lost." in scene.log.texts("warning")[0]


def test_gang_that_no_worker_takes_is_not_started():
    scene = cluster([(0, "SCHEDULED")])
    end = scene.wait(start_within_seconds=600)
    assert end.verdict is ChildVerdict.NOT_STARTED
    assert 600 <= scene.time.now < 606


def test_worker_of_a_gang_has_time_to_ask_for_it_however_short_the_grace_is():
    scene = cluster([(0, "SCHEDULED"), (15, "PENDING"), (17, "FAILED")])
    assert scene.wait(start_within_seconds=0).verdict is ChildVerdict.ENDED


def test_place_in_the_queue_is_shown_at_once_and_said_once_a_minute(monkeypatch):
    states = [*QUEUED, (300, "RUNNING"), (310, "COMPLETED")]
    scene = cluster(states, ending_at=309, alive=[(300, 309)])
    read = scene.api.read_flow_run

    def read_with_place(flow_run_id: UUID) -> Any:
        run = read(flow_run_id)
        if run.state and run.state.name == "Queued":
            place = 20 - int(scene.time.now // 20)
            state = run.state.model_copy(update={"message": f"Queued in `lq` at place {place}."})
            return run.model_copy(update={"state": state})
        return run

    monkeypatch.setattr(scene.api, "read_flow_run", read_with_place)
    scene.wait()
    places = [text for text in scene.log.texts("info") if "at place" in text]
    assert places[0] == "Pool `train`: Queued in `lq` at place 20."
    assert len(places) == 5
    assert len([phase for phase in scene.mirror.phases if phase == "Queued"]) == 15


moments = st.floats(0.0, 900.0)
outages = st.lists(
    st.builds(
        lambda begin, length, how: Away(begin, begin + length, how),
        moments,
        st.one_of(st.floats(1.0, 600.0), st.just(float("inf"))),
        st.sampled_from(["refused", 500, 503]),
    ),
    max_size=2,
)
lives = st.lists(
    st.builds(lambda begin, length: (begin, begin + length), moments, st.floats(0.0, 600.0)), max_size=3
)
middles = st.lists(
    st.tuples(moments, st.sampled_from(["SCHEDULED", "PENDING", "RUNNING", "PAUSED", "CANCELLING", *FINAL])),
    max_size=5,
)


@settings(max_examples=100, deadline=None)
@given(
    middle=middles,
    last=st.sampled_from([*FINAL, "RUNNING", "CANCELLING", "deleted"]),
    alive=lives,
    api_away=outages,
    store_away=outages,
    ending_at=st.one_of(st.just(float("inf")), moments),
)
def test_wait_always_ends_when_the_child_does(middle, last, alive, api_away, store_away, ending_at):
    """1000: the last event; then the host is dead, and the child final, deleted, or called Running for ever.

    The one wait that has no end is for a run that is called Running by an API that answers, and whose store
    never answers: it may well live. A store that answers again decides it.
    """
    if last in ("RUNNING", "CANCELLING"):
        store_away = [Away(away.begin, min(away.end, 1500.0), away.how) for away in store_away]
    states = [(0.0, "SCHEDULED"), *sorted(middle), (1000.0, "RUNNING" if last == "deleted" else last)]
    scene = Scene(
        states,
        alive=sorted(alive),
        api_away=api_away,
        store_away=store_away,
        ending_at=ending_at,
        deleted_at=1000.0 if last == "deleted" else float("inf"),
        stride=2.0,
        limit=1600.0 + 2 * 1800.0,
    )
    end = scene.wait()
    assert end.state_message
    if end.verdict is ChildVerdict.NOT_STARTED:
        pytest.fail("there was no time to start within")


# --- in real time ---


class Hanging:
    """An API, or a store, that takes a request and never answers."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_kwargs: self.released.wait(20)


def test_wait_is_given_up_within_a_second_although_api_and_store_hang():
    hanging = Hanging()
    began = time.monotonic()
    with pytest.raises(GangCancelled):
        wait_for_child(
            FakeApi(VirtualTime(), []).child_id,
            pool=make_pool(),
            parent_flow_run_ids=[],
            evidence=hanging,  # pyright: ignore[reportArgumentType]
            explain=lambda _: "",
            mirror=SeenMirror(),  # pyright: ignore[reportArgumentType]
            log=SeenLog(VirtualTime()),
            cancelled=lambda: time.monotonic() - began > 0.3,
            means=Means(
                make_api_caller=lambda: ThreadCaller(lambda: nullcontext(hanging), name="api"),  # pyright: ignore[reportArgumentType]
            ),
        )
    assert time.monotonic() - began < 1.0
    hanging.released.set()


# --- on a real server ---


@flow
def body() -> None:
    """Stands for a step in a work pool."""


class Host:
    """Plays the host of a child run on a real server: sets its states, and writes its ending to the store."""

    def __init__(self, client: SyncPrefectClient) -> None:
        self.client = client
        self.child_id = client.create_flow_run(body, state=Scheduled()).id
        self.is_over = False
        self.mirror, self.log = SeenMirror(), SeenLog(VirtualTime())

    def has_ending(self) -> bool:
        return self.is_over

    def pulse(self) -> str:
        return str(time.monotonic())

    def play(self, *states: State) -> None:
        for state in states:
            time.sleep(0.7)
            if state.is_final():
                self.is_over = True
            self.client.set_flow_run_state(self.child_id, state)

    def wait(self, *, parent: UUID | None = None) -> ChildEnd:
        return wait_for_child(
            self.child_id,
            pool=make_pool(),
            parent_flow_run_ids=[parent] if parent else [],
            evidence=self,
            explain=lambda client: str(client.api_url),
            mirror=self.mirror,  # pyright: ignore[reportArgumentType]
            log=self.log,
            cancelled=lambda: False,
        )


@pytest.fixture
def host(prefect_server):
    with get_client(sync_client=True) as client:
        yield Host(client)


def test_child_on_a_real_server_is_followed_to_its_end(host, prefect_server):
    thread = threading.Thread(target=host.play, args=[Pending(), Running(), Completed()])
    thread.start()
    end = host.wait()
    thread.join()
    assert (end.verdict, end.run and end.run.state and end.run.state.name) == (
        ChildVerdict.ENDED,
        "Completed",
    )
    assert host.mirror.phases == ["WaitingForWorker", "Starting", "Running"]
    assert host.log.texts("warning") == [
        f"{prefect_server}/"
    ]  # why no worker takes it, asked with the client


def test_child_that_is_deleted_on_a_real_server_is_crashed(host, monkeypatch):
    from prefect_torch_elastic.dispatch import verdicts

    monkeypatch.setattr(verdicts, "GONE_SECONDS", 0.5)
    host.client.delete_flow_run(host.child_id)
    assert host.wait().verdict is ChildVerdict.CRASHED


def test_parent_that_is_cancelled_on_a_real_server_gives_up_the_wait(host):
    parent = host.client.create_flow_run(body, state=Running()).id
    timer = threading.Timer(1.0, host.client.set_flow_run_state, [parent, Cancelling()])
    timer.start()
    with pytest.raises(GangCancelled, match="Cancelling"):
        host.wait(parent=parent)
    timer.join()
