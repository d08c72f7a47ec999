"""Runs that are told in a few words, on a clock of their own: what a gang says goes into a chronicle."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from prefect_torch_elastic.chronicle import Chronicle
from prefect_torch_elastic.goodput import Goodput, count_goodput
from prefect_torch_elastic.incidents import Incident, IncidentKind
from prefect_torch_elastic.observations import CheckpointSaved, NodeSample, RankSample
from prefect_torch_elastic.runfacts import RunFacts
from prefect_torch_elastic.wire import (
    GangEnded,
    GangStatus,
    IncidentSeen,
    Progress,
    RanksStarted,
    RoundEnded,
    VerdictAction,
)

BEGIN = 1_795_000_000.0  # 2026-11-18 11:06:40 UTC


class Story:
    """A run; each call is something that happens in it, at `now`."""

    def __init__(self, **names: Any) -> None:
        self.now = BEGIN
        facts = {"run_key": "key-1", "title": "my run", "began_at": BEGIN, "seen_at": BEGIN}
        self.chronicle = Chronicle(RunFacts(**{**facts, **names}))
        self.saves = 0.0
        self.steps = 0
        self.incidents = 0

    def wait(self, seconds: float) -> Story:
        self.now += seconds
        return self

    def begin(self, *, attempt: int = 1, nodes: int = 1, places: tuple[str, ...] = ()) -> Story:
        self.chronicle.begin_incarnation(attempt=attempt, nodes=nodes, at=self.now, places=places)
        return self

    def start(self, round: int = 0, *, world_size: int = 2, nodes: int = 1) -> Story:
        self.saves, self.steps = 0.0, 0
        for node in range(nodes):
            started = RanksStarted(
                node=node, round=round, world_size=world_size, restart_count=round, warm=True, ranks=[]
            )
            self.chronicle.take(started, at=self.now)
        return self

    def train(self, first: int, last: int, *, round: int = 0, seconds: float = 1.0, **sample: Any) -> Story:
        """Steps from `first` to `last`, each after so many seconds, with a sample and a report each."""
        for step in range(first, last + 1):
            self.now += seconds
            self.steps += 1
            self.sample(step, round=round, seconds=seconds, **sample)
            report = Progress(step=step, total_steps=100, metrics={"loss": 10.0 / step}, phase="")
            self.chronicle.take(report, at=self.now)
        return self

    def sample(
        self, step: int | None, *, round: int = 0, rank: int = 0, seconds: float = 1.0, **fields: Any
    ) -> Story:
        values: dict[str, Any] = {
            "steps": self.steps,
            "step_seconds": seconds if self.steps > 1 else 0.0,
            "save_seconds": self.saves,
        }
        ranks = [RankSample(rank=rank, step=step, **{**values, **fields})]
        self.chronicle.take(NodeSample(node=0, round=round, ranks=ranks), at=self.now)
        return self

    def save(self, step: int, *, stall: float = 2.0, size: int = 10**9, seconds: float = 5.0) -> Story:
        self.now += stall
        self.saves += stall
        saved = CheckpointSaved(
            step=step,
            uuid="u",
            key=f"checkpoints/{step}",
            size_bytes=size,
            seconds=seconds,
            stall_seconds=stall,
        )
        self.chronicle.take(saved, at=self.now)
        return self

    def incident(self, kind: IncidentKind, sentence: str = "it broke", **fields: Any) -> Story:
        self.incidents += 1
        seen = Incident(number=self.incidents, kind=kind, sentence=sentence, **fields)
        self.chronicle.take(IncidentSeen(incident=asdict(seen)), at=self.now)
        return self

    def end_round(
        self, action: VerdictAction, *, round: int = 0, category: str = "Killed", summary: str = "it broke"
    ) -> Story:
        diagnosis = {} if action is VerdictAction.FINISH else {"category": category, "summary": summary}
        ended = RoundEnded(round=round, action=action, restarts=0, diagnosis=diagnosis)
        self.chronicle.take(ended, at=self.now)
        return self

    def end_gang(self, status: GangStatus, **fields: Any) -> Story:
        self.chronicle.take(GangEnded(status=status, **fields), at=self.now)
        return self

    def end(self) -> Story:
        self.chronicle.end(at=self.now)
        return self

    @property
    def facts(self) -> RunFacts:
        return self.chronicle.facts(at=self.now)

    @property
    def goodput(self) -> Goodput:
        return count_goodput(self.facts)


def tell_troubled_run() -> Story:
    """A run with a kill, a hang and a preemption, that succeeds after 100 steps; 230 s in all."""
    story = Story(price_per_node_hour=36.0).wait(20).begin(nodes=2, places=("host-a", "host-b")).wait(5)
    story.start(nodes=2).wait(3).train(1, 20).save(20).train(21, 30)
    story.wait(0.5).incident(IncidentKind.FAILURE, "rank 1 was killed by SIGKILL", category="Killed", rank=1)
    story.wait(0.5).end_round(VerdictAction.RESTART).wait(2)
    story.start(1, nodes=2).wait(2).train(21, 40, round=1)
    story.wait(14).incident(IncidentKind.SUSPICION, "no step for 14 s")
    story.wait(16).incident(IncidentKind.HANG, "rank 1 sleeps", category="Hang", rank=1, node_rank=1)
    story.wait(1).end_round(VerdictAction.RESTART, round=1, category="Hang", summary="rank 1 sleeps").wait(2)
    story.start(2, nodes=2).wait(2).train(21, 60, round=2)
    story.incident(IncidentKind.PREEMPTION, "the machines are taken away").save(60)
    story.wait(1).end_gang(GangStatus.STOPPED).wait(20)
    story.begin(nodes=2, places=("host-a", "host-c")).wait(4).start(nodes=2).wait(2).train(61, 100)
    return story.end_round(VerdictAction.FINISH).wait(1).end_gang(GangStatus.SUCCEEDED).end()
