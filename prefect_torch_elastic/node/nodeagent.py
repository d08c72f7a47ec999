"""torch's elastic agent with processes of our own: one node of one gang.

Rendezvous, rank assignment and the run loop stay torch's (`SimpleElasticAgent`); starting, watching and
ending ranks is ours. A rank's death wakes the agent at once (pidfd), evidence is taken before anything is
killed, and whether the gang goes on is for the launcher to decide, who sees all nodes.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from torch.distributed import DistStoreError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from prefect_torch_elastic.channel import Channel, ChannelClosed
from prefect_torch_elastic.node.coldstart import exec_child
from prefect_torch_elastic.node.environment import build_rank_environment, build_rank_order
from prefect_torch_elastic.node.fixedrendezvous import FixedRendezvous
from prefect_torch_elastic.node.forkserver import Child, ForkServer, ServerLost
from prefect_torch_elastic.node.lookout import Lookout
from prefect_torch_elastic.node.rankprocess import RankProcess
from prefect_torch_elastic.node.rankset import FAILURE_GRACE_SECONDS, TICK_SECONDS, RankSet
from prefect_torch_elastic.node.rendezvous import LoneRendezvous, WatchingRendezvous
from prefect_torch_elastic.rankstate import StopReason
from prefect_torch_elastic.spec import Spec
from prefect_torch_elastic.wire import (
    Message,
    NodeRegroups,
    Notice,
    RanksFailed,
    RanksReturned,
    RanksStarted,
    RunGang,
    StopGang,
    TakeEvidence,
    Verdict,
    VerdictAction,
)

VERDICT_SECONDS = 30.0
SLOW_IMPORT_SECONDS = 10.0
EXIT_BARRIER_SECONDS = 5.0
Rendezvous = LoneRendezvous | WatchingRendezvous | FixedRendezvous
_RESTART, _FAIL = 2, 0  # torch's counter of restarts that are left: the launcher's verdict, in torch's words


class NodeAgent(SimpleElasticAgent):
    """The agent of one node in one gang.

    Attributes:
        ranks: The node's ranks.
        server: The fork server that outlives this gang, None when it was lost.
    """

    def __init__(
        self,
        order: RunGang,
        spec: Spec,
        handler: Rendezvous,
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
        self.server = server
        self._cold = spec.start_method != "warm"
        self.ranks = RankSet(channel, read_channel=self._read_channel, offer=self._offer, keep=self._servers)
        self._lookout = Lookout(self.ranks, node=order.node, tell=self._tell, offer=self._offer)
        self._restart_count = order.restart_count
        self._verdicts: dict[int, Verdict] = {}
        self._stop: StopGang | None = None
        self._said_returned = self._said_slow = False
        self._in_rendezvous = False

    # ------------------------------------------------------------ start

    def _rendezvous(self, worker_group: WorkerGroup) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        deadline = time.monotonic() + self._spec.rdzv_timeout_seconds
        self._in_rendezvous = True  # before the channel is read: a SIGTERM in between must not be lost
        try:
            while True:
                self._read_channel()
                self._raise_if_stopped()
                try:
                    return cast("Any", super())._rendezvous(worker_group)
                except (DistStoreError, RendezvousConnectionError):  # a node died while the round was formed
                    if time.monotonic() > deadline:
                        raise
        finally:
            self._in_rendezvous = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._read_channel()
        self.ranks.release()
        self._said_returned = False
        children = [self._prepare_rank(worker_group, worker) for worker in worker_group.workers]
        warm, note = self._start(children)
        self.ranks.watch()
        self._tell(
            RanksStarted(
                node=self._order.node,
                round=self._handler.round,
                world_size=worker_group.workers[0].world_size,
                restart_count=self._restart_count,
                warm=warm,
                note=note,
                ranks=[rank.info() for rank in self.ranks.ranks],
            )
        )
        return {rank.local_rank: rank.pid for rank in self.ranks.ranks}

    def _prepare_rank(self, worker_group: WorkerGroup, worker: Worker) -> Child:
        number = worker.global_rank
        folder = Path(self._order.folder) / f"node-{self._order.node}"
        level = self._spec.log_level_leader if number == 0 else self._spec.log_level_all_ranks
        rank = RankProcess(
            rank=number,
            local_rank=worker.local_rank,
            node_rank=worker_group.group_rank or 0,
            prefix=folder / f"rank-{number}",
            log=folder / f"rank-{number}.log",
            level=logging.getLevelNamesMapping()[level],
        )
        self.ranks.add(rank)
        environment = build_rank_environment(
            self._order, self._spec, worker_group, worker, restart_count=self._restart_count
        )
        order = build_rank_order(self._order, self._spec, rank.prefix, environment)
        return rank.child(asdict(order), environment, self._order.directory)

    def _start(self, children: Sequence[Child]) -> tuple[bool, str]:
        """Fork the ranks from the warm server; without one, start fresh interpreters."""
        pids, note = [], ""
        try:
            server, note = self._warm_server()
            pids = server.fork(children) if server else []
        except ServerLost as error:
            self.server = None
            self._cold, note = True, f"{error}: the ranks start cold (each imports for itself)."
        if pids:
            for rank, pid in zip(self.ranks.ranks, pids, strict=True):
                rank.watch(pid)
            return True, note
        for rank, child in zip(self.ranks.ranks, children, strict=True):
            rank.watch(exec_child(child))
        return False, note

    def _warm_server(self) -> tuple[ForkServer | None, str]:
        """Return the server to fork this gang's ranks from, None when they must start cold, and why."""
        if self._cold or self.server is None:
            return None, ""
        wanted = [*self._order.modules, *self._spec.preload]
        missing = [module for module in wanted if module not in self.server.modules]
        if not missing:
            return self.server, ""
        server, preloaded = self.server.fork_server(
            missing, self._order.search_path, waiting=self._wait_for_import
        )
        if preloaded.safe:  # it takes over: restarts and the next gang find the modules loaded
            self.server.close()
            self.server = server
            return server, ""
        server.close()
        self._cold = True
        what = "opened a GPU" if preloaded.gpus else f"started {preloaded.threads - 1} thread(s)"
        return None, (
            f"importing `{preloaded.culprit}` {what}, and a process with either cannot be forked safely: "
            "this gang starts cold (each rank imports for itself). Create threads and CUDA tensors inside "
            "functions, not at import."
        )

    def _wait_for_import(self, seconds: float) -> None:
        """Asked while the fork server imports: hear a stop, and say what takes so long."""
        self._read_channel()
        self._raise_if_stopped()
        if seconds > SLOW_IMPORT_SECONDS and not self._said_slow:
            self._said_slow = True
            names = ", ".join(f"`{module}`" for module in [*self._order.modules, *self._spec.preload])
            self._tell(Notice(level=logging.WARNING, text=f"Still importing {names}, ahead of the ranks."))

    # ------------------------------------------------------------ watch

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self.ranks.pump(self._lookout.patience(self._spec.monitor_interval_seconds)):
            self.ranks.look_after()
        self.ranks.send_logs()
        self._lookout.look(self._handler.round)
        self._read_channel()  # it also hands over what the launcher had no room for
        self._raise_if_stopped()
        if self.ranks.failed:
            return self._handle_failure()
        if self._starts_again():
            return self._end_for_restart()
        if self.ranks.all_returned:
            return self._handle_return()
        return RunResult(WorkerState.HEALTHY)

    def _starts_again(self) -> bool:
        """Whether all ranks start again though none here failed: they hang, or ranks elsewhere failed."""
        verdict = self._verdicts.get(self._handler.round)
        return verdict is not None and verdict.action is VerdictAction.RESTART

    def _handle_return(self) -> RunResult:
        """All ranks of this node returned; the node stays until the launcher has heard it of all nodes."""
        if not self._said_returned:
            self._end_ranks(0.0, reason=StopReason.NONE)  # no rank lives: for what they left
            self._said_returned = True
            self._tell(RanksReturned(node=self._order.node, round=self._handler.round))
            self._read_channel(VERDICT_SECONDS if isinstance(self._handler, LoneRendezvous) else 0.0)
        verdict = self._verdicts.get(self._handler.round)
        if verdict is None or verdict.action is not VerdictAction.FINISH:
            return RunResult(WorkerState.HEALTHY)
        values = {worker.global_rank: None for worker in self._worker_group.workers}
        return RunResult(WorkerState.SUCCEEDED, return_values=values)

    def _handle_failure(self) -> RunResult:
        self.ranks.take_evidence()
        failed = self.ranks.failed
        self._end_ranks(FAILURE_GRACE_SECONDS, reason=StopReason.FAILED)
        number = self._handler.round
        evidence = [asdict(rank) for rank in self.ranks.evidence()]
        self._tell(RanksFailed(node=self._order.node, round=number, ranks=evidence))
        while number not in self._verdicts and self._stop is None:  # the launcher's death is a stop too
            self._read_channel(TICK_SECONDS)
        verdict = self._verdicts.get(number)
        go_on = verdict is not None and verdict.action is VerdictAction.RESTART and self._stop is None
        self._remaining_restarts = _RESTART if go_on else _FAIL
        failures = {
            rank.rank: ProcessFailure(rank.local_rank, rank.pid, rank.code or 0, f"{rank.prefix}.none")
            for rank in failed
        }
        return RunResult(WorkerState.FAILED, failures=failures)

    def _end_for_restart(self) -> RunResult:
        self._end_ranks(FAILURE_GRACE_SECONDS, reason=StopReason.FAILED)
        self._remaining_restarts = _RESTART
        return RunResult(WorkerState.FAILED)  # whose failures nobody reads before a restart

    # ------------------------------------------------------------ the launcher's word

    def take_signals(self) -> None:
        """Let SIGTERM interrupt a rendezvous; anywhere else the stop is read from the channel."""

        def interrupt(*_: object) -> None:
            if self._in_rendezvous:
                self._in_rendezvous = False
                raise SignalException("asked to stop", signal.SIGTERM)

        signal.signal(signal.SIGTERM, interrupt)

    def _read_channel(self, timeout_seconds: float = 0.0) -> None:
        try:
            for message in self._channel.receive(timeout_seconds):
                match message:
                    case Verdict():
                        self._verdicts[message.round] = message
                        self._restart_count = message.restart_count
                    case StopGang():
                        if self._stop is None or message.grace_seconds < self._stop.grace_seconds:
                            self._stop = message
                    case TakeEvidence():
                        self._lookout.take_evidence(message)
                    case _:
                        pass
        except ChannelClosed:
            self._stop = StopGang(reason=StopReason.FAILED, grace_seconds=0.0)

    def _tell(self, message: Message) -> None:
        with suppress(ChannelClosed):  # the next read notices it
            self._channel.send(message)

    def _offer(self, message: Message) -> bool:
        with suppress(ChannelClosed):
            return self._channel.offer(message)
        return False

    def _raise_if_stopped(self) -> None:
        if self._stop is not None:
            raise SignalException("asked to stop", signal.SIGTERM)

    # ------------------------------------------------------------ end

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if any(rank.alive for rank in self.ranks.ranks):  # before the others see connections close
            self._tell(NodeRegroups(node=self._order.node, round=self._handler.round))
        self._end_ranks(FAILURE_GRACE_SECONDS, reason=StopReason.REGROUP)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._end_ranks(FAILURE_GRACE_SECONDS, reason=self._stop.reason if self._stop else StopReason.FAILED)
        self.ranks.release()

    def _end_ranks(self, grace_seconds: float, *, reason: StopReason) -> None:
        """End the ranks within this grace; an order of the launcher has a grace of its own.

        Ranks that have lost a peer stay told so, whatever is ordered later.
        """
        usual = StopGang(reason=reason, grace_seconds=min(grace_seconds, self._spec.grace_seconds))

        def order() -> StopGang:
            self._lookout.look(self._handler.round)  # a last save may take long
            if self._stop is None:
                return usual
            return self._stop if reason.lets_ranks_save else replace(self._stop, reason=reason)

        self._lookout.prepare_end()
        self.ranks.end(order)
        self._lookout.say_last(self._handler.round)

    def _servers(self) -> set[int]:
        return {self.server.pid} if self.server else set()
