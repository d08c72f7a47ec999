"""An object that is read as it arrives: one request, one connection, and on after a break."""

from __future__ import annotations

from typing import Any

import pytest

from prefect_torch_elastic.errors import ObjectMissing, StoreError
from prefect_torch_elastic.store import open_store
from tests.simulators.s3 import S3Server
from tests.simulators.s3_wire import Connection

pytest.importorskip("obstore")

DATA = bytes(range(256)) * 8192  # 2 MiB


@pytest.fixture
def store(s3: S3Server) -> Any:
    opened: Any = open_store(s3.url("runs"), s3.credentials)
    opened.put("block", DATA)
    return opened


def count_gets(s3: S3Server) -> int:
    return sum(call.method == "GET" and call.key == "runs/block" for call in s3.calls())


def test_stream_is_one_request_of_the_asked_length(s3: S3Server, store: Any):
    pieces = list(store.stream("block", len(DATA) - 5))
    assert b"".join(pieces) == DATA[:-5]
    assert count_gets(s3) == 1
    assert max(len(piece) for piece in pieces) < len(DATA)


def test_stream_uses_its_connection_again(s3: S3Server, store: Any):
    for _ in range(10):
        assert sum(len(piece) for piece in store.stream("block", len(DATA))) == len(DATA)
    assert len(s3._connections) <= 3  # one that comes back a moment late is replaced


def test_stream_goes_on_after_the_last_byte_when_a_connection_breaks(
    s3: S3Server, store: Any, monkeypatch: pytest.MonkeyPatch
):
    whole, left = Connection.send, [2]

    def cut(self: Connection, method: str, response: Any) -> None:
        if method == "GET" and len(response.body) > 1 << 20 and left[0]:
            left[0] -= 1
            response.headers["Content-Length"] = str(len(response.body))
            response.body = response.body[: 1 << 19]
            whole(self, method, response)
            raise ConnectionError("cut by the test")
        whole(self, method, response)

    monkeypatch.setattr(Connection, "send", cut)
    assert b"".join(store.stream("block", len(DATA))) == DATA
    assert count_gets(s3) == 3


def test_stream_says_what_is_missing_or_short(store: Any):
    with pytest.raises(ObjectMissing, match="other"):
        list(store.stream("other", 10))
    with pytest.raises(StoreError, match="block"):
        list(store.stream("block", len(DATA) + 1))
