"""Questions asked again and again, in a thread that owns what it asks with."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from prefect.context import SyncClientContext
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES

from prefect_torch_elastic.dispatch.polling import (
    Poll,
    ThreadCaller,
    describe_outage,
    make_api_caller,
    make_store_caller,
)
from tests.simulators.childruns import DirectCaller, VirtualTime, make_outage

pytestmark = pytest.mark.timeout(60)


def test_caller_opens_its_tool_in_its_thread_and_closes_it_there():
    seen: list[tuple[str, str]] = []
    closed = threading.Event()

    @contextmanager
    def tool() -> Generator[int]:
        seen.append(("open", threading.current_thread().name))
        yield 7
        seen.append(("close", threading.current_thread().name))
        closed.set()

    caller = ThreadCaller(tool, name="asks")
    assert caller.ask(lambda value: value + 1).result(5) == 8
    with pytest.raises(ZeroDivisionError):
        caller.ask(lambda value: value / 0).result(5)
    caller.close()
    assert closed.wait(5)
    assert seen == [("open", "asks"), ("close", "asks")]


def test_caller_tries_again_to_open_a_tool_that_did_not_open():
    tries: list[int] = []

    def open_tool() -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise make_outage("refused")
        return nullcontext(7)

    caller = ThreadCaller(open_tool, name="asks")
    assert describe_outage(caller.ask(lambda value: value).exception(5) or ValueError())
    assert caller.ask(lambda value: value).result(5) == 7
    caller.close()


def test_poll_asks_one_question_at_a_time():
    time_, asked = VirtualTime(), []
    poll = Poll(lambda: DirectCaller(None).ask(lambda _: asked.append(time_.now)))
    for _ in range(100):
        time_.sleep(0.1)
        if poll.look(time_.now):
            poll.rest(time_.now + 2.0)
    assert len(asked) == 5
    caller = make_store_caller()
    release = threading.Event()
    slow = Poll(lambda: caller.ask(lambda _: release.wait(5)))
    assert slow.look(0.0) is None
    assert slow.look(100.0) is None
    release.set()
    caller.close()


def test_client_of_a_wait_is_its_own_and_asks_once(prefect_server):
    """The engine's client is not made for two threads; and a wait that polls repeats nothing in secret."""
    caller = make_api_caller()
    with SyncClientContext() as context:
        engines = context.client
        client, retries = caller.ask(lambda client: (client, PREFECT_CLIENT_MAX_RETRIES.value())).result(20)
        assert client is not engines
        assert retries == 0
        assert PREFECT_CLIENT_MAX_RETRIES.value() > 0
    caller.close()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        pytest.param(make_outage("refused"), "ConnectError: [Errno 111] Connection refused", id="refused"),
        pytest.param(make_outage(503), "HTTP 503 Service Unavailable", id="503"),
        pytest.param(make_outage(401), "HTTP 401 Unauthorized", id="401"),
        pytest.param(json.JSONDecodeError("no", "<html>", 0), "an answer that is no JSON", id="proxy"),
        pytest.param(make_outage(422), "", id="refused for a reason"),
        pytest.param(ObjectNotFound(http_exc=Exception()), "", id="not there"),
        pytest.param(ValueError("no API URL"), "", id="ours"),
    ],
)
def test_outage_is_told_from_other_errors(error, text):
    assert describe_outage(error) == text
