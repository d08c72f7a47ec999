"""What went wrong, as plain data: one sentence, the culprit, its victims, a row per rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from prefect_torch_elastic.collectives import describe_collective, is_waiting
from prefect_torch_elastic.diagnosis import is_victim
from prefect_torch_elastic.evidence import Diagnosis, RankEvidence
from prefect_torch_elastic.observations import RankSample, RankSnapshot
from prefect_torch_elastic.stacks import group_stacks
from prefect_torch_elastic.wire import RankInfo

_GROUPS = 64  # of equal stacks that travel, of up to 16,000 characters each; the files have all


class IncidentKind(StrEnum):
    """What sort of thing happened, stable names.

    `suspicion`: nothing was ended; the gang makes no steps. `hang`: proven, and the round was ended for it.
    `failure`: ranks failed; the category says of what, out of memory included. `node`: a node was lost.
    `preemption`: the gang was asked to leave its machines, and its ranks to save.
    """

    SUSPICION = "suspicion"
    HANG = "hang"
    FAILURE = "failure"
    NODE = "node"
    PREEMPTION = "preemption"

    @property
    def is_warning(self) -> bool:
        """Whether it ended no ranks by itself."""
        return self in (IncidentKind.SUSPICION, IncidentKind.PREEMPTION)


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One rank of the gang at the incident.

    Attributes:
        state: In some words: `failed`, `lost its peer`, `waits`, `stands still`, `returned`, `runs`, `saves`,
            `loads`, `in phase eval`, `stopped`, `is gone`.
        step: The last one that it reported.
        exit_code, signal: How it ended; None while it lived or where it is not known.
        collective: Its newest one, such as `all_reduce #12 (waits)`; empty if it is not known.
        files: Where its whole evidence lies: log, stacks, flight recorder.
    """

    rank: int
    node_rank: int
    state: str
    step: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    collective: str = ""
    files: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, kw_only=True)
class StackGroup:
    """Stacks that are the same on some ranks."""

    ranks: list[int]
    text: str


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One thing that went wrong in a gang.

    Attributes:
        number: In this gang, from 1.
        kind: What sort.
        category: A `Category`, as text; empty for suspicions and preemptions.
        sentence: The cause, as a colleague would say it.
        cure: What to do.
        consequence: What the gang does now, as a sentence.
        round: In which round of the gang.
        restarts: That were spent before.
        rank, node_rank: The culprit, None if there is no single one.
        step: Of the culprit; of the gang if there is none.
        victims: Ranks that only suffered from it.
        traceback: Of the culprit, the user's frames last as Python has it.
        last_lines: The end of the culprit's log.
        log: Path of that log on its machine.
        ranks: All that are known, in order.
        stacks: Of the ranks that lived, equal ones together, the culprit's first.
    """

    number: int
    kind: IncidentKind
    category: str = ""
    sentence: str
    cure: str = ""
    consequence: str = ""
    round: int = 0
    restarts: int = 0
    rank: int | None = None
    node_rank: int | None = None
    step: int | None = None
    victims: list[int] = field(default_factory=list[int])
    traceback: str = ""
    last_lines: list[str] = field(default_factory=list[str])
    log: str = ""
    ranks: list[RankRow] = field(default_factory=list[RankRow])
    stacks: list[StackGroup] = field(default_factory=list[StackGroup])


def parse_incident(fields: Mapping[str, Any]) -> Incident:
    """Return the incident whose fields travelled as JSON."""
    values: dict[str, Any] = {
        **fields,
        "kind": IncidentKind(fields["kind"]),
        "ranks": [RankRow(**row) for row in fields.get("ranks", [])],
        "stacks": [StackGroup(**group) for group in fields.get("stacks", [])],
    }
    return Incident(**values)


@dataclass(frozen=True, kw_only=True)
class Witness:
    """All that is known about one rank when something went wrong; what nobody has seen is None.

    Attributes:
        info: Where it lives.
        sample: What its agent said last.
        snapshot: Where it was when evidence was taken.
        evidence: How it ended in a round that failed.
    """

    info: RankInfo
    sample: RankSample | None = None
    snapshot: RankSnapshot | None = None
    evidence: RankEvidence | None = None


def describe_ranks(witnesses: Sequence[Witness], *, culprits: Sequence[int] = ()) -> list[RankRow]:
    """Return a row for each rank, in order.

    Args:
        witnesses: What is known about the ranks.
        culprits: Ranks that are to blame.
    """
    rows: list[RankRow] = []
    for one in sorted(witnesses, key=lambda witness: witness.info.rank):
        seen = [known.step for known in (one.evidence, one.snapshot, one.sample) if known]
        files = [*(one.snapshot.files if one.snapshot else []), one.info.log]
        if one.evidence and one.evidence.stacks:
            files.append(one.evidence.stacks)
        rows.append(
            RankRow(
                rank=one.info.rank,
                node_rank=one.info.node_rank,
                state=_describe_state(one, is_culprit=one.info.rank in culprits),
                step=next((step for step in seen if step is not None), None),
                exit_code=one.evidence.exit_code if one.evidence else None,
                signal=one.evidence.signal if one.evidence else None,
                collective=_describe_newest(one.snapshot),
                files=list(dict.fromkeys(path for path in files if path)),
            )
        )
    return rows


def group_by_stack(stacks: Mapping[int, str], *, culprits: Sequence[int] = ()) -> list[StackGroup]:
    """Return the stacks of the ranks, equal ones together, those of the culprits first."""
    groups = [StackGroup(ranks=ranks, text=text) for ranks, text in group_stacks(stacks)]
    groups.sort(key=lambda group: (not set(group.ranks) & set(culprits), group.ranks[0]))
    return groups[:_GROUPS]


def blame(incident: Incident, diagnosis: Diagnosis) -> Incident:
    """Return the incident with the verdict's words about the culprit."""
    return replace(
        incident,
        category=diagnosis.category.value,
        sentence=diagnosis.summary,
        cure=diagnosis.cure,
        rank=diagnosis.rank,
        node_rank=diagnosis.node_rank,
        step=diagnosis.step,
        victims=diagnosis.victims,
        traceback=diagnosis.traceback,
        last_lines=diagnosis.last_lines,
        log=diagnosis.log,
    )


def _describe_state(witness: Witness, *, is_culprit: bool) -> str:
    evidence, snapshot = witness.evidence, witness.snapshot
    if evidence is not None and evidence.returned_at is not None:
        return "returned"
    if evidence is not None and evidence.failed_at is not None:
        if evidence.told_to_stop:
            return "was ended"
        return "lost its peer" if is_victim(evidence) and not is_culprit else "failed"
    if snapshot is None:
        return "not known" if evidence is None else "was ended"
    if not snapshot.is_alive:
        return "returned"
    if snapshot.is_stopped:
        return "stopped"
    if any(is_waiting(collective) for collective in snapshot.collectives):
        return "waits"
    if snapshot.busy:
        return "saves" if snapshot.busy == "save" else "loads"
    if snapshot.phase:
        return f"in phase {snapshot.phase}"
    return "stands still" if is_culprit else "runs"


def _describe_newest(snapshot: RankSnapshot | None) -> str:
    """Return the collective that the rank waits in, else its last one."""
    collectives = snapshot.collectives if snapshot else []
    chosen = sorted(collectives, key=lambda one: (not is_waiting(one), -one.sequence))
    return describe_collective(chosen[0]) if chosen else ""
