"""Every private name of Prefect or torch that we use, each with a contract test in `tests/test_compat.py`.

Nothing is imported at the top: a node has no Prefect, and a driver has no torch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
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


def read_flight_recorder() -> list[Mapping[str, Any]]:
    """Return the newest collectives of this process as torch has recorded them, oldest first.

    It does not import torch: without it, or without collectives, there are none. NCCL has a recorder of its
    own, which builds for the CPU lack. Each comes with its frames where `torch._inductor` is loaded already:
    torch would import it for them, for a second and in the middle of a training step.
    """
    import pickle
    import sys

    if "torch.distributed.distributed_c10d" not in sys.modules:
        return []
    frames = "torch._inductor.codecache" in sys.modules
    c10d = sys.modules["torch._C._distributed_c10d"]
    entries: list[Mapping[str, Any]] = []
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        if dump := getattr(c10d, name, None):
            trace = dump(includeCollectives=True, includeStackTraces=frames, onlyActive=False)
            entries += pickle.loads(trace).get("entries", [])  # noqa: S301  (this process wrote it)
    return entries


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


def torch_wrappers() -> dict[type, str]:
    """Return the modules of torch that put another one inside themselves, each with the name it has there.

    Those that are not imported wrap nothing yet; `torch._dynamo` alone takes a second.
    """
    import sys

    from torch.nn import DataParallel
    from torch.nn.parallel import DistributedDataParallel

    wrappers: dict[type, str] = {DistributedDataParallel: "module", DataParallel: "module"}
    if dynamo := sys.modules.get("torch._dynamo.eval_frame"):
        wrappers[dynamo.OptimizedModule] = "_orig_mod"
    if checkpointing := sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper"):
        wrappers[checkpointing.CheckpointWrapper] = "_checkpoint_wrapped_module"
    return wrappers


def task_cancel_requested(task_runner: Any, task_run_id: Any) -> bool:
    """Whether a submitted task was asked to stop; a thread gets no exception, only this event."""
    events: dict[Any, Any] = getattr(task_runner, "_cancel_events", {})
    event = events.get(task_run_id)
    return event is not None and bool(event.is_set())


def flow_is_being_cancelled() -> bool:
    """Whether the SIGTERM that ends the flow run of this process is a cancellation.

    Prefect's supervisor of a flow run says so before it sends the signal.
    """
    from prefect._internal.control_listener import get_intent

    return get_intent() == "cancel"


def flow_goes_on_elsewhere() -> bool:
    """Whether the SIGTERM that ends this process does not end its flow run: another process goes on."""
    from prefect._internal.control_listener import get_intent

    return get_intent() in ("reschedule", "relinquish")


def cancel_main_flow() -> bool:
    """Cancel the flow run of the main thread as Prefect's supervisor does, False if there is none.

    The main thread itself only notes that it is a cancellation: it raises TerminationSignal where it likes.
    """
    import signal
    import threading

    from prefect._internal import control_listener
    from prefect.utilities.engine import commit_control_intent_and_ack

    main = threading.main_thread()

    def send_signal() -> None:
        if main.ident is not None and threading.current_thread() is not main:
            signal.pthread_kill(main.ident, signal.SIGTERM)

    return commit_control_intent_and_ack(note_cancellation, control_listener.clear_intent, send_signal)


def note_cancellation() -> None:
    """Tell Prefect's engine that the TerminationSignal that comes next is a cancellation."""
    from prefect._internal import control_listener

    control_listener._set_intent("cancel")  # pyright: ignore[reportPrivateUsage]


def forget_cancellation() -> None:
    """Take back what `note_cancellation` said: another TerminationSignal is none."""
    from prefect._internal import control_listener

    control_listener.clear_intent()


def outer_flow_runs(context: Any) -> list[Any]:
    """Return the flow runs of this process around the one of an entered context, the next one first."""
    runs: list[Any] = []
    while context is not None and context._token is not None:
        context = context._token.old_value
        run = getattr(context, "flow_run", None)  # at the end of the chain is `Token.MISSING`
        if run is None:
            break
        if run.id not in [one.id for one in runs]:
            runs.append(run)
    return runs


def send_log_lines_with(send: Callable[[Callable[[], Awaitable[Any]], int], Awaitable[None]]) -> None:
    """Let `send(post, count)` bring batches of log lines to Prefect's API; Prefect itself drops what fails.

    `post()` makes one request, with the client of Prefect's sender of lines, and raises what that raises.
    """
    from prefect.logging.handlers import APILogWorker

    async def handle_batch(self: Any, items: list[bytes]) -> None:
        body, headers = b"[" + b",".join(items) + b"]", {"Content-Type": "application/json"}
        await send(lambda: self._client.request("POST", "/logs/", content=body, headers=headers), len(items))

    APILogWorker._handle_batch = handle_batch  # pyright: ignore[reportPrivateUsage]


def write_block(storage: Any, path: str, content: bytes, *, is_async: bool) -> None:
    """Write to a block of result storage as Prefect's engine does at the end of a sync or an async task."""
    import asyncio

    from prefect._internal.compatibility import blocks

    if is_async:
        calling = blocks.call_explicitly_async_block_method(
            storage, "write_path", (path,), {"content": content}
        )
        asyncio.run(calling)
    else:
        blocks.call_explicitly_sync_block_method(storage, "write_path", (path,), {"content": content})


def flow_has_ended(context: Any) -> bool:
    """Whether the flow run of a context that was entered is over; the object itself may live on."""
    return context._token is None


def outer_task_run(context: Any) -> Any | None:
    """Return the task run that the task of an entered context was called in, None for one of a flow."""
    own = context.task_run.id
    run = context.task_run
    while run is not None and run.id == own:  # the engine enters a task's context more than once
        context = context._token.old_value if context._token is not None else None
        run = getattr(context, "task_run", None)  # at the end of the chain is `Token.MISSING`
    return run


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


def emit_task_state(task_run: Any, before: Any, state: Any, *, follows: Any) -> Any:
    """Tell the server about a state of a task run; a thread of Prefect's sends it when the API answers.

    The engine's own function, which its documentation does not name: there is no public one for task runs.
    """
    from prefect.utilities.engine import emit_task_run_state_change_event

    state.state_details.task_run_id = task_run.id
    state.state_details.flow_run_id = task_run.flow_run_id
    return emit_task_run_state_change_event(
        task_run=task_run, initial_state=before, validated_state=state, follows=follows
    )
