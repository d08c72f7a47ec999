"""This process's flow run in the API: begun, stopped, ended, with an API that may be away."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from uuid import uuid4

import pytest

from tests.hosted import begin_run, client, create_run, read_logs, read_run, read_state, set_state, wait_for
from tests.proxy import ClosableProxy


@pytest.fixture
def proxy(prefect_server: str) -> Iterator[ClosableProxy]:
    """The way of this process's code to the API, which the test may close."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from prefect_torch_elastic.hosting.runlines import flush_lines

    way = ClosableProxy(prefect_server)
    with temporary_settings({PREFECT_API_URL: way.url}):
        yield way
        way.close()
        way.open()
        flush_lines()  # whoever sends them keeps the address that it was made with
    way.close()


def own_run(run_id=None):
    from prefect_torch_elastic.hosting.ownrun import OwnRun

    return OwnRun(run_id or create_run())


@pytest.mark.parametrize(
    "environment", [{}, {"PREFECT__FLOW_RUN_ID": "mine"}], ids=["without-the-variable", "not-an-id"]
)
def test_run_is_refused_where_no_worker_started_the_process(environment: dict[str, str]):
    from prefect_torch_elastic.hosting.ownrun import OwnRun

    with pytest.raises(SystemExit, match="a worker starts it and sets that variable"):
        OwnRun.from_environment(environment)


def test_run_is_refused_without_an_api():
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from prefect_torch_elastic.hosting.ownrun import OwnRun

    with (
        temporary_settings(restore_defaults=[PREFECT_API_URL]),
        pytest.raises(SystemExit, match="`PREFECT_API_URL` is not set"),
    ):
        OwnRun.from_environment({"PREFECT__FLOW_RUN_ID": str(uuid4())})


def test_run_begins_once(prefect_server: str):
    own = own_run()
    assert own.begin()
    assert own.begin()  # an answer that was lost is asked for again
    run = read_run(own.id)
    assert (run.state_name, run.run_count, own.name) == ("Running", 1, run.name)


def test_run_that_is_started_again_begins_again(prefect_server: str):
    own = begin_run()
    assert own_run(own.id).begin()
    assert read_run(own.id).run_count == 2


@pytest.mark.parametrize("name", ["Cancelled", "Cancelling", "Crashed", "Completed"])
def test_run_that_is_over_does_not_begin(prefect_server: str, name: str):
    from prefect import states

    own = own_run()
    set_state(own.id, getattr(states, name)())
    assert not own.begin()
    assert read_state(own.id).name == ("Cancelled" if name == "Cancelling" else name)


def test_run_that_was_deleted_does_not_begin(prefect_server: str):
    own = own_run()
    with client() as api:
        api.delete_flow_run(own.id)
    assert not own.begin()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Cancelling", "the run was cancelled (enough)"),
        ("Cancelled", "the run was cancelled (enough)"),
        ("Crashed", "somebody else called the run `Crashed`: enough"),
    ],
)
def test_run_learns_of_a_stop(prefect_server: str, name: str, reason: str):
    from prefect import states

    own = begin_run()
    with own.watch():
        assert not own.stop_requested()
        set_state(own.id, getattr(states, name)(message="enough"))
        wait_for(own.stop_requested, seconds=8)
        assert own.stop_reason == reason
        assert own.stopped_state().name == "Cancelled"


def test_run_learns_that_it_was_deleted(prefect_server: str):
    own = begin_run()
    with own.watch():
        with client() as api:
            api.delete_flow_run(own.id)
        wait_for(own.stop_requested, seconds=8)
        assert own.stop_reason == "the run was deleted"
        own.end(own.stopped_state())
    assert own.reported  # there is nobody to tell


def test_run_takes_note_of_a_signal(prefect_server: str):
    own = begin_run()
    with own.watch():
        os.kill(os.getpid(), signal.SIGTERM)
        assert own.stop_requested()
    assert own.stopped_state().name == "Crashed"


def test_run_believes_the_api_more_than_a_signal(prefect_server: str):
    from prefect.states import Cancelling

    own = begin_run()
    with own.watch():
        set_state(own.id, Cancelling())
        os.kill(os.getpid(), signal.SIGTERM)
        assert own.stopped_state().name == "Cancelled"


def test_run_does_not_wait_long_to_hear_who_sent_a_signal(monkeypatch: pytest.MonkeyPatch):
    """A worker sends SIGKILL some seconds later, and the end is still to be reported."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from prefect_torch_elastic.hosting import ownrun

    monkeypatch.setattr(ownrun, "_LAST_LOOK_SECONDS", 0.2)
    own = own_run(uuid4())
    own.note_signal()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes requests and answers none
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        began = time.monotonic()
        with temporary_settings({PREFECT_API_URL: url}):
            assert own.stopped_state().name == "Crashed"
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("name", ["Completed", "Failed", "Crashed", "Cancelled"])
def test_run_ends(prefect_server: str, name: str):
    from prefect import states

    own = begin_run()
    own.end(getattr(states, name)(message="so"))
    state = read_state(own.id)
    assert (state.name, state.message, own.reported) == (name, "so", True)


def test_run_ends_although_a_phase_is_still_being_shown(monkeypatch: pytest.MonkeyPatch):
    from prefect.states import Completed

    from prefect_torch_elastic.hosting import ownrun

    monkeypatch.setattr(ownrun, "_WORD_SECONDS", 0.05)
    monkeypatch.setattr(ownrun, "ask_api", lambda ask, **options: None)
    own = own_run(uuid4())
    with own._word:
        own.end(Completed())
    assert own.reported


def test_run_that_is_being_cancelled_ends_cancelled(prefect_server: str):
    from prefect.states import Cancelling, Completed

    own = begin_run()
    set_state(own.id, Cancelling())
    own.end(Completed())
    assert (read_state(own.id).name, own.reported) == ("Cancelled", True)


@pytest.mark.parametrize("name", ["Cancelled", "Crashed", "Failed"])
def test_run_that_is_over_stays_so(prefect_server: str, name: str):
    from prefect import states

    own = begin_run()
    set_state(own.id, getattr(states, name)(message="first"))
    own.end(states.Completed())
    state = read_state(own.id)
    assert (state.name, state.message, own.reported) == (name, "first", True)


def test_run_ends_although_it_never_began(prefect_server: str):
    from prefect.states import Failed

    own = own_run()
    own.end(Failed(message="the order is damaged"))
    assert read_state(own.id).name == "Failed"


def test_run_begins_as_soon_as_the_api_is_back(proxy: ClosableProxy):
    own = own_run()
    proxy.close()
    threading.Timer(2.0, proxy.open).start()
    assert own.begin()


def test_run_ends_as_soon_as_the_api_is_back(proxy: ClosableProxy):
    from prefect.states import Completed

    own = begin_run()
    proxy.close()
    threading.Timer(2.0, proxy.open).start()
    own.end(Completed())
    assert (read_state(own.id).name, own.reported) == ("Completed", True)
    own.flush()
    lines = [line.message for line in wait_for(lambda: read_logs(flow_run=own.id))]
    assert any(line.startswith("The Prefect API is back after") for line in lines)


@pytest.mark.parametrize(
    ("state", "has_ending"), [("Cancelling", True), ("Crashed", False), ("Failed", False)]
)
def test_run_leaves_an_ending_only_when_it_was_cancelled(state: str, has_ending: bool):
    from prefect import states

    from prefect_torch_elastic.hosting.reports import report_stop
    from prefect_torch_elastic.hosting.stops import decide_stop

    own = own_run(uuid4())
    own.stop = decide_stop(getattr(states, state)(), asked="")
    assert (report_stop(own).ending is not None) is has_ending


def test_run_gives_up_its_end_when_the_api_stays_away(proxy: ClosableProxy):
    from prefect.states import Completed

    own = begin_run()
    proxy.close()
    own.end(Completed(), patience_seconds=1.0)
    assert not own.reported
    proxy.open()
    assert read_state(own.id).name == "Running"


def test_run_gives_up_its_end_when_it_is_told_to(proxy: ClosableProxy):
    from prefect.states import Completed

    own = begin_run()
    proxy.close()
    began = time.monotonic()
    threading.Timer(0.5, (told := threading.Event()).set).start()
    own.end(Completed(), give_up=told.is_set)
    assert not own.reported
    assert time.monotonic() - began < 5


def test_run_learns_of_a_stop_after_the_api_was_away(proxy: ClosableProxy, prefect_server: str):
    from prefect.settings import PREFECT_API_URL, temporary_settings
    from prefect.states import Cancelling

    own = begin_run()
    with own.watch():
        proxy.close()
        with temporary_settings({PREFECT_API_URL: prefect_server}):
            set_state(own.id, Cancelling())
        time.sleep(2.5)
        assert not own.stop_requested()
        proxy.open()
        assert wait_for(own.stop_requested, seconds=12)


def test_run_sends_heartbeats_as_prefect_does(prefect_server: str):
    from prefect.events.filters import EventFilter, EventNameFilter, EventResourceFilter

    own = begin_run()
    with own.watch():
        time.sleep(0.5)
    own.flush()
    wanted = EventFilter(
        event=EventNameFilter(name=["prefect.flow-run.heartbeat"]),
        resource=EventResourceFilter(id=[f"prefect.flow-run.{own.id}"]),
    )

    def count() -> int:
        with client() as api:
            answer = api.request("POST", "/events/filter", json={"filter": wanted.model_dump(mode="json")})
        return answer.json()["total"]

    assert wait_for(count) == 1
