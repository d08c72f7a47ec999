"""What a run says of itself beside its log: its chronicle, from which pages, events and reports are made.

The messages of its gangs are taken in here. Threads bring what follows from them to the Prefect API, and to
the run folder, where the next gang finds it: whoever calls in here waits for neither, but for some seconds at
the very end, and nothing that goes wrong in here reaches the gang.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient

from prefect_torch_elastic.artifacts.courier import Courier
from prefect_torch_elastic.artifacts.evidencefile import render_evidence, render_evidence_key
from prefect_torch_elastic.artifacts.gangevents import EventSource, GangEvent, emit
from prefect_torch_elastic.artifacts.gangnews import GangNews
from prefect_torch_elastic.artifacts.runpages import has_page
from prefect_torch_elastic.artifacts.tables import capitalise
from prefect_torch_elastic.calls import Call
from prefect_torch_elastic.chronicle import Chronicle
from prefect_torch_elastic.chronicledoc import render_facts
from prefect_torch_elastic.diagnosis import diagnose_run_timeout
from prefect_torch_elastic.dispatch.phases import Phase, find_gang_phase
from prefect_torch_elastic.errors import StoreError, TransferError
from prefect_torch_elastic.evidence import parse_diagnosis
from prefect_torch_elastic.incidents import Incident, IncidentKind, blame, parse_incident
from prefect_torch_elastic.publishing import RunPages
from prefect_torch_elastic.runfacts import GangEnd, RunFacts
from prefect_torch_elastic.runmemory import RunMemory
from prefect_torch_elastic.wire import (
    GangEnded,
    GangStatus,
    IncidentSeen,
    LogLines,
    Message,
    Notice,
    Progress,
    RanksStarted,
)

SAVE_SECONDS = 30.0
LOAD_SECONDS = 30.0  # then the report goes without the gangs before
LAST_WORD_SECONDS = 5.0
QUICK_WORD_SECONDS = 2.0  # of a run that was told to go
MAX_EARLY = 10_000  # messages that wait for the chronicle of the gangs before
_LOAD_SHARE, _PAGES_SHARE = 0.4, 0.8  # of the last seconds; the rest is for the run folder

Note = Callable[[Chronicle], object]


class RunReporter:
    """Listens to the gangs of one call.

    Args:
        call: It.
        clock: Returns unix seconds.
        make_pages: Makes what publishes its pages.
        send: Sends an event.
    """

    def __init__(
        self,
        call: Call,
        *,
        clock: Callable[[], float] = time.time,
        make_pages: Callable[[Call, Callable[[], RunFacts | None]], RunPages] = RunPages,
        send: Callable[[GangEvent, float], object] = lambda event, at: emit(event, at=at),
    ) -> None:
        self._call, self._clock = call, clock
        self._log: Any = call.log
        self._lock = threading.RLock()
        self._chronicle: Chronicle | None = None
        self._early: list[Note] = []
        self._is_loaded = threading.Event()
        self._load_until = time.monotonic() + LOAD_SECONDS
        self._began_at = clock()
        self._attempt, self._folder = 1, ""
        self._sentences: list[str] = []  # of the incidents of this gang
        self._has_steps = self._is_suspected = self._is_stopped = False
        self._has_lines_only = False
        self._may_save = True
        self._pages = make_pages(call, self._facts)
        store_url, folder = call.record.store.url, call.identity.folder
        self._news = GangNews(_describe_source(call), store_url=store_url, folder=folder, send=send)
        self._memory = RunMemory(record=call.record)
        self._keeper = Courier(
            "prefect-torch-elastic chronicle",
            tell=lambda text: self._log.warning("The run's chronicle: %s", text),
            name_outage=lambda error: str(error) if isinstance(error, StoreError | OSError) else "",
        )
        self._safely(lambda: self._keeper.post("load", self._load))

    def begin(self, *, attempt: int, folder: str, place: str) -> None:
        """Note that a gang is being formed.

        Args:
            attempt: Its number.
            folder: Where the files of the attempt lie.
            place: Name of this machine.
        """
        self._attempt, self._folder, self._has_steps = attempt, folder, False
        self._sentences = []
        nodes, at = self._call.spec.max_nodes, self._clock()

        def note(chronicle: Chronicle) -> None:
            chronicle.begin_incarnation(attempt=attempt, nodes=nodes, at=at, places=[place])

        self._safely(lambda: self._news.begin(attempt))
        self._safely(lambda: self._note(note))
        if self._call.job is not None:
            self._safely(lambda: self._pages.ask("phases", self._read_phases))

    def __call__(self, message: Message) -> None:
        """Take in what the gang says."""
        self._safely(lambda: self._take(message))

    def stop(self, end: GangEnd) -> None:
        """Note that the gang was ended from outside."""
        self._is_stopped = True
        self._safely(lambda: self._end(end))

    def close(self) -> None:
        """Bring the last word, within some seconds; a gang that is formed later goes on from it."""
        self._safely(lambda: self._close(QUICK_WORD_SECONDS if self._is_stopped else LAST_WORD_SECONDS))

    def _take(self, message: Message) -> None:
        at = self._clock()
        match message:
            case GangEnded():
                self._take_last(message, at)
            case IncidentSeen():
                incident = parse_incident(message.incident)
                self._take_incident(incident, at)
                if incident.kind is IncidentKind.SUSPICION:
                    self._is_suspected = True
                    self._show(Phase.SUSPECTED, incident.sentence)
            case LogLines():
                return  # many, and no report has them
            case Notice():
                pass  # no report has it: it must not wait for the chronicle
            case _:
                self._note(lambda chronicle: chronicle.take(message, at=at))
                self._news.take(message, at=at)
        self._has_steps = self._has_steps or isinstance(message, Progress)
        if self._is_suspected and isinstance(message, Progress | RanksStarted):
            self._is_suspected = False
            self._show(Phase.RUNNING, "The gang goes on.")
        if self._is_loaded.is_set():
            self._keeper.post("save", self._save, every_seconds=SAVE_SECONDS)
        else:
            self._keeper.post("load", self._load)  # once more: its thread may not have started
        self._pages.refresh(attempt=self._attempt, has_steps=self._has_steps)

    def _take_last(self, message: GangEnded, at: float) -> None:
        """Take in how the gang ended; what no rank was to blame for is an incident only now."""
        if message.status is GangStatus.TIMED_OUT:
            diagnosis = diagnose_run_timeout(self._call.spec.run_timeout_seconds or 0.0)
            message = replace(message, diagnosis=asdict(diagnosis))
        elif message.status is GangStatus.FAILED and message.diagnosis:
            diagnosis = parse_diagnosis(message.diagnosis)
        else:
            diagnosis = None
        if diagnosis is not None and diagnosis.summary not in self._sentences:
            number = len(self._sentences) + 1
            incident = Incident(number=number, kind=IncidentKind.FAILURE, sentence="")
            self._take_incident(blame(incident, diagnosis), at)
        self._note(partial(self._take_end, message, at))

    def _take_end(self, message: GangEnded, at: float, chronicle: Chronicle) -> None:
        chronicle.take(message, at=at)
        self._tell_end(chronicle, at)

    def _tell_end(self, chronicle: Chronicle, at: float) -> None:
        gangs = chronicle.facts().gangs
        if gangs and gangs[-1].end is not None:
            self._news.end(gangs[-1].end, at=at, reason=gangs[-1].reason)

    def _take_incident(self, incident: Incident, at: float) -> None:
        self._sentences.append(incident.sentence)
        self._note(partial(self._note_incident, incident, at))

    def _note_incident(self, incident: Incident, at: float, chronicle: Chronicle) -> None:
        chronicle.take(IncidentSeen(incident=asdict(incident)), at=at)
        facts = chronicle.facts()
        number = facts.incident_count
        said = partial(self._say, incident, at)
        if has_page(incident, facts):
            evidence = self._keep_evidence(incident, number, at)
            self._pages.add_incident(
                incident,
                number=number,
                at=at,
                evidence=evidence,
                folder=self._folder,
                said=said,
                linked=lambda link: self._note(lambda chronicle: chronicle.note_link(number, link)),
            )
        else:
            if not self._has_lines_only:
                self._log.warning("There have been many incidents: further ones have no page, but a line.")
            self._has_lines_only = True
            said("")
        self._keeper.post("save an incident", self._save)  # whoever comes next has to count on from it

    def _keep_evidence(self, incident: Incident, number: int, at: float) -> str:
        """Let an incident be written into the run folder, and return where it will be."""
        store = self._call.record.store
        key = render_evidence_key(incident, folder=self._call.identity.folder, number=number, at=at)

        def write() -> None:
            store.put(key, render_evidence(incident, title=_name_run(self._call), at=at).encode())

        self._keeper.post(f"incident {number}", write)
        return f"{store.url.rstrip('/')}/{key}"

    def _say(self, incident: Incident, at: float, link: str) -> None:
        """Say what happened, in the log and as an event; the page of it is there by now, if it has one."""
        text = f"{capitalise(incident.sentence.rstrip('.'))}."
        level = logging.WARNING if incident.kind.is_warning else logging.ERROR
        self._log.log(level, "%s", f"{text} See {link}" if link else text)
        self._news.tell_incident(incident, at=at, link=link)

    def _show(self, phase: Phase, message: str) -> None:
        self._pages.show_state(lambda: self._call.show(phase, message))

    def _end(self, end: GangEnd) -> None:
        at = self._clock()

        def note(chronicle: Chronicle) -> None:
            chronicle.end_incarnation(end, at=at)
            self._tell_end(chronicle, at)

        self._note(note)

    def _close(self, within_seconds: float) -> None:
        at = self._clock()
        deadline = time.monotonic() + within_seconds
        self._note(lambda chronicle: chronicle.end(at=at))
        if not self._is_loaded.wait(within_seconds * _LOAD_SHARE):  # of a gang that was over at once
            self._give_up_loading()
        self._pages.refresh(attempt=self._attempt, has_steps=self._has_steps)
        for_pages = deadline - within_seconds * (1 - _PAGES_SHARE) - time.monotonic()
        self._pages.close(within_seconds=max(0.0, for_pages))
        self._keeper.post("save", self._save)  # with the links of the pages
        self._keeper.close(within_seconds=max(0.0, deadline - time.monotonic()))

    def _facts(self) -> RunFacts | None:
        with self._lock:
            chronicle = self._find_chronicle()
            return chronicle.facts(at=self._clock()) if chronicle else None

    def _note(self, note: Note) -> None:
        """Let the chronicle take something in, as soon as it is there."""
        with self._lock:
            if (chronicle := self._find_chronicle()) is not None:
                note(chronicle)
            elif len(self._early) < MAX_EARLY:
                self._early.append(note)

    def _find_chronicle(self) -> Chronicle | None:
        """Return the chronicle; a new one when that of the gangs before does not come. Needs the lock."""
        if self._chronicle is None and time.monotonic() >= self._load_until:
            self._log.warning(
                "The run folder has not answered for %.0f s: what this run did before is not in its report.",
                LOAD_SECONDS,
            )
            self._go_on(Chronicle(self._make_facts()))
        return self._chronicle

    def _load(self) -> None:
        """Go on with the chronicle of the gangs before; in the keeper's thread."""
        if self._is_loaded.is_set():  # an outage was too long
            return
        try:
            chronicle = self._memory.load()
        except TransferError as error:
            self._log.warning("What this run did before is not in its report: %s", error)
            chronicle = None
        with self._lock:
            if self._chronicle is None:
                self._go_on(chronicle or Chronicle(self._make_facts()))

    def _go_on(self, chronicle: Chronicle) -> None:
        self._chronicle = chronicle
        early, self._early = self._early, []
        for note in early:
            self._safely(partial(note, chronicle))
        self._is_loaded.set()

    def _give_up_loading(self) -> None:
        """Tell of this gang alone, and leave what the run folder has of those before as it is."""
        with self._lock:
            if self._chronicle is None:
                self._may_save = False
                self._go_on(Chronicle(self._make_facts()))

    def _make_facts(self) -> RunFacts:
        call = self._call
        job, spec = call.job, call.spec
        return RunFacts(
            run_key=call.identity.run_key,
            title=_name_run(call),
            place=f"work pool {job.work_pool}" if job else "the machine of the flow",
            price_per_node_hour=spec.price_per_node_hour,
            began_at=min(job.sent_at, self._began_at) if job else self._began_at,
            seen_at=self._began_at,
        )

    def _save(self) -> None:
        with self._lock:
            facts = self._chronicle.facts() if self._chronicle else None
        if facts is not None and self._may_save:
            self._memory.save(render_facts(facts))  # it is long, and the gang waits for the lock

    def _read_phases(self, client: SyncPrefectClient) -> None:
        """Note the phases that the cluster had this gang in: its worker names the job's states after them."""
        assert self._call.job, "only a job has them"
        states = client.read_flow_run_states(UUID(self._call.job.flow_run_id))

        def note(chronicle: Chronicle) -> None:
            known = chronicle.facts().phases
            since = known[-1].at if known else 0.0
            for state in sorted(states, key=lambda one: one.timestamp):
                phase = find_gang_phase(state.type.value, state.name or "")
                if phase is not None and (at := state.timestamp.timestamp()) > since:
                    message = state.message or ""
                    chronicle.note_phase(str(phase), message, at, is_queue=phase.waits)

        self._note(note)

    def _safely(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            logging.getLogger(__name__).debug("a report is incomplete", exc_info=error)


def _name_run(call: Call) -> str:
    return call.task_run_name or call.task_name


def _describe_source(call: Call) -> EventSource:
    job = call.job
    return EventSource(
        call=call.identity.digest,
        title=_name_run(call),
        task_run_id=call.task_run_id,
        task_run_name=call.task_run_name,
        flow_run_ids=(call.flow_run_id, *([job.flow_run_id] if job else [])),
        work_pool=job.work_pool if job else "",
        work_pool_id=job.work_pool_id if job else "",
    )
