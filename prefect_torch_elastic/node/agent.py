"""The one process that we start per node: torch's agent with processes of our own.

Rendezvous, rank assignment and the run loop stay torch's (`SimpleElasticAgent`); starting, watching and
ending ranks is ours. A rank's death wakes the agent at once (pidfd), evidence is taken before anything is
killed, and whether the gang goes on is for the launcher to decide, who sees all nodes.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

from prefect_torch_elastic import parcel
from prefect_torch_elastic.node import memory, processes
from prefect_torch_elastic.node.environment import build_rank_environment, build_rank_order
from prefect_torch_elastic.node.forkserver import ForkServer, ServerLost
from prefect_torch_elastic.node.rankprocess import RankProcess, dump_stacks
from prefect_torch_elastic.node.rendezvous import (
    LoneRendezvous,
    WatchingRendezvous,
    connect_store,
    join_rendezvous,
)
from prefect_torch_elastic.ranks import parse_endpoint
from prefect_torch_elastic.rankstate import StopReason
from prefect_torch_elastic.spec import Spec, restore_spec
from prefect_torch_elastic.wire import (
    Channel,
    ChannelClosed,
    LogLines,
    NodeDone,
    Notice,
    Progress,
    RankInfo,
    RanksFailed,
    RanksReturned,
    RanksStarted,
    RunGang,
    StopGang,
    Verdict,
)

TICK_SECONDS = 0.1
PROGRESS_SECONDS = 1.0
FAILURE_GRACE_SECONDS = 5.0  # ranks whose gang has failed already cannot save anything together
SETTLE_SECONDS = 0.1  # for victims to write their own error records
RECORD_SECONDS = 2.0
LEFTOVER_SECONDS = 5.0  # threads that still run after the function returned
STOPPED_SECONDS = 5.0
VERDICT_SECONDS = 30.0
EXIT_BARRIER_SECONDS = 5.0
LAST_CALL_SECONDS = 1.0  # torch waits 30 s for more nodes; here they all start together
_RESTART, _FAIL = 2, 0  # torch's counter of restarts that are left: the launcher's verdict, in torch's words


class NodeAgent(SimpleElasticAgent):
    """The agent of one node in one gang."""

    def __init__(
        self,
        order: RunGang,
        spec: Spec,
        handler: LoneRendezvous | WatchingRendezvous,
        server: ForkServer | None,
        channel: Channel,
    ) -> None:
        super().__init__(
            WorkerSpec(
                role="default",
                local_world_size=order.nproc,
                rdzv_handler=handler,
                entrypoint="prefect_torch_elastic.node.rank",
                max_restarts=spec.max_restarts,
                monitor_interval=1e-4,  # torch sleeps that long per turn; we wait in `poll` instead
            ),
            exit_barrier_timeout=EXIT_BARRIER_SECONDS,
        )
        self._order, self._spec, self._handler, self._channel = order, spec, handler, channel
        self._base_server, self._server = server, None
        self._ranks: list[RankProcess] = []
        self._watched: dict[int, RankProcess] = {}
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._restart_count = 0
        self._verdicts: dict[int, Verdict] = {}
        self._stop: StopGang | None = None
        self._said_returned = False
        self._ended = True
        self._in_rendezvous = False
        self._oom_kills: int | None = None
        self._progress_at = 0.0
        self._progress_seen: tuple[int | None, str] = (None, "")
        self.killed: list[int] = []

    # ------------------------------------------------------------ start

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._read_channel(0.0)
        self._release_ranks()
        self._said_returned = self._ended = False
        self._oom_kills = memory.count_oom_kills()
        folder = Path(self._order.folder) / f"node-{self._order.node}"
        children: list[Any] = []
        for worker in worker_group.workers:
            level = self._spec.log_level_leader if worker.global_rank == 0 else self._spec.log_level_all_ranks
            rank = RankProcess(
                rank=worker.global_rank,
                local_rank=worker.local_rank,
                node_rank=worker_group.group_rank or 0,
                prefix=folder / f"rank-{worker.global_rank}",
                log=folder / f"rank-{worker.global_rank}.log",
                level=logging.getLevelNamesMapping()[level],
            )
            self._ranks.append(rank)
            environment = build_rank_environment(
                self._order, self._spec, worker_group, worker, restart_count=self._restart_count
            )
            order = build_rank_order(self._order, self._spec, rank.prefix, environment)
            children.append(rank.child(asdict(order), environment, self._order.directory))
        warm, note = self._start(children)
        for rank in self._ranks:
            for fd in (rank.pidfd, rank.news):
                self._watched[fd] = rank
                self._poll.register(fd, select.POLLIN)
        self._send(
            RanksStarted(
                node=self._order.node,
                round=self._handler.round,
                world_size=worker_group.workers[0].world_size,
                restart_count=self._restart_count,
                warm=warm,
                note=note,
                ranks=[
                    RankInfo(
                        rank=rank.rank,
                        local_rank=rank.local_rank,
                        node_rank=rank.node_rank,
                        pid=rank.pid,
                        log=str(rank.tail.path),
                    )
                    for rank in self._ranks
                ],
            )
        )
        return {rank.local_rank: rank.pid for rank in self._ranks}

    def _start(self, children: Sequence[Any]) -> tuple[bool, str]:
        """Fork the ranks from the warm server; without one, start fresh interpreters."""
        try:
            server, note = self._warm_server()
            pids = server.fork(children) if server else []
        except ServerLost as error:
            pids, note = [], str(error)
        if pids:
            for rank, pid in zip(self._ranks, pids, strict=True):
                rank.watch(pid)
            return True, note
        self._base_server = None
        for rank, child in zip(self._ranks, children, strict=True):
            rank.watch(rank.start_cold(child))
        return False, note

    def _warm_server(self) -> tuple[ForkServer | None, str]:
        if self._base_server is None or self._spec.start_method != "warm":
            return None, ""
        if self._server is not None:
            return self._server, ""
        modules = [*self._order.modules, *self._spec.preload]
        if not modules:
            return self._base_server, ""
        server, preloaded = self._base_server.fork_server(modules, self._order.search_path)
        if preloaded.safe:
            self._server = server
            return server, ""
        server.close()
        self._base_server = None
        what = "opened a GPU" if preloaded.gpus else f"started {preloaded.threads - 1} thread(s)"
        return None, (
            f"importing `{preloaded.culprit}` {what}, and a process with either cannot be forked safely: "
            "this gang starts cold (each rank imports for itself). Create threads and CUDA tensors inside "
            "functions, not at import."
        )

    # ------------------------------------------------------------ watch

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self._pump(TICK_SECONDS):
            self._kill_held_ranks()
        self._send_logs()
        if self._stop is not None:
            raise SignalException("asked to stop", signal.SIGTERM)
        self._end_leftovers()
        if any(self._has_failed(rank) for rank in self._ranks):
            return self._handle_failure()
        if all(rank.returned_at is not None and not rank.alive for rank in self._ranks):
            return self._handle_return()
        return RunResult(WorkerState.HEALTHY)

    def _has_failed(self, rank: RankProcess) -> bool:
        return rank.failed_at is not None and rank.returned_at is None

    def _handle_return(self) -> RunResult:
        """All ranks of this node returned; the node stays until the launcher has heard it of all nodes."""
        if not self._said_returned:
            self._end_ranks(0.0)
            self._said_returned = True
            self._send(RanksReturned(node=self._order.node, round=self._handler.round))
            self._read_channel(VERDICT_SECONDS if isinstance(self._handler, LoneRendezvous) else 0.0)
        verdict = self._verdicts.get(self._handler.round)
        if verdict is not None and verdict.action == "finish":
            workers = self._worker_group.workers
            return RunResult(
                WorkerState.SUCCEEDED, return_values={worker.global_rank: None for worker in workers}
            )
        return RunResult(WorkerState.HEALTHY)

    def _handle_failure(self) -> RunResult:
        self._collect_records()
        dump_stacks([rank for rank in self._ranks if not self._has_failed(rank)])
        self._settle()
        self._end_ranks(min(self._spec.grace_seconds, FAILURE_GRACE_SECONDS))
        round_number = self._handler.round
        evidence = [asdict(self._evidence(rank)) for rank in self._ranks]
        self._send(RanksFailed(node=self._order.node, round=round_number, ranks=evidence))
        deadline = time.monotonic() + VERDICT_SECONDS
        while round_number not in self._verdicts and self._stop is None and time.monotonic() < deadline:
            self._read_channel(TICK_SECONDS)
        verdict = self._verdicts.get(round_number)
        go_on = verdict is not None and verdict.action == "restart" and self._stop is None
        self._remaining_restarts = _RESTART if go_on else _FAIL
        failures = {
            rank.rank: ProcessFailure(rank.local_rank, rank.pid, rank.code or 0, f"{rank.prefix}.none")
            for rank in self._ranks
            if self._has_failed(rank)
        }
        return RunResult(WorkerState.FAILED, failures=failures)

    def _collect_records(self) -> None:
        deadline = time.monotonic() + RECORD_SECONDS
        while time.monotonic() < deadline:
            raised = [rank for rank in self._ranks if self._has_failed(rank) and rank.alive]
            if all(rank.recorded for rank in raised):
                return
            self._pump(0.05)

    def _settle(self) -> None:
        deadline = time.monotonic() + SETTLE_SECONDS
        while (left := deadline - time.monotonic()) > 0 and any(rank.alive for rank in self._ranks):
            self._pump(left)
        self._collect_records()

    def _evidence(self, rank: RankProcess) -> Any:
        oom_killed = None
        if self._oom_kills is not None and rank.code == -signal.SIGKILL:
            oom_killed = (memory.count_oom_kills() or 0) > self._oom_kills
        return rank.evidence(oom_killed=oom_killed, memory_limit_bytes=memory.read_memory_limit())

    def _kill_held_ranks(self) -> None:
        for rank in self._ranks:
            if (seconds := rank.stopped_seconds()) > STOPPED_SECONDS:
                rank.reason = f"was stopped (SIGSTOP or a debugger) for {seconds:.0f} s and held up the gang"
                rank.failed_at = time.monotonic()
                rank.kill()

    def _end_leftovers(self) -> None:
        now = time.monotonic()
        for rank in self._ranks:
            if rank.alive and rank.returned_at is not None and now - rank.returned_at > LEFTOVER_SECONDS:
                dump_stacks([rank])
                self._send(
                    Notice(
                        level=logging.WARNING,
                        text=f"rank {rank.rank} returned but did not end within {LEFTOVER_SECONDS:.0f} s: a "
                        f"thread or an exit handler still ran. It was ended; stacks: {rank.prefix}.stacks",
                    )
                )
                rank.kill()

    # ------------------------------------------------------------ events

    def _pump(self, timeout_seconds: float) -> bool:
        """Wait for one batch of events and take them in; True when a rank did something."""
        news = False
        for fd, _ in self._poll.poll(max(0.0, timeout_seconds) * 1000):
            if fd == self._channel.fileno():
                self._read_channel(0.0)
                continue
            rank = self._watched.get(fd)
            if rank is None:  # it ended earlier in this batch
                continue
            if fd == rank.pidfd:
                if rank.reap():
                    self._unwatch(rank.pidfd, rank.news)
                    news = True
            elif rank.read_news():
                news = True
            else:
                self._unwatch(rank.news)
        return news

    def _unwatch(self, *fds: int) -> None:
        for fd in fds:
            if self._watched.pop(fd, None) is not None:
                self._poll.unregister(fd)

    def _read_channel(self, timeout_seconds: float) -> None:
        try:
            for message in self._channel.receive(timeout_seconds):
                match message:
                    case Verdict():
                        self._verdicts[message.round] = message
                        self._restart_count = message.restart_count
                    case StopGang():
                        self._stop = message
                    case _:
                        pass
        except ChannelClosed:
            self._stop = StopGang(reason="the launcher is gone", grace_seconds=0.0)

    def _send(self, message: Any) -> None:
        with suppress(ChannelClosed):  # the next read notices it
            self._channel.send(message)

    def _send_logs(self, *, last: bool = False) -> None:
        for rank in self._ranks:
            if lines := rank.tail.finish() if last else rank.tail.read():
                self._send(LogLines(rank=rank.rank, lines=lines))
            if rank.rank == 0:
                self._send_progress(rank, last=last)

    def _send_progress(self, rank: RankProcess, *, last: bool) -> None:
        now = time.monotonic()
        if not last and now - self._progress_at < PROGRESS_SECONDS:
            return
        progress = rank.state.read()
        seen = (progress.step, progress.phase)
        if progress.step is None or seen == self._progress_seen:
            return
        self._progress_at, self._progress_seen = now, seen
        self._send(
            Progress(
                step=progress.step,
                total_steps=progress.total_steps,
                metrics=progress.metrics,
                phase=progress.phase,
            )
        )

    # ------------------------------------------------------------ end

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._end_ranks(min(self._spec.grace_seconds, FAILURE_GRACE_SECONDS), reason=StopReason.REGROUP)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._end_ranks(self._stop.grace_seconds if self._stop else FAILURE_GRACE_SECONDS)
        self._release_ranks()
        if self._server is not None:
            self._server.close()
            self._server = None

    def server_for_next_gang(self) -> ForkServer | None:
        """Return the server that outlives this gang, None when it was lost."""
        return self._base_server

    def take_signals(self) -> None:
        """Let SIGTERM interrupt a rendezvous; anywhere else the stop is read from the channel."""

        def interrupt(*_: object) -> None:
            if self._in_rendezvous:
                self._in_rendezvous = False
                raise SignalException("asked to stop", signal.SIGTERM)

        signal.signal(signal.SIGTERM, interrupt)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._read_channel(0.0)
        if self._stop is not None:
            raise SignalException("asked to stop", signal.SIGTERM)
        self._in_rendezvous = True
        try:
            cast("Any", super())._rendezvous(worker_group)
        finally:
            self._in_rendezvous = False

    def _release_ranks(self) -> None:
        """Close the files of ranks that have ended; what they wrote stays readable."""
        for rank in self._ranks:
            self._unwatch(rank.pidfd, rank.news)
            rank.forget()
        self._ranks = []

    def _end_ranks(self, grace_seconds: float, *, reason: StopReason = StopReason.CANCELLED) -> None:
        """Ask the living ranks to stop, wait, kill the rest and whatever they left; nothing remains."""
        if self._ended:
            return
        self._ended = True
        living = [rank for rank in self._ranks if rank.alive]
        for rank in living:
            rank.ask_to_stop(reason)
        deadline = time.monotonic() + grace_seconds
        while any(rank.alive for rank in living) and (left := deadline - time.monotonic()) > 0:
            self._pump(min(left, TICK_SECONDS))
            self._send_logs()
            if self._stop is not None:  # a later request may shorten the grace
                deadline = min(deadline, time.monotonic() + self._stop.grace_seconds)
        late = [rank for rank in living if rank.alive]
        dump_stacks(late)
        self.killed += [rank.rank for rank in late]
        for rank in self._ranks:
            rank.kill()
        deadline = time.monotonic() + FAILURE_GRACE_SECONDS
        while any(rank.alive for rank in self._ranks) and time.monotonic() < deadline:
            self._pump(TICK_SECONDS)
        servers = {server.pid for server in (self._base_server, self._server) if server}
        processes.kill_children(keep=servers)
        self._send_logs(last=True)


def _run_gang(order: RunGang, server: ForkServer | None, channel: Channel) -> ForkServer | None:
    """Take part in one gang and say how it ended; return the fork server if it can still be used."""
    spec = restore_spec(order.fields)
    node_agent: NodeAgent | None = None
    problem = ""
    try:
        parcel.verify_parcel(Path(order.call), key=bytes.fromhex(order.secret))
        handler = _build_handler(order, spec)
        node_agent = NodeAgent(order, spec, handler, server, channel)
        node_agent.take_signals()
        cast("Any", node_agent).run()
        handler.shutdown()
    except SignalException:
        pass
    except RendezvousTimeoutError:
        problem = f"fewer than {spec.min_nodes} nodes joined within {spec.rdzv_timeout_seconds:g} s"
    except Exception as error:  # whatever it was, the launcher must hear of it
        logging.getLogger(__name__).exception("the gang could not be run")
        problem = f"{type(error).__name__}: {error}"
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # between gangs the channel says what to do
    killed = node_agent.killed if node_agent else []
    with suppress(ChannelClosed):
        channel.send(NodeDone(node=order.node, problem=problem, killed=killed))
    return node_agent.server_for_next_gang() if node_agent else server


def _build_handler(order: RunGang, spec: Spec) -> LoneRendezvous | WatchingRendezvous:
    run_id = f"{order.task_run_id or order.run_key}-{order.attempt}"
    if not order.endpoint:
        return LoneRendezvous(run_id)
    host, _ = parse_endpoint(order.endpoint)
    return join_rendezvous(
        connect_store(order.endpoint),
        run_id,
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        address=host,
        timeout_seconds=spec.rdzv_timeout_seconds,
        last_call_seconds=float(spec.rdzv_configs.get("last_call_timeout", LAST_CALL_SECONDS)),
    )


def run_agent(_spec: dict[str, Any], fds: list[int]) -> int:
    """Run one node's agent: gang after gang until the launcher says quit or is gone."""
    connection, log = fds
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    processes.adopt_orphans()
    server = ForkServer.fork_from_here()  # before anything here starts a thread
    os.environ.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)  # ranks use the store that the agent starts
    channel = Channel(socket.socket(fileno=connection))
    with suppress(ChannelClosed):
        while True:
            for message in channel.receive(60.0):
                match message:
                    case RunGang():
                        server = _run_gang(message, server, channel)
                    case StopGang() | Verdict():
                        pass  # of a gang that has ended meanwhile
                    case _:
                        raise ChannelClosed
    if server is not None:
        server.close()
    processes.kill_children(keep=set())
    os._exit(0)
