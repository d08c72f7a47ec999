"""What a run shows of its gang, and when a gang is over: by the clock, with an API that may be away."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Cancelling, Completed, Crashed, Failed, Pending, Running

from prefect_torch_elastic.dispatch.failurelabel import SeenFailure, name_failure, parse_failure_label
from prefect_torch_elastic.dispatch.stopping import STOP_LABEL
from prefect_torch_elastic.evidence import Category
from prefect_torch_elastic.hosting.asking import Outage
from prefect_torch_elastic.kubernetes.gangtimes import GangTimes, render_seconds
from prefect_torch_elastic.kubernetes.judging import (
    BLOCKED_SECONDS,
    MARGIN_SECONDS,
    REPORT_SECONDS,
    UNMANAGED_SECONDS,
    GangEnd,
    GangJudge,
    Outcome,
    RunSight,
)
from prefect_torch_elastic.kubernetes.phases import GangPhase
from prefect_torch_elastic.kubernetes.podfailures import PodFailure
from prefect_torch_elastic.kubernetes.podwaits import IMAGE_PULL
from prefect_torch_elastic.kubernetes.reporting import END_TRIES, MESSAGE_SECONDS, Reporter
from prefect_torch_elastic.kubernetes.runstates import Change, decide_change, sight_run
from tests.gangfakes import Clock, FakeRuns, make_run, make_status

QUEUED, RUNNING, PREEMPTED = GangPhase.QUEUED, GangPhase.RUNNING, GangPhase.PREEMPTED
OOM = PodFailure(
    category="oom", pod="p", node=1, node_name="n", message="Node 1 had too little memory.", cure="Ask more."
)

NO_IMAGE = PodFailure(
    category=IMAGE_PULL, pod="p", node=1, node_name="n", message="Pod `p` has no image.", cure="Name one."
)


def sight(state: State[Any], **fields: Any) -> RunSight:
    return sight_run(make_run(state, **fields))


# --- states -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "state", "change"),
    [
        pytest.param(QUEUED, Pending(name="Submitting"), Change.PROPOSE, id="queued"),
        pytest.param(QUEUED, Pending(name="Queued"), Change.FORCE, id="another-place-in-the-queue"),
        pytest.param(PREEMPTED, Running(), Change.FORCE, id="preempted"),
        pytest.param(GangPhase.STARTING, Pending(name="Queued"), Change.PROPOSE, id="starting"),
        pytest.param(GangPhase.STARTING, Pending(name="Starting"), Change.NONE, id="leader-may-be-quicker"),
        pytest.param(GangPhase.STARTING, Running(), Change.NONE, id="leader-was-quicker"),
        pytest.param(GangPhase.RESTARTING, Running(), Change.NONE, id="restarting"),
        pytest.param(RUNNING, Pending(name="Starting"), Change.NONE, id="running-is-the-leaders-word"),
        pytest.param(RUNNING, Pending(name="Preempted"), Change.PROPOSE, id="running-is-starting-until-then"),
        pytest.param(GangPhase.SUCCEEDED, Running(), Change.NONE, id="succeeded"),
        pytest.param(QUEUED, Cancelling(), Change.NONE, id="cancelling-is-kept"),
        pytest.param(QUEUED, Completed(), Change.NONE, id="final-is-kept"),
    ],
)
def test_phase_changes_the_state_of_the_run(phase: GangPhase, state: State[Any], change: Change):
    assert decide_change(phase, sight(state)) is change


def make_reporter(runs: FakeRuns, run: Any, *, events: list[dict[str, Any]] | None = None) -> Reporter:
    said: list[str] = []

    def emit(**event: Any) -> None:
        if events is not None:
            events.append(event)

    return Reporter(
        runs,
        run,
        log=logging.getLogger("tests.gang"),
        outage=Outage(said.append),
        resource={"prefect.resource.id": "prefect-torch-elastic.gang.u"},
        emit=emit,
        sleep=Clock().sleep,
    )


@pytest.fixture(autouse=True)
def _lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tests.gang")


async def test_phase_is_a_state_a_line_and_an_event_once(caplog):
    run, events = make_run(), []
    runs = FakeRuns(run)
    reporter = make_reporter(runs, run, events=events)
    for now in (0.0, 1.0):
        await reporter.show(now, make_status(QUEUED, "At place 3.", preemptions=1))
    assert runs.set == [("PENDING", "Queued", False)]
    assert runs.state(run).message == "At place 3."
    assert caplog.messages == ["Queued: At place 3."]
    assert [event["event"] for event in events] == ["prefect-torch-elastic.gang.queued"]
    assert events[0]["payload"]["preemptions"] == 1


async def test_preemption_is_an_event_even_if_nobody_saw_the_gang_wait():
    run, events = make_run(Running()), []
    reporter = make_reporter(FakeRuns(run), run, events=events)
    for phase, preemptions in [(RUNNING, 0), (GangPhase.STARTING, 1), (RUNNING, 1)]:
        await reporter.show(0.0, make_status(phase, preemptions=preemptions))
    assert [event["event"].rpartition(".")[2] for event in events] == ["running", "preempted", "running"]


async def test_preemption_is_one_event_in_all_of_its_phases():
    run, events = make_run(Running()), []
    reporter = make_reporter(FakeRuns(run), run, events=events)
    for phase, preemptions in [(RUNNING, 0), (GangPhase.STOPPING, 1), (PREEMPTED, 1), (RUNNING, 1)]:
        await reporter.show(0.0, make_status(phase, preemptions=preemptions))
    assert [event["event"].rpartition(".")[2] for event in events] == ["running", "preempted", "running"]


async def test_line_does_not_say_the_phase_twice(caplog):
    run = make_run()
    reporter = make_reporter(FakeRuns(run), run)
    await reporter.show(0.0, make_status(GangPhase.STARTING, "Starting: 0 of 2 pods run."))
    assert caplog.messages == ["Starting: 0 of 2 pods run."]


async def test_pod_that_ends_an_attempt_is_told_once(caplog):
    run = make_run(Running())
    reporter = make_reporter(FakeRuns(run), run)
    victim = replace(OOM, message="Node 0 lost its peers.", is_consequence=True)
    for failure in (NO_IMAGE, victim, OOM, replace(OOM, message="Two nodes had too little memory."), OOM):
        reporter.warn(failure)
    assert caplog.messages == ["Node 1 had too little memory. Ask more."]


async def test_message_alone_is_shown_again_after_a_while():
    run = make_run()
    runs = FakeRuns(run)
    reporter = make_reporter(runs, run)
    await reporter.show(0.0, make_status(QUEUED, "At place 3."))
    await reporter.show(1.0, make_status(QUEUED, "At place 2."))
    assert runs.state(run).message == "At place 3."
    await reporter.show(MESSAGE_SECONDS, make_status(QUEUED, "At place 1."))
    assert runs.state(run).message == "At place 1."


async def test_preempted_run_waits_again_and_starts_again():
    run = make_run(Running())
    runs = FakeRuns(run)
    reporter = make_reporter(runs, run)
    await reporter.show(0.0, make_status(PREEMPTED))
    await reporter.show(1.0, make_status(GangPhase.STARTING))
    assert runs.set == [("PENDING", "Preempted", True), ("PENDING", "Starting", False)]


async def test_gang_that_runs_again_at_once_is_starting_until_its_leader_says_more():
    run = make_run(Running())
    runs = FakeRuns(run)
    reporter = make_reporter(runs, run)
    await reporter.show(0.0, make_status(PREEMPTED))
    await reporter.show(1.0, make_status(RUNNING))
    assert runs.set[-1] == ("PENDING", "Starting", False)


async def test_state_is_shown_once_the_api_is_back():
    run = make_run()
    runs = FakeRuns(run)
    runs.errors.append(httpx.ConnectError("refused"))
    reporter = make_reporter(runs, run)
    await reporter.show(0.0, make_status(QUEUED))
    assert not runs.set
    await reporter.show(5.0, make_status(QUEUED))
    assert runs.set == [("PENDING", "Queued", False)]


async def test_broken_event_is_no_error():
    run = make_run()
    runs = FakeRuns(run)
    reporter = make_reporter(runs, run)
    reporter._emit = lambda **_: 1 / 0
    await reporter.show(0.0, make_status(QUEUED))
    assert runs.state(run).name == "Queued"


FAILED = GangEnd(outcome=Outcome.FAILED, message="Node 1 had too little memory.")


@pytest.mark.parametrize(
    ("state", "ending", "end"),
    [
        pytest.param(Running(), FAILED, "FAILED", id="failed"),
        pytest.param(Pending(), FAILED, "FAILED", id="never-ran"),
        pytest.param(Completed(), FAILED, "COMPLETED", id="final-stays"),
        pytest.param(Crashed(), FAILED, "CRASHED", id="crashed-stays"),
        pytest.param(Cancelling(), FAILED, "CANCELLED", id="cancelled-meanwhile"),
        pytest.param(Running(), GangEnd(outcome=Outcome.LEFT, message=""), "RUNNING", id="left"),
        pytest.param(Running(), GangEnd(outcome=Outcome.CRASHED, message="x"), "CRASHED", id="crashed"),
        pytest.param(
            Cancelling(), GangEnd(outcome=Outcome.CANCELLED, message="x"), "CANCELLED", id="cancelled"
        ),
    ],
)
async def test_ending_gives_the_run_its_state(state: State[Any], ending: GangEnd, end: str):
    run = make_run(state)
    runs = FakeRuns(run)
    await make_reporter(runs, run).end(ending)
    assert runs.state(run).type.value == end


async def test_final_state_is_reported_however_long_the_api_is_away():
    run = make_run(Running())
    runs = FakeRuns(run)
    runs.errors += [httpx.ConnectError("refused")] * 20
    await make_reporter(runs, run).end(FAILED)
    assert runs.state(run).message == FAILED.message


async def test_ending_of_a_deleted_run_is_nobodys():
    run = make_run()
    assert await make_reporter(FakeRuns(), run).end(FAILED)


async def test_final_state_that_is_refused_for_a_while_is_reported_again():
    run = make_run(Running())
    runs = FakeRuns(run)
    runs.refusals = 2 * END_TRIES - 1
    assert await make_reporter(runs, run).end(FAILED)
    assert runs.state(run).message == FAILED.message


async def test_final_state_that_is_refused_for_good_is_told_with_the_reason(caplog):
    run = make_run(Running())
    runs = FakeRuns(run)
    runs.refusals = 100
    assert not await make_reporter(runs, run).end(FAILED)
    assert "`Failed` (Node 1 had too little memory.)" in caplog.messages[-1]
    assert "last for ABORT (a rule), and it is `Running`" in caplog.messages[-1]


async def test_final_state_that_meets_an_error_that_is_no_outage_is_told(caplog):
    run = make_run(Running())
    runs = FakeRuns(run)
    runs.errors += [ValueError("no such field")] * END_TRIES
    assert not await make_reporter(runs, run).end(FAILED)
    assert "last for ValueError: no such field" in caplog.messages[-1]


# --- endings ----------------------------------------------------------------------------------------------


def judge(phase: GangPhase, run: RunSight | None = None, **facts: Any) -> GangJudge:
    made = GangJudge(0.0, grace_seconds=10, inadmissible_grace_seconds=600)
    made.see_gang(0.0, make_status(phase, **facts), None)
    if run:
        made.see_run(0.0, run)
    return made


def ends(made: GangJudge, now: float) -> Outcome | None:
    ending = made.decide(now)
    return ending.outcome if ending else None


@pytest.mark.parametrize(
    ("phase", "seconds", "outcome"),
    [
        pytest.param(GangPhase.SUCCEEDED, REPORT_SECONDS, Outcome.CRASHED, id="no-report"),
        pytest.param(GangPhase.UNMANAGED, UNMANAGED_SECONDS, Outcome.FAILED, id="unmanaged"),
        pytest.param(GangPhase.INADMISSIBLE, 600, Outcome.FAILED, id="inadmissible"),
    ],
)
def test_phase_ends_the_gang_after_its_time(phase: GangPhase, seconds: float, outcome: Outcome):
    made = judge(phase, sight(Running()))
    assert ends(made, seconds - 0.1) is None
    assert ends(made, seconds) is outcome


@pytest.mark.parametrize("phase", [GangPhase.STARTING, GangPhase.RESTARTING])
@pytest.mark.parametrize("state", [Pending(name="Starting"), Running()], ids=["before", "leader-runs"])
def test_gang_with_a_pod_that_cannot_start_fails_after_a_while_c049(phase: GangPhase, state: State[Any]):
    made = judge(phase, sight(state))
    made.see_gang(10, make_status(phase, "Starting: 1 of 2 pods run."), NO_IMAGE)
    made.see_gang(200, make_status(phase, "Starting: 1 of 2 pods run."), NO_IMAGE)
    assert ends(made, 9.9 + BLOCKED_SECONDS) is None
    ending = made.decide(10 + BLOCKED_SECONDS)
    assert ending is not None
    assert (ending.outcome, ending.has_pods) == (Outcome.FAILED, True)
    assert "Pod `p` has no image. Name one. It was waited for 300 s." in ending.message


@pytest.mark.parametrize(
    ("phase", "failure"),
    [
        pytest.param(GangPhase.STARTING, None, id="it-starts-now"),
        pytest.param(GangPhase.STARTING, OOM, id="another-failure"),
        pytest.param(PREEMPTED, NO_IMAGE, id="its-quota-is-taken"),
        pytest.param(RUNNING, NO_IMAGE, id="it-runs"),
    ],
)
def test_time_of_a_pod_that_cannot_start_begins_anew(phase: GangPhase, failure: PodFailure | None):
    made = judge(GangPhase.STARTING)
    made.see_gang(0, make_status(GangPhase.STARTING), NO_IMAGE)
    made.see_gang(299, make_status(phase), failure)
    made.see_gang(301, make_status(GangPhase.STARTING), NO_IMAGE)
    assert ends(made, 600) is None


def test_time_of_a_phase_begins_anew():
    made = judge(GangPhase.INADMISSIBLE)
    made.see_gang(599, make_status(QUEUED), None)
    made.see_gang(601, make_status(GangPhase.INADMISSIBLE), None)
    assert ends(made, 1200) is None


@pytest.mark.parametrize("phase", [QUEUED, RUNNING, PREEMPTED, GangPhase.STOPPING, GangPhase.RESTARTING])
def test_gang_that_goes_on_has_no_ending(phase: GangPhase):
    assert ends(judge(phase, sight(Running())), 1e6) is None


@pytest.mark.parametrize(
    ("phase", "outcome"),
    [
        (GangPhase.FAILED, Outcome.FAILED),
        (GangPhase.DEACTIVATED, Outcome.FAILED),
        (GangPhase.GONE, Outcome.CRASHED),
    ],
)
def test_final_phase_ends_the_gang_at_once(phase: GangPhase, outcome: Outcome):
    assert ends(judge(phase, sight(Running())), 0.0) is outcome


def test_pods_of_a_deactivated_gang_go_before_its_run_is_over():
    ending = judge(GangPhase.DEACTIVATED, sight(Running())).decide(1.0)
    assert ending
    assert ending.has_pods  # else its driver would send another gang beside them


@pytest.mark.parametrize("phase", [GangPhase.FAILED, GangPhase.SUCCEEDED, GangPhase.GONE])
def test_run_keeps_the_final_state_of_its_leader(phase: GangPhase):
    assert ends(judge(phase, sight(Failed())), 0.0) is Outcome.LEFT


def test_failure_is_explained_by_its_pod_and_by_the_cluster():
    made = judge(RUNNING, sight(Running()))
    made.see_gang(1.0, make_status(GangPhase.FAILED, "It failed.", detail="ReachedMaxRestarts"), OOM)
    ending = made.decide(1.0)
    assert ending is not None
    assert ending.message == (
        "It failed. Node 1 had too little memory. Ask more. The cluster says: ReachedMaxRestarts"
    )
    assert ending.may_stay
    assert not ending.has_pods


@pytest.mark.parametrize("phase", [QUEUED, RUNNING, PREEMPTED, GangPhase.STARTING])
@pytest.mark.parametrize("state", [Cancelling(message="no more"), Cancelled(message="no more")])
def test_cancelled_run_ends_its_gang_at_once(phase: GangPhase, state: State[Any]):
    ending = judge(phase, sight(state)).decide(0.0)
    assert ending == GangEnd(outcome=Outcome.CANCELLED, message="no more", has_pods=True)


def test_gang_that_somebody_deleted_says_how_to_go_on():
    ending = judge(GangPhase.GONE, sight(Running())).decide(0.0)
    assert ending is not None
    assert "Somebody deleted the JobSet of this run" in ending.message
    assert "run it again" in ending.message


def test_deleted_run_ends_its_gang():
    assert ends(judge(RUNNING, RunSight(type="")), 0.0) is Outcome.LEFT


def test_driver_that_wants_a_stop_is_heard_by_the_leader_first():
    made = judge(RUNNING, sight(Running(), labels={STOP_LABEL: "Ctrl-C"}))
    assert ends(made, 9 + MARGIN_SECONDS) is None
    ending = made.decide(10 + MARGIN_SECONDS)
    assert ending == GangEnd(outcome=Outcome.CANCELLED, message="Ctrl-C", has_pods=True)


def test_driver_that_wants_a_stop_is_heard_by_the_worker_when_the_gang_waits():
    made = judge(PREEMPTED, sight(Pending(), labels={STOP_LABEL: "Ctrl-C"}))
    assert ends(made, 0.0) is Outcome.CANCELLED


def test_gang_of_a_run_that_is_over_has_time_to_end_itself():
    made = judge(RUNNING, sight(Completed()))
    assert ends(made, 1.0) is None
    assert ends(made, 10 + MARGIN_SECONDS) is Outcome.LEFT


# --- times ------------------------------------------------------------------------------------------------


def test_times_of_waiting_and_running_are_added_up():
    times = GangTimes(0.0)
    for now, phase in [(1, QUEUED), (101, GangPhase.STARTING), (111, RUNNING), (4000, PREEMPTED)]:
        times.see(now, phase)
    times.see(4100, RUNNING)
    times.see(4200, RUNNING)
    times.see(4300, GangPhase.SUCCEEDED)
    times.see(5000, None)
    seconds = (times.waiting_seconds, times.starting_seconds, times.running_seconds)
    assert seconds == (1 + 100 + 100, 10, 3889 + 200)
    assert times.render(make_status(GangPhase.SUCCEEDED, preemptions=1, restarts=2)) == (
        "The gang waited 3 min 21 s for its quota, took 10 s to start and stop, and ran 1 h 8 min. "
        "It had 1 preemption and 2 new attempts."
    )


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (7260, "2 h 1 min")])
def test_seconds_are_written_for_people(seconds: float, text: str):
    assert render_seconds(seconds) == text


# --- what somebody else says meanwhile -------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(Cancelling(message="no more"), id="cancelled"),
        pytest.param(Completed(message="Rank 0 has returned."), id="completed"),
        pytest.param(Failed(name="TimedOut", message="It ran too long."), id="timed-out"),
    ],
)
async def test_word_between_a_look_and_a_forced_state_is_put_back(said: State[Any]):
    run = make_run(Running())
    runs = FakeRuns(run)
    runs.between = said
    await make_reporter(runs, run).show(0.0, make_status(PREEMPTED))
    held = runs.state(run)
    assert (held.type, held.name, held.message) == (said.type, said.name, said.message)


async def test_word_of_the_leader_that_began_is_not_put_back_over_a_preemption():
    run = make_run(Pending(name="Queued"))
    runs = FakeRuns(run)
    runs.between = Running()
    await make_reporter(runs, run).show(0.0, make_status(QUEUED, "At place 2."))
    assert runs.state(run).name == "Queued"


async def hear_the_leader_before_our_word(before: State[Any], waiting: GangPhase) -> tuple[FakeRuns, Any]:
    """A forced state is late: the leader of the next start says that it runs before it lands."""
    run = make_run(before)
    runs = FakeRuns(run)
    runs.between = Running()
    reporter = make_reporter(runs, run)
    await reporter.show(0.0, make_status(waiting, evictions=1))
    assert runs.state(run).is_pending()
    return runs, reporter


@pytest.mark.parametrize(
    ("before", "waiting"),
    [
        pytest.param(Running(), PREEMPTED, id="preempted"),
        pytest.param(Pending(name="Queued"), QUEUED, id="queued"),
    ],
)
@pytest.mark.parametrize("is_starting_seen", [False, True], ids=["at-once", "starting-first"])
async def test_run_that_our_late_word_overruled_runs_again(
    before: State[Any], waiting: GangPhase, is_starting_seen: bool
):
    runs, reporter = await hear_the_leader_before_our_word(before, waiting)
    if is_starting_seen:
        await reporter.show(1.0, make_status(GangPhase.STARTING, evictions=1))
    await reporter.show(2.0, make_status(RUNNING, evictions=1))
    assert runs.set[-1] == ("RUNNING", "Running", True)


async def test_run_that_our_late_word_overruled_runs_again_once_the_api_is_back():
    runs, reporter = await hear_the_leader_before_our_word(Running(), PREEMPTED)
    runs.errors += [httpx.ConnectError("refused")]
    for now in (1.0, 2.0):
        await reporter.show(now, make_status(RUNNING, evictions=1))
    assert runs.set[-1] == ("RUNNING", "Running", True)


async def test_run_that_was_evicted_once_more_waits_for_the_word_of_its_next_leader():
    runs, reporter = await hear_the_leader_before_our_word(Running(), PREEMPTED)
    await reporter.show(1.0, make_status(RUNNING, evictions=2))
    assert runs.set[-1] == ("PENDING", "Starting", False)


async def test_run_that_nobody_called_running_is_not_called_so():
    run = make_run(Running())
    runs = FakeRuns(run)
    reporter = make_reporter(runs, run)
    await reporter.show(0.0, make_status(PREEMPTED, evictions=1))
    await reporter.show(1.0, make_status(RUNNING, evictions=1))
    assert runs.set[-1] == ("PENDING", "Starting", False)


async def test_cancellation_that_meets_a_restored_running_is_put_back():
    runs, reporter = await hear_the_leader_before_our_word(Running(), PREEMPTED)
    runs.between = Cancelling(message="no more")
    await reporter.show(1.0, make_status(RUNNING, evictions=1))
    [run] = runs.runs.values()
    assert run.state
    assert run.state.is_cancelling()


async def test_earlier_word_is_not_put_back():
    run = make_run(Cancelling())
    runs = FakeRuns(run)
    runs.put(run, Running())  # somebody thought better of it
    await make_reporter(runs, run).show(0.0, make_status(PREEMPTED))
    assert runs.state(run).name == "Preempted"


# --- what failed, for the driver -------------------------------------------------------------------------

KILLED = PodFailure(
    category="HostOutOfMemory", pod="x-node-0-3-abcde", node=3, node_name="n", message="Pod 3 was killed."
)


async def test_failure_of_a_pod_is_a_label_beside_the_others():
    run = make_run(Running(), labels={STOP_LABEL: ""})
    runs = FakeRuns(run)
    ending = GangEnd(outcome=Outcome.FAILED, message="It failed.", failure=KILLED, attempt=2)
    await make_reporter(runs, run).end(ending)
    labels = runs.runs[run.id].labels
    assert labels.keys() == {STOP_LABEL, "torch-elastic.failure"}
    assert parse_failure_label(labels) == SeenFailure(
        category=Category.HOST_OUT_OF_MEMORY, attempt=2, pod="x-node-0-3-abcde", node=3
    )


async def test_run_that_has_its_final_state_gets_no_label():
    run = make_run(Failed())
    runs = FakeRuns(run)
    await make_reporter(runs, run).end(GangEnd(outcome=Outcome.FAILED, message="x", failure=KILLED))
    assert not runs.runs[run.id].labels


async def test_label_that_the_api_refuses_keeps_nobody_from_the_final_state(monkeypatch: pytest.MonkeyPatch):
    run = make_run(Running())
    runs = FakeRuns(run)

    async def refuse(*_: Any) -> None:
        raise ValueError("no labels here")

    monkeypatch.setattr(runs, "update_flow_run_labels", refuse)
    await make_reporter(runs, run).end(GangEnd(outcome=Outcome.FAILED, message="x", failure=KILLED))
    assert runs.state(run).is_failed()


@pytest.mark.parametrize(
    ("word", "category"),
    [
        ("HostOutOfMemory", Category.HOST_OUT_OF_MEMORY),
        ("Evicted", Category.NODE_LOST),
        ("NodeLost", Category.NODE_LOST),
        ("Disrupted", Category.NODE_LOST),
        ("ImagePull", Category.SETUP_FAILED),
        ("DeadlineExceeded", Category.TIMED_OUT),
        ("Stopped", None),
        ("KilledAfterGrace", None),
        ("something new", None),
    ],
)
def test_words_of_kubernetes_are_categories_that_drivers_know(word: str, category: Category | None):
    failure = PodFailure(category=word, pod="p", node=None, node_name="", message="")
    seen = name_failure(failure, attempt=1)
    assert (seen.category if seen else None) is category


@pytest.mark.parametrize(
    "labels",
    [
        pytest.param(None, id="none"),
        pytest.param({}, id="empty"),
        pytest.param({"torch-elastic.failure": 7}, id="number"),
        pytest.param({"torch-elastic.failure": "{"}, id="no-json"),
        pytest.param({"torch-elastic.failure": '{"category": "NodeLost"}'}, id="less"),
        pytest.param(
            {"torch-elastic.failure": '{"category": "Bad", "attempt": 1, "pod": "", "node": null}'},
            id="category",
        ),
    ],
)
def test_label_that_is_not_understood_is_none(labels: dict[str, Any] | None):
    assert parse_failure_label(labels) is None


def test_failure_of_an_earlier_attempt_explains_nothing():
    made = judge(RUNNING, sight(Running()))
    made.see_gang(1.0, make_status(GangPhase.RESTARTING), KILLED)
    made.see_gang(2.0, make_status(GangPhase.FAILED, "It failed.", restarts=1), None)
    ending = made.decide(2.0)
    assert ending is not None
    assert (ending.message, ending.failure, ending.attempt) == ("It failed.", None, 2)


def test_failure_that_was_seen_late_does_not_outlive_the_next_attempt():
    made = judge(RUNNING, sight(Running()))
    made.see_gang(1.0, make_status(GangPhase.RESTARTING, restarts=1), KILLED)
    made.see_gang(2.0, make_status(RUNNING, restarts=1), None)
    made.see_gang(3.0, make_status(GangPhase.FAILED, "It failed.", restarts=1), None)
    ending = made.decide(3.0)
    assert ending is not None
    assert ending.failure is None


def test_failure_of_the_last_attempt_goes_with_its_number():
    made = judge(RUNNING, sight(Running()))
    made.see_gang(1.0, make_status(GangPhase.STOPPING, restarts=2), KILLED)
    made.see_gang(2.0, make_status(GangPhase.FAILED, restarts=2), None)  # its pods are gone
    ending = made.decide(2.0)
    assert ending is not None
    assert (ending.failure, ending.attempt) == (KILLED, 3)


# --- gangs that do not go on after a preemption ----------------------------------------------------------

LOST = "Preempted for a workload with a higher priority (preemption 1)"


def judge_one_that_does_not_resume(phase: GangPhase, run: RunSight, preemption: str = LOST) -> GangJudge:
    made = GangJudge(0.0, grace_seconds=10, inadmissible_grace_seconds=600, resumes=False)
    made.see_run(0.0, run)
    made.see_gang(0.0, make_status(phase, "In any words.", preemption=preemption, preemptions=1), None)
    return made


@pytest.mark.parametrize("phase", [GangPhase.STOPPING, PREEMPTED])
def test_preempted_gang_that_does_not_resume_fails_and_says_how_to_go_on(phase: GangPhase):
    ending = judge_one_that_does_not_resume(phase, sight(Running())).decide(0.0)
    assert ending is not None
    assert (ending.outcome, ending.has_pods) == (Outcome.FAILED, True)
    assert ending.message == (
        "Preempted for a workload with a higher priority (preemption 1). `resume_after_preemption` is off, "
        "so it does not wait for its quota. What it saved is in the store: a retry of the task (`retries`) "
        "or of its flow run goes on from the last checkpoint. With `resume_after_preemption=True` the gang "
        "does that by itself."
    )
    assert ending.failure
    seen = name_failure(ending.failure, attempt=ending.attempt)
    assert seen == SeenFailure(category=Category.NODE_LOST, attempt=1)


def test_gang_that_went_on_while_nobody_looked_does_not_stay():
    made = judge_one_that_does_not_resume(RUNNING, sight(Running()), "")
    ending = made.decide(0.0)
    assert ending is not None
    assert ending.message.startswith("Preempted (preemption 1). `resume_after_preemption` is off")


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        pytest.param(Completed(), Outcome.LEFT, id="completed"),
        pytest.param(Cancelling(), Outcome.CANCELLED, id="cancelled"),
    ],
)
def test_preempted_gang_that_does_not_resume_keeps_what_was_said_of_its_run(
    run: State[Any], outcome: Outcome
):
    ending = judge_one_that_does_not_resume(GangPhase.STOPPING, sight(run)).decide(0.0)
    assert ending is not None
    assert (ending.outcome, ending.has_pods) == (outcome, True)


@pytest.mark.parametrize(("resumes", "preemptions"), [(True, 1), (False, 0)])
def test_gang_goes_on_after_an_eviction_that_is_no_preemption_or_if_it_resumes(
    resumes: bool, preemptions: int
):
    made = GangJudge(0.0, grace_seconds=10, inadmissible_grace_seconds=600, resumes=resumes)
    made.see_gang(0.0, make_status(GangPhase.STOPPING, preemptions=preemptions, evictions=1), None)
    assert made.decide(1e6) is None
