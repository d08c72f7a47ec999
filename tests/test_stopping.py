"""A child run is stopped: by asking, within its grace, and whatever the API does."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State, StateType
from prefect.client.schemas.responses import SetStateStatus
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Cancelling, Completed, Pending, Running, Scheduled

from prefect_torch_elastic.dispatch import stopping
from prefect_torch_elastic.dispatch.stopping import STOP_LABEL, StopEnd, stop_child
from tests.simulators.childruns import Away, FakeApi, SeenLog, VirtualTime

pytestmark = pytest.mark.timeout(120)


class Scene:
    """One stop of a child run that was in `state` so far."""

    def __init__(self, state: str, *, away: list[Away] | None = None, **host: Any):
        self.time = VirtualTime(limit=1000.0)
        states = [(-10.0, "SCHEDULED"), (0.0, state)]
        self.api = FakeApi(self.time, states, away=away or [], **host)
        self.log = SeenLog(self.time)

    def stop(self, **options: Any) -> StopEnd:
        return stop_child(
            self.api.child_id,
            reason="The flow was cancelled.",
            grace_seconds=60.0,
            log=self.log,
            means=self.time.means(self.api),
            **options,
        )


@pytest.mark.parametrize("state", ["COMPLETED", "CANCELLED"])
def test_run_that_is_over_stays_as_it_is(state):
    scene = Scene(state)
    assert scene.stop() is StopEnd.OVER
    assert scene.api.states[-1][1] == state
    assert scene.time.now < 1


@pytest.mark.parametrize("state", ["SCHEDULED", "PENDING"])
def test_run_that_never_started_is_cancelled_at_once(state):
    scene = Scene(state)
    assert scene.stop() is StopEnd.OVER
    assert scene.api.states[-1][1] == "CANCELLED"
    assert scene.time.now < 2


def test_run_that_runs_is_asked_and_waited_for():
    scene = Scene("RUNNING", host_stops_after=40.0)
    assert scene.stop() is StopEnd.OVER
    assert scene.api.proposed == []
    assert scene.api.labels == {STOP_LABEL: "The flow was cancelled."}
    assert 40 <= scene.time.now < 41


def test_host_that_says_no_reason_has_ended_all_the_same():
    scene = Scene("RUNNING", host_stops_after=5.0, messages=False)
    assert scene.stop() is StopEnd.OVER


def test_run_that_does_not_end_is_called_cancelled_after_its_grace():
    scene = Scene("RUNNING")
    assert scene.stop() is StopEnd.ASKED
    assert scene.api.proposed == ["CANCELLED forced"]
    assert 75 <= scene.time.now < 80
    (warning,) = scene.log.texts("warning")
    assert "has not ended within its 60 s of grace" in warning


def test_deleted_run_is_over():
    scene = Scene("RUNNING")
    scene.api.deleted_at = 0.0
    assert scene.stop() is StopEnd.OVER


@pytest.mark.parametrize("how", ["refused", 503])
def test_api_that_is_away_is_said_and_given_up(how):
    scene = Scene("RUNNING", away=[Away(0, how=how)])
    assert scene.stop() is StopEnd.UNHEARD
    assert 30 <= scene.time.now < 31
    first, last = scene.log.texts("warning")
    assert "does not answer" in first
    assert f"prefect flow-run cancel {scene.api.child_id}" in last


def test_api_that_comes_back_is_asked_again():
    scene = Scene("RUNNING", away=[Away(0, 20)], host_stops_after=10.0)
    assert scene.stop() is StopEnd.OVER
    assert 30 <= scene.time.now < 32


def test_api_that_goes_away_before_the_last_word_is_said():
    scene = Scene("RUNNING", away=[Away(60)])
    assert scene.stop() is StopEnd.ASKED
    assert "could not be called Cancelled" in scene.log.texts("warning")[-1]


def test_process_that_will_be_killed_leaves_before_the_grace_is_over():
    scene = Scene("RUNNING", host_stops_after=40.0)
    assert scene.stop(leave_after_seconds=15.0) is StopEnd.ASKED
    assert 15 <= scene.time.now < 16
    assert scene.api.labels == {STOP_LABEL: "The flow was cancelled."}
    assert scene.api.proposed == []
    assert "within its 60 s of grace" in scene.log.texts("info")[-1]


def test_process_that_will_be_killed_stays_until_the_run_was_asked():
    scene = Scene("RUNNING", away=[Away(0, 20)], host_stops_after=40.0)
    assert scene.stop(leave_after_seconds=15.0) is StopEnd.ASKED
    assert 20 <= scene.time.now < 22
    assert scene.api.labels == {STOP_LABEL: "The flow was cancelled."}


def test_interrupt_ends_the_wait_and_not_the_stop():
    scene = Scene("RUNNING")

    def interrupt() -> None:
        raise KeyboardInterrupt

    scene.time.at = {5.0: interrupt}
    assert scene.stop() is StopEnd.ASKED
    assert STOP_LABEL in scene.api.labels
    (warning,) = scene.log.texts("warning")
    assert "It was asked to stop" in warning


def test_interrupt_before_the_run_was_asked_says_so():
    scene = Scene("RUNNING", away=[Away(0)])

    def interrupt() -> None:
        raise KeyboardInterrupt

    scene.time.at = {1.0: interrupt}
    assert scene.stop() is StopEnd.UNHEARD
    assert "Nobody could ask it to stop" in scene.log.texts("warning")[-1]


@pytest.mark.parametrize("begin", [0.0, 70.0], ids=["the-first-word", "a-later-look"])
def test_error_of_the_api_does_not_replace_what_the_stop_is_for(begin: float):
    scene = Scene("RUNNING", away=[Away(begin, how=422)])
    assert scene.stop() is (StopEnd.ASKED if begin else StopEnd.UNHEARD)
    (warning,) = scene.log.texts("warning")
    assert "The child run is not stopped: HTTPStatusError: error." in warning


def test_error_of_the_last_word_is_said():
    scene = Scene("RUNNING", away=[Away(75.0, how=422)])
    assert scene.stop() is StopEnd.ASKED
    assert "could not be called Cancelled (HTTPStatusError: error)" in scene.log.texts("warning")[-1]


# --- the same rules on a real server ---


@flow
def body() -> None:
    """Stands for a step in a work pool."""


@pytest.fixture
def client(prefect_server):
    with get_client(sync_client=True) as client:
        yield client


def make_run(client: SyncPrefectClient, *states: State) -> UUID:
    """Create a flow run that went through these states."""
    run = client.create_flow_run(body, state=states[0])
    for state in states[1:]:
        answer = client.set_flow_run_state(run.id, state)
        assert answer.status is SetStateStatus.ACCEPT
    return run.id


def stop_really(run_id: UUID, *, grace_seconds: float) -> tuple[StopEnd, SeenLog]:
    log = SeenLog(VirtualTime())
    return stop_child(run_id, reason="The flow was cancelled.", grace_seconds=grace_seconds, log=log), log


@pytest.mark.parametrize("taken", [False, True], ids=["scheduled", "pending"])
def test_server_cancels_a_run_that_never_started(client, taken):
    run_id = make_run(client, Scheduled(), *([Pending()] if taken else []))
    assert stop_really(run_id, grace_seconds=20)[0] is StopEnd.OVER
    state = client.read_flow_run(run_id).state
    assert state is not None
    assert (state.type, state.message) == (StateType.CANCELLED, "The flow was cancelled.")
    assert client.set_flow_run_state(run_id, Pending()).status is not SetStateStatus.ACCEPT


def test_server_takes_the_forced_end_of_a_run_that_does_not_stop(client, monkeypatch):
    monkeypatch.setattr(stopping, "MARGIN_SECONDS", 0.0)
    run_id = make_run(client, Scheduled(), Pending(), Running())
    end, log = stop_really(run_id, grace_seconds=2)
    assert end is StopEnd.ASKED
    assert "is called Cancelled now" in log.texts("warning")[-1]
    states = [state.type.value for state in client.read_flow_run_states(run_id)]
    assert states == ["SCHEDULED", "PENDING", "RUNNING", "CANCELLED"]


def test_server_refuses_to_begin_a_cancelling_run(client):
    """Why a run that never started may be Cancelled without a wait: its host cannot begin any more."""
    run_id = make_run(client, Scheduled(), Pending())
    client.set_flow_run_state(run_id, Cancelling())
    assert client.set_flow_run_state(run_id, Running()).status is not SetStateStatus.ACCEPT


def test_server_leaves_a_completed_run_alone(client):
    run_id = make_run(client, Scheduled(), Pending(), Running(), Completed())
    assert stop_really(run_id, grace_seconds=20)[0] is StopEnd.OVER
    state = client.read_flow_run(run_id).state
    assert state is not None
    assert state.type is StateType.COMPLETED


def test_unknown_run_is_over(client):
    assert stop_really(uuid4(), grace_seconds=20)[0] is StopEnd.OVER


def test_run_that_is_deleted_between_look_and_word_is_over(client, monkeypatch):
    run_id = make_run(client, Scheduled(), Pending(), Running())
    read = SyncPrefectClient.read_flow_run

    def read_and_delete(self: SyncPrefectClient, flow_run_id: UUID) -> Any:
        run = read(self, flow_run_id)
        self.delete_flow_run(flow_run_id)
        return run

    monkeypatch.setattr(SyncPrefectClient, "read_flow_run", read_and_delete)
    end, log = stop_really(run_id, grace_seconds=20)
    assert (end, log.texts("warning")) == (StopEnd.OVER, [])


def test_server_that_is_not_there_is_said(prefect_server, monkeypatch):
    monkeypatch.setattr(stopping, "AWAY_SECONDS", 2.5)
    monkeypatch.setattr(stopping, "SAY_AWAY_SECONDS", 0.0)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        end, log = stop_really(uuid4(), grace_seconds=20)
    assert end is StopEnd.UNHEARD
    assert "ConnectError" in log.texts("warning")[-1]


def test_cancelled_is_what_a_host_makes_of_cancelling(client):
    run_id = make_run(client, Scheduled(), Pending(), Running(), Cancelling())
    assert client.set_flow_run_state(run_id, Cancelled()).status is SetStateStatus.ACCEPT
