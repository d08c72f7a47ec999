"""One question to an API that may be away, which nobody waits long for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from prefect.client.orchestration import SyncPrefectClient

from prefect_torch_elastic.dispatch.polling import insist, make_api_caller


def ask_aside(ask: Callable[[SyncPrefectClient], Any], *, seconds: float) -> Any:
    """Return what the API answers to a client of another thread; an error is returned, not raised.

    Args:
        ask: Asks it, again while it is away.
        seconds: How long; what comes after is not waited for.
    """
    caller = make_api_caller()
    answer = caller.ask(lambda client: insist(lambda: ask(client), seconds=seconds))
    try:
        return answer.result(seconds)
    except FutureTimeout:
        return TimeoutError(f"no answer in {seconds:g} s")
    except Exception as error:  # noqa: BLE001  (the caller says it, or looks again)
        return error
    finally:
        caller.close()
