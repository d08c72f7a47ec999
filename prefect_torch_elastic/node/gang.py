"""One gang, seen by its head: which nodes run, who failed, what happens next.

The agents report per round (one rendezvous each); a round is over when all its ranks have returned or the
first failure has been judged. The verdict goes to all agents, so every node leaves with the same one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

from prefect_torch_elastic.channel import Channel
from prefect_torch_elastic.diagnosis import (
    diagnose_lost_node,
    diagnose_missing_nodes,
    diagnose_setup,
)
from prefect_torch_elastic.evidence import Diagnosis
from prefect_torch_elastic.hangwatch import Finding
from prefect_torch_elastic.incidents import IncidentKind
from prefect_torch_elastic.node.awaited import Awaited
from prefect_torch_elastic.node.crew import Crew
from prefect_torch_elastic.node.ending import Ending
from prefect_torch_elastic.node.gangwatch import GangWatch
from prefect_torch_elastic.node.gate import Gate, RemoteNode
from prefect_torch_elastic.node.judging import Judge
from prefect_torch_elastic.node.nodes import Node, Nodes
from prefect_torch_elastic.node.rounds import Rounds
from prefect_torch_elastic.observations import CheckpointSaved, EvidenceTaken, NodeSample
from prefect_torch_elastic.rankstate import StopReason
from prefect_torch_elastic.spec import restore_spec
from prefect_torch_elastic.wire import (
    GangEnded,
    GangStatus,
    LogLines,
    Message,
    NodeDone,
    NodeLeaves,
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

SETTLE_SECONDS = 0.3  # for the other nodes' failures, before the first one is judged
EVIDENCE_SECONDS = 0.8  # for the stacks of ranks that live, before they are ended with the others


class Gang:
    """A gang from its order to its end; `ended` is None while it goes on.

    Args:
        order: The gang.
        nodes: Agents of this machine.
        tell: Gets what the driver has to know.
        gate: Where nodes of other machines come in; this machine is node 0 then. None runs all nodes here.

    Raises:
        ElasticError: If it cannot start here: too few GPUs, no agent.
    """

    def __init__(
        self, order: RunGang, nodes: Nodes, tell: Callable[[Message], None], *, gate: Gate | None = None
    ) -> None:
        self.ended: GangEnded | None = None
        self._spec = spec = restore_spec(order.fields)
        self.grace_seconds = spec.grace_seconds
        self._tell = tell
        self._crew = Crew(order, spec, nodes, gate)
        self._ending = Ending(self._crew, grace_seconds=spec.grace_seconds)
        self._rounds = Rounds()
        self._watch = GangWatch(limit_seconds=spec.progress_timeout_seconds, ask=self._crew.ask)
        self._judge = Judge(spec, rounds=self._rounds, watch=self._watch, tell=tell)
        self._failed_at: float | None = None
        self._losses = 0
        self._running_since: float | None = None
        try:
            for index in range(self._crew.nnodes):
                self._start_node(index)
        except BaseException:
            self._crew.retire_all()
            self.close()
            raise

    def close(self) -> None:
        """Give back what the gang held."""
        self._crew.close()

    # ------------------------------------------------------------ one turn

    def step(self, driver: Channel | None, timeout_seconds: float) -> None:
        """Wait for events, take them in, and act on deadlines that have passed."""
        for node in self._crew.wait(driver, self._time_left(timeout_seconds), admit=self._admit_arrivals):
            self._listen(node)
        self._act_on_deadlines()
        if self._crew.is_gone and self.ended is None:
            self.ended = self._ending.conclude(restarts=self._judge.restarts)

    def stop(self, order: StopGang, *, status: GangStatus = GangStatus.STOPPED) -> None:
        """End the gang; a second order can only shorten the grace."""
        self._watch.end()
        if not self._ending.stop(order, status=status):
            return
        reason = order.reason.name.lower().replace("_", " ")
        text = f"The gang is asked to stop ({reason}); its ranks have {order.grace_seconds:g} s."
        self._tell(Notice(level=logging.INFO, text=text))
        if order.reason is StopReason.PREEMPTED:
            self._judge.note_preemption(grace_seconds=order.grace_seconds)

    # ------------------------------------------------------------ nodes

    def _admit_arrivals(self) -> None:
        """Let nodes of other machines take part, as long as nothing is decided."""
        for node in self._crew.arrivals():
            if not self._ending.is_decided:  # else it is dismissed with the others
                self._crew.admit(node, restart_count=self._judge.restarts)

    def _listen(self, node: Node | RemoteNode) -> None:
        if not self._crew.has(node):
            return  # its part was over when another one's news were taken in
        for message in node.receive(self._crew.folder):
            self._take(node, message)
        if node.is_gone and self._crew.has(node):
            self._lose(node)

    def _start_node(self, index: int) -> None:
        self._crew.start(index, restart_count=self._judge.restarts, after_round=self._rounds.newest)

    def _take(self, node: Node | RemoteNode, message: Message) -> None:
        match message:
            case LogLines() | Progress() | Notice() | CheckpointSaved():
                self._tell(message)
            case NodeSample():
                self._tell(message)
                if stall := self._watch.see(message, time.monotonic()):
                    text = f"The gang makes steps again after {stall:.0f} s."
                    self._tell(Notice(level=logging.INFO, text=text))
            case EvidenceTaken():
                self._watch.take(message)
            case RanksStarted():
                self._take_start(message)
            case RanksReturned():
                self._rounds.give_back(message)
                self._watch.say_left(message.round, time.monotonic())
                self._finish_if_all_returned(message.round)
            case NodeRegroups():
                self._rounds.broken.add(message.round)
                self._watch.end()
            case RanksFailed():
                self._take_failure(node, message)
            case NodeDone():
                self._crew.leave(node, is_warm=message.warm)
                self._watch.forget([node.index])
                self._ending.note_killed(message.killed)
                if message.problem and not self._ending.is_decided and not self._goes_on_without(node):
                    self._end_for(self._diagnose_problem(node.index, message.problem))
            case NodeLeaves():
                self._leave_with(node)
            case _:
                pass

    def _take_start(self, message: RanksStarted) -> None:
        self._rounds.start(message)
        self._running_since = self._running_since or time.monotonic()
        self._tell(message)
        world_size = self._rounds.world_size(message.round)
        if world_size and not self._ending.is_decided:
            self._watch.begin(message.round, world_size=world_size, now=time.monotonic())

    def _leave_with(self, node: Node | RemoteNode) -> None:
        """One machine has to go: the others cannot go on without it, and all save while it is there."""
        if not self._ending.is_decided:
            self._warn(f"Node {node.index} was asked to end, so the gang stops.")
            self.stop(StopGang(reason=StopReason.PREEMPTED, grace_seconds=self.grace_seconds))

    def _diagnose_problem(self, index: int, problem: str) -> Diagnosis:
        if index in self._rounds.started:
            return diagnose_lost_node(index, reason=f"its agent failed: {problem}", pods_remain=True)
        return diagnose_setup(f"node {index}: {problem}.", node_rank=index, may_pass=True)

    def _lose(self, node: Node | RemoteNode) -> None:
        """An agent died; its ranks died with it. Start another one here, within bounds."""
        how = self._crew.bury(node)
        self._watch.forget([node.index])
        started = self._rounds.started.pop(node.index, None)
        self._watch.end()
        if self._ending.is_decided:
            return
        self._losses += 1
        current = self._rounds.current
        self._rounds.broken |= {started.round, current} if started else {current, current + 1}
        rank = started.ranks[0].node_rank if started else node.index
        if self._crew.awaited is not None:  # whoever started the machines starts all of them again
            remain = not isinstance(node, RemoteNode)
            self._end_for(diagnose_lost_node(rank, reason=how, pods_remain=remain), IncidentKind.NODE)
            return
        if self._losses >= self._spec.max_attempts:
            if not self._goes_on_without(node):
                reason = f"{how}; {self._losses} were lost, as many as `max_attempts` allows"
                self._end_for(diagnose_lost_node(rank, reason=reason), IncidentKind.NODE)
            return
        self._warn(f"node {rank} was lost: {how}. It is replaced (this spends no restart).")
        self._judge.note(
            IncidentKind.NODE,
            diagnose_lost_node(rank, reason=how),
            consequence="It is replaced, and the ranks start again, which spends no restart.",
        )
        self._start_node(node.index)

    def _goes_on_without(self, node: Node | RemoteNode) -> bool:
        """Whether enough nodes are left for a range such as `2:4`; then the gang goes on smaller."""
        if not self._crew.can_shrink():
            return False
        self._rounds.started.pop(node.index, None)
        left = f"{len(self._crew.indexes)} of {self._crew.nnodes}"
        self._warn(f"A node is not replaced any more; the gang goes on with {left}.")
        return True

    def give_up(self, problem: str) -> None:
        """End the gang because its head cannot go on."""
        if not self._ending.is_decided:
            self._end_for(diagnose_setup(f"{problem}.", may_pass=True))

    def _warn(self, text: str) -> None:
        self._tell(Notice(level=logging.WARNING, text=text))

    # ------------------------------------------------------------ verdicts

    def _finish_if_all_returned(self, number: int) -> None:
        if self._ending.is_decided or not self._rounds.have_all_returned(number):
            return  # it may have been stopped while this was on its way
        leader = next(info for info in self._rounds.ranks(number) if info.rank == 0)
        self._watch.end()
        self._ending.succeed(str(Path(leader.log).with_suffix(".result")))
        verdict = Verdict(round=number, action=VerdictAction.FINISH, restart_count=self._judge.restarts)
        self._announce(verdict)
        self._judge.end_round(verdict)
        for node in self._crew.others(self._rounds.members(number)):  # a node that slept through the end
            node.send(StopGang(reason=StopReason.REGROUP, grace_seconds=0.0))
            node.interrupt()

    def _take_failure(self, node: Node | RemoteNode, message: RanksFailed) -> None:
        if verdict := self._rounds.verdicts.get(message.round):
            node.send(verdict)  # a late victim of a round that was judged already
            return
        self._rounds.fail(message)
        if message.round < self._rounds.current:  # the others went on without it: it may join them
            restarts = self._judge.restarts
            node.send(Verdict(round=message.round, action=VerdictAction.RESTART, restart_count=restarts))
            return
        self._watch.end()
        self._watch.forget([node.index])
        if self._failed_at is None:
            self._failed_at = time.monotonic()
            self._watch.look(
                "ranks failed", self._failed_at, nodes=self._rounds.silent_members(message.round)
            )

    def _judge_failure(self) -> None:
        """Find the culprit of the round's failure and decide for the whole gang."""
        self._failed_at = None
        number = self._rounds.newest_failed()
        if number not in self._rounds.verdicts and not self._ending.is_decided:
            self._carry_out(*self._judge.judge_failure(number))

    def _act_on(self, finding: Finding) -> None:
        """A look has shown something: only a proof ends the round."""
        number = self._rounds.current
        if finding.category is None:
            self._judge.suspect(number, finding)
        elif number not in self._rounds.verdicts:
            self._watch.end()
            self._carry_out(*self._judge.judge_hang(number, finding))

    def _carry_out(self, verdict: Verdict, diagnosis: Diagnosis) -> None:
        self._announce(verdict)
        if verdict.action is VerdictAction.FAIL:
            self._ending.fail(diagnosis)

    def _announce(self, verdict: Verdict) -> None:
        self._rounds.verdicts[verdict.round] = verdict
        self._crew.send(verdict)

    def _end_for(self, diagnosis: Diagnosis, kind: IncidentKind = IncidentKind.FAILURE) -> None:
        """End the gang for something that is no rank's failure."""
        self._watch.end()
        self._judge.note(kind, diagnosis, consequence="The gang ends.")
        self._ending.fail(diagnosis)

    # ------------------------------------------------------------ deadlines

    def _time_left(self, timeout_seconds: float) -> float:
        awaited = self._crew.awaited.next_news if self._crew.awaited and not self._ending.is_decided else None
        deadlines = [self._judge_at(), self._ending.kill_at, self._run_deadline(), self._watch.next_at()]
        deadlines += [] if awaited is None else [awaited]
        return min(timeout_seconds, min(deadlines) - time.monotonic())

    def _judge_at(self) -> float:
        """Return when a failure is judged: when all nodes have failed, answered, or had their time."""
        if self._failed_at is None:
            return math.inf
        if not self._rounds.silent_members(self._rounds.newest_failed()):
            return self._failed_at
        return self._failed_at + (SETTLE_SECONDS if self._watch.is_answered else EVIDENCE_SECONDS)

    def _run_deadline(self) -> float:
        limit = self._spec.run_timeout_seconds
        if limit is None or self._running_since is None or self._ending.is_decided:
            return math.inf
        return self._running_since + limit

    def _act_on_deadlines(self) -> None:
        now = time.monotonic()
        if now >= self._judge_at():
            self._judge_failure()
        if finding := self._watch.act(now):
            self._act_on(finding)
        if now >= self._run_deadline():
            order = StopGang(reason=StopReason.TIMED_OUT, grace_seconds=self.grace_seconds)
            self.stop(order, status=GangStatus.TIMED_OUT)
        self._ending.act(now)
        for node in self._crew.lost():
            self._lose(node)
        if self._crew.awaited and not self._ending.is_decided:
            self._look_after_awaited(self._crew.awaited, now)

    def _look_after_awaited(self, awaited: Awaited, now: float) -> None:
        if problem := awaited.overdue(now):
            self._end_for(diagnose_missing_nodes(problem), IncidentKind.NODE)
        elif text := awaited.news(now):
            self._tell(Notice(level=logging.INFO, text=text))
