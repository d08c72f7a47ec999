"""The contracts that we have with private names of Prefect and torch: if one breaks, it breaks here first."""

from __future__ import annotations

import asyncio
import inspect
import json
import signal
import threading
import time
import uuid
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psutil
import pytest

from prefect_torch_elastic import compat

# ---------------------------------------------------------------- Prefect


def test_prefect_thread_runner_keeps_a_cancel_event_for_each_task_run():
    from prefect.task_runners import ThreadPoolTaskRunner

    runner, run_id = ThreadPoolTaskRunner(max_workers=1), uuid.uuid4()
    assert not compat.task_cancel_requested(runner, run_id)
    event = runner._cancel_events[run_id] = threading.Event()
    assert not compat.task_cancel_requested(runner, run_id)
    event.set()
    assert compat.task_cancel_requested(runner, run_id)
    assert "self._cancel_events[task_run_id] = cancel_event" in inspect.getsource(ThreadPoolTaskRunner.submit)


def test_prefect_runner_without_cancel_events_never_asks_to_stop():
    assert not compat.task_cancel_requested(None, uuid.uuid4())


def test_prefect_task_context_knows_the_task_that_it_was_entered_in(prefect_server):
    from prefect import flow, task
    from prefect.context import TaskRunContext

    seen: list[Any] = []

    @task
    def inner() -> None:
        context = TaskRunContext.get()
        assert context is not None
        run = compat.outer_task_run(context)
        seen.append(run and (run.id, run.run_count))

    @task(retries=1)
    def outer() -> Any:
        inner()
        inner.submit().wait()
        context = TaskRunContext.get()
        assert context is not None
        seen.append(context.task_run.id)
        if context.task_run.run_count == 1:
            raise ValueError("once")

    @flow
    def main() -> None:
        inner()
        inner.submit().wait()
        outer()

    main()
    assert seen[:2] == [None, None]
    called, submitted, expected, called_again, submitted_again, _ = seen[2:]
    assert called == submitted == (expected, 1)
    assert called_again == submitted_again == (expected, 2)


class SyncStorage:
    """A storage block of a user that knows Prefect's word for a sync call."""

    def __init__(self) -> None:
        self.written: dict[str, bytes] = {}

    def write_path(self, path: str, content: bytes, _sync: bool) -> None:
        self.written[path] = content


class AsyncStorage(SyncStorage):
    """One that knows no such word; Prefect awaits it in async tasks."""

    async def write_path(self, path: str, content: bytes) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.written[path] = content


@pytest.mark.parametrize(("storage", "is_async"), [(SyncStorage(), False), (AsyncStorage(), True)])
def test_prefect_writes_results_to_blocks_with_sync_and_with_async_methods(storage, is_async):
    from prefect import results

    compat.write_block(storage, "probe", b"x", is_async=is_async)
    assert storage.written == {"probe": b"x"}
    name = "call_explicitly_async_block_method" if is_async else "call_explicitly_sync_block_method"
    assert name in inspect.getsource(results.ResultStore)  # what it does itself at the end of a task


def test_prefect_sender_of_log_lines_posts_a_batch_as_ours_does(monkeypatch):
    from prefect.logging.handlers import APILogWorker

    requests: list[Any] = []

    class Client:
        async def request(self, *args: Any, **kwargs: Any) -> None:
            requests.append((args, kwargs))

    async def send(post: Any, count: int) -> None:
        requests.append(count)
        await post()

    sender = object.__new__(APILogWorker)
    sender._client = Client()  # pyright: ignore[reportAttributeAccessIssue]
    asyncio.run(sender._handle_batch([b"1", b"2"]))
    monkeypatch.setattr(APILogWorker, "_handle_batch", APILogWorker._handle_batch)
    compat.send_log_lines_with(send)
    asyncio.run(sender._handle_batch([b"1", b"2"]))
    theirs, count, ours = requests
    assert (ours, count) == (theirs, 2)


@pytest.fixture
def no_intent() -> Any:
    from prefect._internal import control_listener

    control_listener.clear_intent()
    yield control_listener
    control_listener.clear_intent()


def test_prefect_engine_asks_for_the_intent_that_we_note(no_intent: Any):
    from prefect import flow_engine

    assert not compat.flow_is_being_cancelled()
    compat.note_cancellation()
    assert flow_engine._termination_intent() == "cancel"
    assert compat.flow_is_being_cancelled()
    assert not compat.flow_goes_on_elsewhere()
    compat.forget_cancellation()
    assert flow_engine._termination_intent() is None


def test_prefect_names_what_leaves_a_flow_run_to_another_process(no_intent: Any):
    from prefect import flow_engine

    for intent in flow_engine._SUPERVISOR_OWNED_INTENTS:
        no_intent._set_intent(intent)
        assert compat.flow_goes_on_elsewhere()
        assert not compat.flow_is_being_cancelled()


def test_process_whose_main_thread_runs_no_flow_gets_no_signal(no_intent: Any):
    assert not compat.cancel_main_flow()
    assert not compat.flow_is_being_cancelled()


def test_main_thread_that_runs_a_flow_is_woken_from_another_one(no_intent: Any):
    from prefect.exceptions import TerminationSignal
    from prefect.utilities.engine import capture_sigterm

    def serve() -> None:
        with capture_sigterm():
            assert compat.cancel_main_flow()  # in the main thread itself it is only noted
            threading.Thread(target=compat.cancel_main_flow).start()
            time.sleep(10)

    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(TerminationSignal):
            serve()
    finally:
        signal.signal(signal.SIGTERM, before)  # Prefect leaves its own, as if the process would end now


def test_prefect_context_of_a_flow_knows_the_flows_around_it(prefect_server: str):
    from prefect import flow
    from prefect.context import FlowRunContext
    from prefect.runtime import flow_run

    @flow
    def inner() -> tuple[str, list[str]]:
        return flow_run.id, [str(run.id) for run in compat.outer_flow_runs(FlowRunContext.get())]

    @flow
    def outer() -> tuple[str, tuple[str, list[str]], list[Any]]:
        return flow_run.id, inner(), compat.outer_flow_runs(FlowRunContext.get())

    outer_id, (inner_id, around), none = outer()
    assert [one for one in around if one != inner_id] == [outer_id]
    assert [one for one in none if str(one.id) != outer_id] == []


def test_prefect_context_loses_its_token_at_its_end():
    from prefect.context import ContextModel, FlowRunContext, TagsContext

    assert issubclass(FlowRunContext, ContextModel)
    with TagsContext(current_tags=set()) as context:
        assert not compat.flow_has_ended(context)
    assert compat.flow_has_ended(context)


def test_prefect_takes_the_users_function_for_the_source_of_a_task():
    import functools

    from prefect.tasks import _get_task_source

    def train():
        return 1

    @functools.wraps(train)
    def launch():
        return 2

    assert _get_task_source(launch) is launch
    compat.keep_task_source(launch, train)
    assert _get_task_source(launch) is train


def test_prefect_function_for_states_of_task_runs_takes_what_we_pass():
    """tests/test_mirror.py looks at what arrives in a real API."""
    from prefect.utilities.engine import emit_task_run_state_change_event

    inspect.signature(emit_task_run_state_change_event).bind(
        task_run=None, initial_state=None, validated_state=None, follows=None
    )


def test_prefect_task_remembers_the_cache_policy_that_was_given():
    from prefect import task
    from prefect.cache_policies import INPUTS
    from prefect.utilities.annotations import NotSet

    def train():
        return 1

    assert compat.user_cache_policy(task(train)) is NotSet
    assert compat.user_cache_policy(task(cache_policy=INPUTS)(train)) is INPUTS
    assert compat.user_cache_policy(task(train).with_options(cache_policy=INPUTS)) is INPUTS


def test_prefect_asks_a_function_for_its_code_from_its_own_module():
    from prefect import Task

    asked = []

    class Probe:
        def __init__(self):
            self.__name__ = self.__qualname__ = "probe"

        def __call__(self):
            return 1

        @property
        def __code__(self):
            asked.append(compat.is_called_by_prefect_task())
            return (lambda: 1).__code__

    probe = Probe()
    Task(probe)  # pyright: ignore[reportArgumentType]
    assert True in asked
    asked.clear()
    assert probe.__code__ is not None
    assert asked == [False]


# ---------------------------------------------------------------- Python


def test_exit_handlers_run_after_threads_were_joined(run_script):
    result = run_script(
        """
import atexit, os, threading, time
from prefect_torch_elastic import compat
def work():
    time.sleep(0.05)
    print("thread", flush=True)
atexit.register(lambda: print("handler", flush=True))
threading.Thread(target=work).start()
compat.run_exit_handlers()
os._exit(0)
"""
    )
    assert result.stdout.split() == ["thread", "handler"]


def test_exit_handlers_of_a_parent_can_be_forgotten(run_script):
    result = run_script(
        """
import atexit
from prefect_torch_elastic import compat
atexit.register(lambda: print("parent"))
compat.forget_exit_handlers()
atexit.register(lambda: print("child"))
"""
    )
    assert result.stdout.split() == ["child"]


# ---------------------------------------------------------------- torch: storages and process groups


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def test_torch_typed_storage_has_its_bytes(torch):
    typed = torch.arange(4)._typed_storage()
    assert compat.untyped_storage(typed).data_ptr() == typed._data_ptr()


@pytest.fixture
def default_timeout(torch, monkeypatch):
    """Set another default timeout for one test."""
    from torch.distributed import distributed_c10d

    monkeypatch.setattr(distributed_c10d, "_get_default_timeout", distributed_c10d._get_default_timeout)
    compat.set_default_collective_timeout(77.5)
    yield timedelta(seconds=77.5)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def timeout_of(torch, group) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


@pytest.mark.parametrize("backend", ["gloo", None, "cpu:gloo"])
def test_torch_process_groups_take_our_default_timeout(torch, default_timeout, backend):
    distributed = torch.distributed
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    assert timeout_of(torch, distributed.group.WORLD) == default_timeout
    assert timeout_of(torch, distributed.new_group([0])) == default_timeout
    assert timeout_of(torch, distributed.new_group([0], backend="gloo")) == default_timeout


def test_torch_process_group_with_a_timeout_of_its_own_keeps_it(torch, default_timeout):
    distributed, own = torch.distributed, timedelta(seconds=5)
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=own)
    assert timeout_of(torch, distributed.group.WORLD) == own


def test_torch_asks_for_the_default_timeout_with_one_argument(torch):
    from torch.distributed import distributed_c10d

    assert list(inspect.signature(distributed_c10d._get_default_timeout).parameters) == ["backend"]


# ---------------------------------------------------------------- torch: the flight recorder


def test_torch_flight_recorder_has_the_fields_that_we_read(run_script):
    result = run_script("""
import json
from prefect_torch_elastic import compat
before = compat.read_flight_recorder()
import torch
from torch import distributed
silent = compat.read_flight_recorder()
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
for _ in range(2):
    distributed.all_reduce(torch.ones(4, 2))
import sys
print(json.dumps([before, silent, compat.read_flight_recorder(), "torch._inductor" in sys.modules]))
""")
    assert result.rc == 0, result.stderr
    before, silent, entries, has_imported = json.loads(result.stdout)
    assert (before, silent, has_imported) == ([], [], False)
    entry = entries[-1]
    assert (entry["process_group"], entry["collective_seq_id"]) == (["0", "default_pg"], 2)
    assert (entry["profiling_name"], entry["input_sizes"]) == ("gloo:all_reduce", [[4, 2]])
    assert (entry["retired"], entry["is_p2p"], entry["state"]) == (True, False, "scheduled")


# ---------------------------------------------------------------- torch: the agent

AGENT_METHODS = ["_rendezvous", "_start_workers", "_stop_workers", "_monitor_workers", "_shutdown"]


@pytest.mark.parametrize("name", AGENT_METHODS)
def test_torch_agent_method_has_the_parameters_of_our_override(torch, name):
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    from prefect_torch_elastic.node.nodeagent import NodeAgent

    ours, theirs = (
        [(parameter.name, parameter.kind) for parameter in inspect.signature(method).parameters.values()]
        for method in (getattr(NodeAgent, name), getattr(SimpleElasticAgent, name))
    )
    assert ours == theirs


def test_torch_agent_has_no_abstract_method_that_we_lack(torch):
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    assert SimpleElasticAgent.__abstractmethods__ == set(AGENT_METHODS) - {"_rendezvous"}


def run_scripted_agent(results: list[tuple[str, int | None]]) -> list[object]:
    """Run torch's loop with an agent whose monitor answers from a list; return what was called."""
    from torch.distributed.elastic.agent.server.api import (
        RunResult,
        SimpleElasticAgent,
        WorkerSpec,
        WorkerState,
    )
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from prefect_torch_elastic.node.rendezvous import LoneRendezvous

    class Scripted(SimpleElasticAgent):
        calls: list[object]

        def _rendezvous(self, worker_group):
            rendezvous: Any = super()._rendezvous  # wrapped for metrics, which hides its parameters
            rendezvous(worker_group)
            self.calls.append("rendezvous")

        def _start_workers(self, worker_group):
            ranks = [(worker.global_rank, worker.world_size) for worker in worker_group.workers]
            self.calls.append(("start", ranks, worker_group.master_addr, worker_group.group_rank))
            return {worker.local_rank: worker.local_rank for worker in worker_group.workers}

        def _stop_workers(self, worker_group):
            self.calls.append("stop")

        def _monitor_workers(self, worker_group):
            what, restarts = results.pop(0)
            if what == "signal":
                raise SignalException("asked to stop", signal.SIGTERM)
            if restarts is not None:
                self._remaining_restarts = restarts
            failures = {0: ProcessFailure(0, 1, 1, "none")} if what == "FAILED" else {}
            return RunResult(WorkerState[what], return_values={0: None, 1: None}, failures=failures)

        def _shutdown(self, death_sig: Any = 15, timeout=30):
            self.calls.append("shutdown")

    spec = WorkerSpec(
        role="default",
        local_world_size=2,
        rdzv_handler=LoneRendezvous("run"),
        entrypoint="x",
        max_restarts=0,
        monitor_interval=1e-4,
    )
    agent = Scripted(spec, exit_barrier_timeout=1.0)
    agent.calls = []
    try:
        agent.run()
    except SignalException:
        agent.calls.append("raised")
    return agent.calls


START = ["rendezvous", ("start", [(0, 2), (1, 2)], "127.0.0.1", 0)]


def test_torch_agent_asks_the_monitor_until_the_ranks_succeeded(torch):
    assert run_scripted_agent([("HEALTHY", None), ("SUCCEEDED", None)]) == [*START, "shutdown"]


def test_torch_agent_restarts_after_a_failure_as_the_monitor_set_the_counter(torch):
    calls = run_scripted_agent([("FAILED", 2), ("FAILED", 2), ("SUCCEEDED", None)])
    assert calls == [*START, "stop", *START, "stop", *START, "shutdown"]


def test_torch_agent_ends_after_a_failure_when_the_counter_is_zero(torch):
    assert run_scripted_agent([("FAILED", 0)]) == [*START, "stop", "shutdown"]


def test_torch_agent_shuts_down_and_raises_when_the_monitor_raises_a_signal(torch):
    assert run_scripted_agent([("signal", None)]) == [*START, "shutdown", "raised"]


# ---------------------------------------------------------------- torch: the rendezvous


@pytest.fixture
def join(torch, monkeypatch):
    """`join(store, ...)` returns one node's handler; all are shut down after the test."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    from prefect_torch_elastic.node import rendezvous

    monkeypatch.setattr(dynamic_rendezvous, "_delay", vars(dynamic_rendezvous)["_delay"])  # restored after
    monkeypatch.setattr(rendezvous, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(rendezvous, "LOST_SECONDS", 1.0)
    handlers = []

    def make(store, *, min_nodes=1, max_nodes=2):
        handler = rendezvous.join_rendezvous(
            store,
            "run",
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            address="127.0.0.1",
            timeout_seconds=20.0,
            first_call_seconds=0.2,
            last_call_seconds=0.2,
        )
        handlers.append(handler)
        return handler

    yield make
    for handler in handlers:
        handler._stop_heartbeats()
        handler.shutdown()


def follow(handler, world_size: int) -> None:
    """Do what an agent does: join, and join again whenever the handler says so."""
    info = handler.next_rendezvous()
    deadline = time.monotonic() + 20.0
    while info.world_size != world_size and time.monotonic() < deadline:
        if handler.num_nodes_waiting():
            info = handler.next_rendezvous()
        time.sleep(0.02)


@contextmanager
def following(*handlers):
    """Let handlers meet in threads; they have met at the end of the block."""
    threads = [threading.Thread(target=follow, args=(handler, 2)) for handler in handlers]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(30.0)


def wait_until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_torch_rendezvous_takes_another_last_call_for_its_next_round(join):
    from prefect_torch_elastic.node.rendezvous import start_store

    handler = join(start_store())
    compat.set_last_call(handler, 2.5)
    assert handler.settings.timeout.last_call == timedelta(seconds=2.5)


def test_torch_rendezvous_has_the_fields_that_we_touch(join):
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    from prefect_torch_elastic.node.rendezvous import start_store

    handler = join(start_store())
    fields = {"_state_holder", "_this_node", "_bootstrap_store_info", "_shared_tcp_store_server"}
    assert fields <= vars(handler).keys()
    assert handler._state_holder._cache_duration == compat.TORCH_RENDEZVOUS_CACHE_SECONDS
    state = vars(handler._state_holder.state).keys()
    assert {"round", "complete", "deadline", "closed", "participants"} <= state
    assert {"wait_list", "redundancy_list", "last_heartbeats"} <= state
    source = inspect.getsource(dynamic_rendezvous)
    assert source.count("_delay(seconds=") == 2  # a second while joining, a jitter before


def test_torch_rendezvous_method_has_the_parameters_of_our_override(torch):
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    from prefect_torch_elastic.node.rendezvous import WatchingRendezvous, _WatchingBackend

    for ours, theirs, names in (
        (WatchingRendezvous, DynamicRendezvousHandler, ["_create_tcp_store_server", "next_rendezvous"]),
        (_WatchingBackend, C10dRendezvousBackend, ["get_state", "set_state"]),
    ):
        for name in names:
            parameters = [list(inspect.signature(getattr(kind, name)).parameters) for kind in (ours, theirs)]
            assert parameters[0] == parameters[1], name


def test_torch_rendezvous_joins_two_nodes_in_less_than_a_second(join):
    from prefect_torch_elastic.node.rendezvous import connect_store, start_store

    server = start_store()
    handlers = [join(connect_store(f"127.0.0.1:{server.port}"), min_nodes=2) for _ in range(2)]
    started = time.monotonic()
    with following(*handlers):
        pass
    assert time.monotonic() - started < 5  # 0.2 s on an idle machine, 1.3 s untuned
    assert [handler._world_size for handler in handlers] == [2, 2]
    infos: list[Any] = [handler._bootstrap_store_info for handler in handlers]
    assert {info.master_addr for info in infos} == {"127.0.0.1"}
    assert len({info.master_port for info in infos}) == 1


def test_torch_rendezvous_reports_a_node_that_went_silent(join):
    from prefect_torch_elastic.node.rendezvous import connect_store, start_store

    server = start_store()
    stays, leaves = (join(connect_store(f"127.0.0.1:{server.port}")) for _ in range(2))
    with following(stays, leaves):
        pass
    assert stays._world_size == 2
    before = stays.round
    leaves._stop_heartbeats()  # as SIGKILL would
    assert wait_until(lambda: stays.num_nodes_waiting() > 0, 10.0)
    info = stays.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    assert stays.round > before


def test_torch_rendezvous_lets_a_late_node_join_the_others(join):
    from prefect_torch_elastic.node.rendezvous import connect_store, start_store

    server = start_store()
    first = join(connect_store(f"127.0.0.1:{server.port}"))
    assert first.next_rendezvous().world_size == 1
    before = first.round
    late = join(connect_store(f"127.0.0.1:{server.port}"))
    with following(late):
        assert wait_until(lambda: first.num_nodes_waiting() > 0, 10.0)
        follow(first, 2)
    assert (first._world_size, late._world_size) == (2, 2)
    assert first.round == late.round > before


def test_torch_store_listens_on_loopback_only(torch):
    from prefect_torch_elastic.node.rendezvous import connect_store, start_store

    store = start_store()
    listening = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == store.port
    }
    assert listening == {"127.0.0.1"}
    connect_store(f"127.0.0.1:{store.port}").set("key", "value")
    assert store.get("key") == b"value"


def test_lone_rendezvous_gives_each_round_a_store_of_its_own(torch):
    from prefect_torch_elastic.node.rendezvous import LoneRendezvous

    handler = LoneRendezvous("run")
    first, second = handler.next_rendezvous(), handler.next_rendezvous()
    ports: list[Any] = [first.bootstrap_store_info, second.bootstrap_store_info]
    assert ports[0].master_port != ports[1].master_port
    assert (second.rank, second.world_size, handler.round) == (0, 1, 2)
    assert handler.num_nodes_waiting() == 0
    assert not handler.is_closed()
    assert handler.shutdown()


# ---------------------------------------------------------------- torch's wrappers of modules


def wrap_compiled(torch, module):
    return torch.compile(module, backend="eager")


def wrap_activation_checkpoint(torch, module):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(module)


def wrap_data_parallel(torch, module):
    return torch.nn.DataParallel(module)


@pytest.mark.parametrize("wrap", [wrap_compiled, wrap_activation_checkpoint, wrap_data_parallel])
def test_torch_wrapper_has_its_module_under_the_name_that_we_know(torch, wrap):
    module = torch.nn.Linear(2, 2)
    wrapped = wrap(torch, module)
    (inner,) = [name for kind, name in compat.torch_wrappers().items() if isinstance(wrapped, kind)]
    assert dict(wrapped.named_modules())[inner] is module


def test_torch_distributed_data_parallel_has_its_module_under_the_name_that_we_know(torch):
    from torch.nn.parallel import DistributedDataParallel

    assert compat.torch_wrappers()[DistributedDataParallel] == "module"
    assert "self.module = module" in inspect.getsource(DistributedDataParallel.__init__)


def test_torch_wrappers_import_nothing(run_script):
    result = run_script(
        """
import sys
from prefect_torch_elastic import compat
import torch
before = set(sys.modules)
compat.torch_wrappers()
print(sorted(set(sys.modules) - before))
"""
    )
    assert result.stdout.strip() == "[]", result.stderr
