"""Log lines of an outage: kept, sent when the API is back, and counted if they are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest

from prefect_torch_elastic.hosting.runlines import LineKeeper


def make_post(errors: list[Exception]) -> tuple[Callable[[], Awaitable[None]], list[str]]:
    """Return a request that meets these errors one after the other, and what became of each."""
    seen: list[str] = []

    async def post() -> None:
        if errors:
            seen.append("failed")
            raise errors.pop(0)
        seen.append("sent")

    return post, seen


def test_lines_of_an_outage_are_sent_when_it_is_over():
    post, seen = make_post([httpx.ConnectError("refused")] * 3)
    told: list[str] = []
    asyncio.run(LineKeeper(told.append, pause_seconds=0.0).send(post, 5))
    assert seen == ["failed"] * 3 + ["sent"]
    assert told == []


@pytest.mark.parametrize(
    ("error", "patience"),
    [
        pytest.param(httpx.ConnectError("refused"), 0.0, id="away-too-long"),
        pytest.param(ValueError("cannot be sent"), 60.0, id="not-an-outage"),
    ],
)
def test_lines_that_are_lost_are_counted_in_the_log(
    error: Exception, patience: float, capsys: pytest.CaptureFixture[str]
):
    told: list[str] = []
    keeper = LineKeeper(told.append, pause_seconds=0.0, patience_seconds=patience)
    for count in (5, 2):
        asyncio.run(keeper.send(make_post([error])[0], count))
    assert told == []
    for _ in range(2):
        asyncio.run(keeper.send(make_post([])[0], 1))
    assert told == ["7 lines of this log are missing: the Prefect API did not take them in time."]
    assert "2 lines of the log were not sent" in capsys.readouterr().err


def test_lines_keep_no_process_from_leaving():
    post, seen = make_post([httpx.ConnectError("refused")] * 3)
    keeper = LineKeeper(lambda _: None, pause_seconds=60.0)
    keeper.is_leaving = True
    asyncio.run(keeper.send(post, 5))
    assert seen == ["failed"]
