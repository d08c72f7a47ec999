"""Every private name of Prefect or torch that we use, each with a contract test in `tests/test_compat.py`.

Nothing is imported at the top: a node has no Prefect, and a driver has no torch.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

TORCH_RENDEZVOUS_CACHE_SECONDS = 0.1
TORCH_RENDEZVOUS_POLL_SECONDS = 0.05


def untyped_storage(typed: Any) -> Any:
    """Return the bytes behind a `torch.TypedStorage` without the deprecation warning of the public name."""
    return typed._untyped_storage


def set_default_collective_timeout(seconds: float) -> None:
    """Give process groups that are made without a timeout this one, whatever backend they name.

    torch reads `distributed_c10d._get_default_timeout(backend)` in `init_process_group` and `new_group`
    alike; there is no public setting.
    """
    from torch.distributed import distributed_c10d

    distributed_c10d._get_default_timeout = _constant(timedelta(seconds=seconds))  # pyright: ignore[reportPrivateUsage]


def tune_rendezvous(handler: Any) -> None:
    """Make a c10d rendezvous answer in tenths of a second instead of whole ones.

    torch caches the state for 1 s and polls once a second while nodes join: right for a thousand nodes on
    one store, slow for the few that form a gang here.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    handler._state_holder._cache_duration = TORCH_RENDEZVOUS_CACHE_SECONDS
    rendezvous: Any = dynamic_rendezvous
    if getattr(rendezvous._delay, "tuned", False):
        return
    import random
    import time

    def delay(seconds: float | tuple[float, float]) -> None:
        # uneven, so that nodes that lost a race for the shared state do not lose the next one too
        time.sleep(TORCH_RENDEZVOUS_POLL_SECONDS * random.uniform(0.5, 1.5) if seconds == 1 else 0.0)

    delay.tuned = True  # pyright: ignore[reportFunctionMemberAccess]
    rendezvous._delay = delay


def set_last_call(handler: Any, seconds: float) -> None:
    """Change how long the next round of a c10d rendezvous waits for more than its least number of nodes."""
    handler._settings.timeout._last_call = timedelta(seconds=seconds)


def task_cancel_requested(task_runner: Any, task_run_id: Any) -> bool:
    """Whether a submitted task was asked to stop; a thread gets no exception, only this event."""
    events: dict[Any, Any] = getattr(task_runner, "_cancel_events", {})
    event = events.get(task_run_id)
    return event is not None and bool(event.is_set())


def flow_has_ended(context: Any) -> bool:
    """Whether the flow run of a context that was entered is over; the object itself may live on."""
    return context._token is None


def keep_task_source(launch: Any, function: Any) -> None:
    """Let Prefect derive task keys and input hashes from the user's function, not from our wrapper."""
    launch.__prefect_task_source__ = function


def user_cache_policy(task: Any) -> Any:
    """Return the cache policy that somebody gave to a task, `NotSet` if nobody did."""
    return task._user_cache_policy


def is_called_by_prefect_task() -> bool:
    """Whether the caller's caller is `prefect.tasks`, which asks a function for its code to make a task."""
    import sys

    return sys._getframe(2).f_globals.get("__name__") == "prefect.tasks"  # pyright: ignore[reportPrivateUsage]


def run_exit_handlers() -> None:
    """Join threads and run exit handlers, as an interpreter does at its end, without C++ destructors.

    A forked process has lost the handler of `multiprocessing`, which removes what named semaphores leave.
    """
    import atexit
    import sys
    import threading

    interpreter: Any = threading
    interpreter._shutdown()
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    if multiprocessing := sys.modules.get("multiprocessing.util"):
        multiprocessing._exit_function()


def forget_exit_handlers() -> None:
    """Drop the exit handlers that a parent registered before a fork."""
    import atexit

    atexit._clear()  # pyright: ignore[reportPrivateUsage]


def _constant(value: Any) -> Any:
    def answer(*_: Any) -> Any:
        return value

    return answer


def keep_bound_instance(before: Any, after: Any) -> None:
    """Keep the object that a task method is bound to; Prefect stores it on the function."""
    for name in ("__prefect_self__", "__prefect_cls__"):
        if hasattr(before, name):
            setattr(after, name, getattr(before, name))
