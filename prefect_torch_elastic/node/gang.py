"""One gang on this machine, seen by its head: which nodes run, who failed, what happens next.

The agents report per round (one rendezvous each); a round is over when all its ranks have returned or the
first failure has been judged. The verdict goes to all agents, so every node leaves with the same one.
"""

from __future__ import annotations

import logging
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from prefect_torch_elastic.attempts import Action, decide_restart
from prefect_torch_elastic.channel import Channel, ChannelClosed
from prefect_torch_elastic.diagnosis import diagnose, diagnose_lost_node, diagnose_setup
from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.evidence import Category, Diagnosis, RankEvidence
from prefect_torch_elastic.explanations import render_exit
from prefect_torch_elastic.node.devices import GpuLease
from prefect_torch_elastic.node.nodes import Node, Nodes
from prefect_torch_elastic.node.placement import place_gang
from prefect_torch_elastic.node.rankset import FAILURE_GRACE_SECONDS
from prefect_torch_elastic.node.rendezvous import LOOPBACK, start_store
from prefect_torch_elastic.ranks import render_endpoint
from prefect_torch_elastic.spec import restore_spec
from prefect_torch_elastic.wire import (
    GangEnded,
    GangStatus,
    LogLines,
    Message,
    NodeDone,
    NodeRegroups,
    Notice,
    Progress,
    RanksFailed,
    RanksReturned,
    RanksStarted,
    RunGang,
    StopGang,
    Verdict,
    VerdictAction,
)

SETTLE_SECONDS = 0.3  # for the other nodes' evidence, before the first failure is judged
STOPPED_SECONDS = 30.0  # an agent that is held by SIGSTOP or a debugger
KILL_MARGIN_SECONDS = 8.0  # an agent needs its ranks' grace, and a moment to reap and report


class Gang:
    """A gang from its order to its end; `ended` is None while it goes on.

    Raises:
        ElasticError: If it cannot start here: too few GPUs, no agent.
    """

    def __init__(self, order: RunGang, nodes: Nodes, tell: Callable[[Message], None]) -> None:
        self.ended: GangEnded | None = None
        self._spec = spec = restore_spec(order.fields)
        self.grace_seconds = spec.grace_seconds
        self._nodes, self._tell = nodes, tell
        self._lease = GpuLease()
        self._placement = placement = place_gang(spec, order.environment, self._lease)
        self._order = replace(order, nproc=placement.nproc, environment=placement.environment)
        self._store = start_store() if spec.max_nodes > 1 else None
        self._busy: dict[int, Node] = {}
        self._started: dict[int, RanksStarted] = {}
        self._returned: dict[int, int] = {}
        self._evidence: dict[int, dict[int, list[RankEvidence]]] = {}
        self._verdicts: dict[int, Verdict] = {}
        self._judge_at: float | None = None
        self._previous: Diagnosis | None = None
        self._restarts = self._losses = 0
        self._broken, self._left = set[int](), set[int]()  # rounds that lost a node, or that one left
        self._outcome: GangEnded | None = None
        self._kill_at: float | None = None
        self._stop_order: StopGang | None = None
        self._running_since: float | None = None
        self._killed: list[int] = []
        self._newest_round = 0
        try:
            for index in range(placement.nnodes):
                self._start_node(index)
        except BaseException:
            self._nodes.retire(*self._busy.values())  # they have the order already
            self.close()
            raise

    def close(self) -> None:
        """Give back what the gang held."""
        self._lease.release()
        self._store = None

    # ------------------------------------------------------------ one turn

    def step(self, driver: Channel | None, timeout_seconds: float) -> None:
        """Wait for events, take them in, and act on deadlines that have passed."""
        poll = select.poll()
        by_fd = {fd: node for node in self._busy.values() for fd in (node.channel.fileno(), node.pidfd)}
        for channel in [*(node.channel for node in self._busy.values()), *([driver] if driver else [])]:
            poll.register(channel, channel.events)
        for node in self._busy.values():
            poll.register(node.pidfd, select.POLLIN)
        for fd, _ in poll.poll(max(0.0, self._time_left(timeout_seconds)) * 1000):
            node = by_fd.get(fd)
            if node is None or node.code is not None:
                continue
            self._read(node)
            if fd == node.pidfd:
                self._lose(node)
        self._act_on_deadlines()
        if not self._busy and self.ended is None:
            self.ended = self._conclude()

    def stop(self, order: StopGang) -> None:
        """End the gang; a second order can only shorten the grace."""
        if self._stop_order and order.grace_seconds >= self._stop_order.grace_seconds:
            return
        self._stop_order = order
        self._outcome = self._outcome or GangEnded(status=GangStatus.STOPPED)
        deadline = time.monotonic() + order.grace_seconds + KILL_MARGIN_SECONDS
        self._kill_at = min(self._kill_at or deadline, deadline)
        for node in self._busy.values():
            node.send(order)
            node.interrupt()

    # ------------------------------------------------------------ nodes

    def _start_node(self, index: int) -> None:
        node = self._nodes.provide(index)
        self._busy[index] = node
        endpoint = render_endpoint(LOOPBACK, self._store.port) if self._store else ""
        (Path(self._order.folder) / f"node-{index}").mkdir(parents=True, exist_ok=True)
        order = replace(self._order, node=index, devices=self._placement.devices[index], endpoint=endpoint)
        node.send(replace(order, restart_count=self._restarts, after_round=self._newest_round))

    def _read(self, node: Node) -> None:
        with suppress(ChannelClosed):
            for message in node.channel.receive(0.0):
                self._take(node, message)

    def _take(self, node: Node, message: Message) -> None:
        match message:
            case LogLines() | Progress() | Notice():
                self._tell(message)
            case RanksStarted():
                self._started[node.index] = message
                self._newest_round = max(self._newest_round, message.round)
                self._running_since = self._running_since or time.monotonic()
                self._tell(message)
            case RanksReturned():
                self._returned[node.index] = message.round
                self._finish_if_all_returned(message.round)
            case NodeRegroups():
                self._left.add(message.round)
            case RanksFailed():
                self._take_failure(node, message)
            case NodeDone():
                self._busy.pop(node.index, None)
                self._killed += message.killed
                if not message.warm:
                    self._nodes.retire(node)
                if message.problem and self._outcome is None and not self._goes_on_without(node):
                    self._fail(self._diagnose_problem(node.index, message.problem))
            case _:
                pass

    def _diagnose_problem(self, index: int, problem: str) -> Diagnosis:
        if index in self._started:
            return diagnose_lost_node(index, reason=f"its agent failed: {problem}")
        return diagnose_setup(f"node {index}: {problem}.", node_rank=index, may_pass=True)

    def _lose(self, node: Node) -> None:
        """An agent died; its ranks died with it. Start another one, within bounds."""
        code = self._nodes.bury(node)
        self._busy.pop(node.index, None)
        started = self._started.pop(node.index, None)
        if self._outcome is not None:
            return
        self._losses += 1
        self._broken |= {started.round, self._round} if started else {self._round, self._round + 1}
        how = f"its agent died ({render_exit(code)})"
        rank = started.ranks[0].node_rank if started else node.index
        if self._losses >= self._spec.max_attempts:
            if not self._goes_on_without(node):
                reason = f"{how}; {self._losses} were lost, as many as `max_attempts` allows"
                self._fail(diagnose_lost_node(rank, reason=reason))
            return
        self._warn(f"node {rank} was lost: {how}. It is replaced (this spends no restart).")
        self._start_node(node.index)

    def _goes_on_without(self, node: Node) -> bool:
        """Whether enough nodes are left for a range such as `2:4`; then the gang goes on smaller."""
        left = len(self._busy)
        if left < self._spec.min_nodes or self._spec.min_nodes == self._spec.max_nodes:
            return False
        self._started.pop(node.index, None)
        self._warn(
            f"A node is not replaced any more; the gang goes on with {left} of {self._placement.nnodes}."
        )
        return True

    def give_up(self, problem: str) -> None:
        """End the gang because its head cannot go on."""
        if self._outcome is None:
            self._fail(diagnose_setup(f"{problem}.", may_pass=True))

    def _warn(self, text: str) -> None:
        self._tell(Notice(level=logging.WARNING, text=text))

    # ------------------------------------------------------------ verdicts

    @property
    def _round(self) -> int:
        return max((started.round for started in self._started.values()), default=0)

    def _members(self, number: int) -> list[int]:
        """Return the nodes whose ranks run in this round."""
        return [index for index, started in self._started.items() if started.round == number]

    def _finish_if_all_returned(self, number: int) -> None:
        members = self._members(number)
        ranks = sum(len(self._started[index].ranks) for index in members)
        if number != self._round or not members or ranks < self._started[members[0]].world_size:
            return
        if any(self._returned.get(index) != number for index in members):
            return
        leader = next(info for index in members for info in self._started[index].ranks if info.rank == 0)
        self._outcome = GangEnded(
            status=GangStatus.SUCCEEDED, result=str(Path(leader.log).with_suffix(".result"))
        )
        self._announce(Verdict(round=number, action=VerdictAction.FINISH, restart_count=self._restarts))
        outsiders = [node for index, node in self._busy.items() if index not in members]
        for node in outsiders:  # a node that slept through the end
            node.send(StopGang(reason="the gang has finished", grace_seconds=0.0))
            node.interrupt()
        self._kill_at = time.monotonic() + KILL_MARGIN_SECONDS

    def _take_failure(self, node: Node, message: RanksFailed) -> None:
        if verdict := self._verdicts.get(message.round):
            node.send(verdict)  # a late victim of a round that was judged already
            return
        evidence = [RankEvidence(**fields) for fields in message.ranks]
        self._evidence.setdefault(message.round, {})[node.index] = evidence
        if message.round < self._round:  # the others went on without it: it may join them
            node.send(
                Verdict(round=message.round, action=VerdictAction.RESTART, restart_count=self._restarts)
            )
            return
        reported = self._evidence[message.round].keys()
        settled = reported >= set(self._members(message.round))
        self._judge_at = time.monotonic() + (0.0 if settled else SETTLE_SECONDS)

    def _judge(self) -> None:
        """Find the culprit of the round's failure and decide for the whole gang."""
        self._judge_at = None
        number = max(self._evidence)
        if number in self._verdicts or self._outcome is not None:
            return
        evidence = [rank for ranks in self._evidence[number].values() for rank in ranks]
        diagnosis = diagnose(evidence, several_nodes=self._spec.max_nodes > 1)
        if self._was_broken(number, diagnosis):
            decision_reason, action = "nodes came or went, which spends nothing", Action.RESTART
        else:
            decision = decide_restart(
                diagnosis, self._previous, restarts=self._restarts, max_restarts=self._spec.max_restarts
            )
            decision_reason, action = decision.reason, decision.action
            self._restarts += action is Action.RESTART
            self._previous = diagnosis
        if action is Action.RESTART:
            self._warn(f"{diagnosis.summary.rstrip('.')}. The ranks start again: {decision_reason}.")
            self._announce(Verdict(round=number, action=VerdictAction.RESTART, restart_count=self._restarts))
        else:
            self._announce(Verdict(round=number, action=VerdictAction.FAIL, restart_count=self._restarts))
            self._fail(diagnosis)

    def _was_broken(self, number: int, diagnosis: Diagnosis) -> bool:
        """Whether the ranks of this round are victims of a node that was lost or left them."""
        is_victim = diagnosis.category in {Category.PEER_LOST, Category.COLLECTIVE_TIMEOUT}
        return is_victim and number in self._broken | self._left

    def _announce(self, verdict: Verdict) -> None:
        self._verdicts[verdict.round] = verdict
        for node in self._busy.values():
            node.send(verdict)

    def _fail(self, diagnosis: Diagnosis) -> None:
        self._outcome = GangEnded(
            status=GangStatus.FAILED, diagnosis=asdict(diagnosis), error=diagnosis.error
        )
        # ranks of a failed gang cannot save anything together, but their own handlers get the grace
        grace = min(self.grace_seconds, FAILURE_GRACE_SECONDS)
        self._kill_at = time.monotonic() + grace + KILL_MARGIN_SECONDS
        for node in self._busy.values():
            node.send(StopGang(reason="the gang has failed", grace_seconds=grace))
            node.interrupt()

    def _conclude(self) -> GangEnded:
        outcome = self._outcome or GangEnded(
            status=GangStatus.FAILED,
            diagnosis=asdict(diagnose_lost_node(0, reason="every node left without a verdict")),
        )
        return replace(outcome, restarts=self._restarts, killed=sorted(set(self._killed)))

    # ------------------------------------------------------------ deadlines

    def _time_left(self, timeout_seconds: float) -> float:
        deadlines = [at for at in (self._judge_at, self._kill_at, self._run_deadline()) if at is not None]
        return min([timeout_seconds, *(at - time.monotonic() for at in deadlines)])

    def _run_deadline(self) -> float | None:
        limit = self._spec.run_timeout_seconds
        if limit is None or self._running_since is None or self._outcome is not None:
            return None
        return self._running_since + limit

    def _act_on_deadlines(self) -> None:
        now = time.monotonic()
        if self._judge_at is not None and now >= self._judge_at:
            self._judge()
        run_deadline = self._run_deadline()
        if run_deadline is not None and now >= run_deadline:
            self._outcome = GangEnded(status=GangStatus.TIMED_OUT)
            self.stop(StopGang(reason="`run_timeout_seconds` is over", grace_seconds=self.grace_seconds))
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            for node in self._busy.values():
                node.signal(signal.SIGKILL)
        for node in self._busy.values():
            if node.stopped_seconds() > STOPPED_SECONDS:  # the others of a gang have gone on without it
                node.signal(signal.SIGKILL)


def refuse_gang(error: Exception) -> GangEnded:
    """Return the end of a gang that could not start here."""
    diagnosis = diagnose_setup(str(error), may_pass=not isinstance(error, SpecError))
    return GangEnded(status=GangStatus.FAILED, diagnosis=asdict(diagnosis))
