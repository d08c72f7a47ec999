"""Verdicts on the rounds of a gang, and the words about them: notices, incidents, ends of rounds.

Decides and tells; what follows for the nodes is done by the gang.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path

from prefect_torch_elastic.attempts import Action, decide_restart
from prefect_torch_elastic.diagnosis import diagnose, diagnose_hang
from prefect_torch_elastic.evidence import Category, Diagnosis, RankEvidence
from prefect_torch_elastic.hangwatch import Finding
from prefect_torch_elastic.incidents import Incident, IncidentKind, blame, describe_ranks, group_by_stack
from prefect_torch_elastic.node.gangwatch import GangWatch
from prefect_torch_elastic.node.rounds import Rounds
from prefect_torch_elastic.spec import Spec
from prefect_torch_elastic.wire import IncidentSeen, Message, Notice, RoundEnded, Verdict, VerdictAction

_STACKS_BYTES = 16_000  # of each rank, in an incident; the files have all


class Judge:
    """The judge of one gang.

    Args:
        spec: Of the gang.
        rounds: Its books.
        watch: What is known of the ranks.
        tell: Gets what the driver has to know.

    Attributes:
        restarts: That were spent.
    """

    def __init__(
        self, spec: Spec, *, rounds: Rounds, watch: GangWatch, tell: Callable[[Message], None]
    ) -> None:
        self.restarts = 0
        self._spec, self._rounds, self._watch, self._tell = spec, rounds, watch, tell
        self._previous: Diagnosis | None = None
        self._count = 0

    def judge_failure(self, number: int) -> tuple[Verdict, Diagnosis]:
        """Find the culprit of a round whose ranks failed, and decide for the whole gang."""
        evidence = self._rounds.evidence(number)
        diagnosis = diagnose(evidence, several_nodes=self._spec.max_nodes > 1)
        return self._decide(number, diagnosis, IncidentKind.FAILURE, evidence)

    def judge_hang(self, number: int, finding: Finding) -> tuple[Verdict, Diagnosis]:
        """Decide for a gang that is proven to hang; all its ranks live."""
        assert finding.category
        culprit = next((info for info in self._rounds.ranks(number) if info.rank in finding.ranks), None)
        ranks = self._watch.witnesses([culprit]) if culprit else []
        step = next((one.sample.step for one in ranks if one.sample), None)
        diagnosis = diagnose_hang(
            finding.category, summary=finding.sentence, culprit=culprit, step=step, victims=finding.waiting
        )
        return self._decide(number, diagnosis, IncidentKind.HANG, [])

    def suspect(self, number: int, finding: Finding) -> None:
        """Say that the gang may hang."""
        infos = {info.rank: info for info in self._rounds.ranks(number)}
        culprit = infos.get(finding.ranks[0]) if finding.ranks else None
        self._warn(
            f"The gang seems to hang: {finding.sentence} It goes on; the stacks are in its run folder."
        )
        incident = Incident(
            number=0,
            kind=IncidentKind.SUSPICION,
            sentence=finding.sentence,
            cure="Put `phase(...)` around work that takes long between two steps. See the stacks below.",
            consequence="The gang goes on. It is ended if it turns out to hang.",
            rank=culprit.rank if culprit else None,
            node_rank=culprit.node_rank if culprit else None,
            victims=list(finding.waiting),
            log=culprit.log if culprit else "",
        )
        self._report(number, incident, culprits=finding.ranks)

    def note(self, kind: IncidentKind, diagnosis: Diagnosis, *, consequence: str) -> None:
        """Say what happened outside of any rank, such as the loss of a node."""
        incident = Incident(number=0, kind=kind, sentence="", consequence=consequence)
        self._report(self._rounds.current, blame(incident, diagnosis))

    def note_preemption(self, *, grace_seconds: float) -> None:
        """Say that the gang has to leave its machines."""
        incident = Incident(
            number=0,
            kind=IncidentKind.PREEMPTION,
            sentence="the gang has to leave its machines.",
            cure="Nothing: the run goes on from its last checkpoint when it has machines again.",
            consequence=f"Its ranks have {grace_seconds:g} s to save.",
        )
        self._report(self._rounds.current, incident)

    def end_round(self, verdict: Verdict, diagnosis: Diagnosis | None = None) -> None:
        """Tell how a round ended."""
        fields = asdict(diagnosis) if diagnosis else {}
        self._tell(
            RoundEnded(round=verdict.round, action=verdict.action, restarts=self.restarts, diagnosis=fields)
        )

    # ------------------------------------------------------------

    def _decide(
        self, number: int, diagnosis: Diagnosis, kind: IncidentKind, evidence: list[RankEvidence]
    ) -> tuple[Verdict, Diagnosis]:
        if self._was_broken(number, diagnosis):
            reason, action, cost = "nodes came or went, which spends nothing", Action.RESTART, 0
        else:
            decision = decide_restart(
                diagnosis, self._previous, restarts=self.restarts, max_restarts=self._spec.max_restarts
            )
            reason, action = decision.reason, decision.action
            cost = int(action is Action.RESTART)
            self._previous = diagnosis
        goes_on = action is Action.RESTART
        if goes_on:
            self._warn(f"{diagnosis.summary.rstrip('.')}. The ranks start again: {reason}.")
        incident = Incident(
            number=0,
            kind=kind,
            sentence="",
            consequence=f"{'The ranks start again' if goes_on else 'The gang ends'}: {reason}.",
        )
        culprits = [] if diagnosis.rank is None else [diagnosis.rank]
        self._report(number, blame(incident, diagnosis), culprits=culprits, evidence=evidence)
        self.restarts += cost  # the incident says how many were spent before it
        verdict = Verdict(
            round=number,
            action=VerdictAction.RESTART if goes_on else VerdictAction.FAIL,
            restart_count=self.restarts,
        )
        self.end_round(verdict, diagnosis)
        return verdict, diagnosis

    def _was_broken(self, number: int, diagnosis: Diagnosis) -> bool:
        """Whether the ranks of this round are victims of a node that was lost or left them."""
        is_victim = diagnosis.category in {Category.PEER_LOST, Category.COLLECTIVE_TIMEOUT}
        return is_victim and number in self._rounds.broken

    def _report(
        self,
        number: int,
        incident: Incident,
        *,
        culprits: Iterable[int] = (),
        evidence: Iterable[RankEvidence] = (),
    ) -> None:
        self._count += 1
        culprits, evidence = list(culprits), list(evidence)
        witnesses = self._watch.witnesses(self._rounds.ranks(number), evidence)
        stacks = {one.info.rank: one.snapshot.stacks for one in witnesses if one.snapshot}
        stacks |= {rank.rank: _read_stacks(rank) for rank in evidence if rank.stacks}
        rows = describe_ranks(witnesses, culprits=culprits)
        steps = [row.step for row in rows if row.step is not None]
        incident = replace(
            incident,
            number=self._count,
            round=number,
            restarts=self.restarts,
            step=max(steps, default=None) if incident.step is None else incident.step,
            ranks=rows,
            stacks=group_by_stack(stacks, culprits=culprits),
        )
        self._tell(IncidentSeen(incident=asdict(incident)))

    def _warn(self, text: str) -> None:
        self._tell(Notice(level=logging.WARNING, text=text))


def _read_stacks(rank: RankEvidence) -> str:
    """Return the end of the file with a rank's stacks; nothing if it is on another machine."""
    try:
        with Path(rank.stacks).open("rb") as file:
            file.seek(max(0, Path(rank.stacks).stat().st_size - _STACKS_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
