"""What a run tells of itself: from a gang's messages to pages, lines, events and the chronicle that stays."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.states import Pending, Running

from prefect_torch_elastic.artifacts.gangevents import GangEvent
from prefect_torch_elastic.artifacts.runpages import MAX_INCIDENTS, MAX_WARNINGS
from prefect_torch_elastic.calls import PoolJob
from prefect_torch_elastic.diagnosis import diagnose_lost_launcher
from prefect_torch_elastic.dispatch.phases import Phase
from prefect_torch_elastic.errors import StoreError
from prefect_torch_elastic.incidents import Incident, IncidentKind, blame
from prefect_torch_elastic.outcomes import CallRecord
from prefect_torch_elastic.reporting import RunReporter
from prefect_torch_elastic.runfacts import GangEnd, RunFacts
from prefect_torch_elastic.runlog import RunLog
from prefect_torch_elastic.runmemory import RunMemory
from prefect_torch_elastic.spec import Spec
from prefect_torch_elastic.store import open_store
from prefect_torch_elastic.wire import (
    GangEnded,
    GangStatus,
    IncidentSeen,
    LogLines,
    Notice,
    Progress,
    RankInfo,
    RanksStarted,
)
from tests.hosted import wait_for

pytestmark = pytest.mark.timeout(30)


class Pages:
    """Pages that publish at once, if at all."""

    def __init__(self, facts: Callable[[], RunFacts | None], *, link: str) -> None:
        self.facts, self.link = facts, link
        self.states: list[Any] = []
        self.incidents: list[int] = []
        self.evidence: list[str] = []
        self.refreshed: list[tuple[int, bool]] = []
        self.last: RunFacts | None = None
        self.is_broken = False

    def refresh(self, *, attempt: int, has_steps: bool) -> None:
        if self.is_broken:
            raise RuntimeError("no pages today")
        self.refreshed.append((attempt, has_steps))

    def add_incident(
        self,
        incident: Any,
        *,
        number: int,
        at: float,
        evidence: str,
        folder: str,
        said: Any,
        linked: Any,
    ) -> None:
        self.incidents.append(number)
        self.evidence.append(evidence)
        if self.link:
            linked(self.link)
        said(self.link)

    def show_state(self, show: Callable[[], None]) -> None:
        show()

    def ask(self, slot: str, question: Callable[[Any], object]) -> None:
        question(SimpleNamespace(read_flow_run_states=lambda run_id: self.states))

    def close(self, *, within_seconds: float) -> None:
        self.last = self.facts()


class Run:
    """A run whose gangs tell a reporter what they do, on a clock that only tests move."""

    pages: Pages

    def __init__(self, folder: Path, *, link: str = "http://ui/1", job: PoolJob | None = None) -> None:
        self.now, self.link, self.job = 1000.0, link, job
        self.states_of_job: list[Any] = []
        self.lines: list[tuple[int, str]] = []
        self.states: list[tuple[Phase, str]] = []
        self.events: list[GangEvent] = []
        self.store: Any = open_store(str(folder))
        self.record = CallRecord(
            store=self.store,
            folder="run",
            log=RunLog(self.store, "run"),
            call="c0ffee",
            key=b"k" * 32,
            warn=pytest.fail,
        )
        self.reporter = self.open()

    @property
    def memory(self) -> RunMemory:
        return RunMemory(record=self.record)

    def open(self) -> RunReporter:
        """Return the reporter of another process that goes on with this run."""
        log = SimpleNamespace(
            log=lambda level, text, *values: self.lines.append((level, text % values)),
            warning=lambda text, *values: self.lines.append((logging.WARNING, text % values)),
        )
        call: Any = SimpleNamespace(
            identity=SimpleNamespace(run_key="run", folder="run", digest="c0ffee"),
            spec=Spec(nnodes=2),
            record=self.record,
            task_run_id="task",
            task_run_name="train-1",
            task_name="train",
            flow_run_id="flow",
            job=self.job,
            log=log,
            show=lambda phase, message: self.states.append((phase, message)),
        )

        def make_pages(call: Any, facts: Any) -> Any:
            self.pages = Pages(facts, link=self.link)
            self.pages.states = self.states_of_job
            return self.pages

        self.reporter = RunReporter(
            call,
            clock=lambda: self.now,
            make_pages=make_pages,
            send=lambda event, at: self.events.append(event),
        )
        return self.reporter

    def begin(self, attempt: int = 1) -> None:
        self.reporter.begin(attempt=attempt, folder="/attempt", place="host-1")
        rank = RankInfo(rank=0, local_rank=0, node_rank=0, pid=1, log="")
        self.reporter(RanksStarted(node=0, round=0, world_size=1, restart_count=0, warm=True, ranks=[rank]))

    def report(self, step: int) -> None:
        self.now += 1
        self.reporter(Progress(step=step, total_steps=100, metrics={"loss": 1.0}, phase=""))

    def tell(self, kind: IncidentKind, number: int = 1) -> None:
        incident = Incident(number=number, kind=kind, sentence="rank 1 sleeps in `load`")
        self.reporter(IncidentSeen(incident=asdict(incident)))

    def end(self, status: GangStatus = GangStatus.SUCCEEDED) -> RunFacts:
        self.reporter(GangEnded(status=status))
        return self.leave()

    def leave(self) -> RunFacts:
        self.reporter.close()
        assert self.pages.last is not None
        return self.pages.last


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.reporter.close()


def test_run_is_told_from_its_begin_to_its_end(run):
    run.begin()
    run.report(1)
    facts = run.end()
    assert (facts.run_key, facts.title, facts.step, facts.end) == ("run", "train-1", 1, GangEnd.SUCCEEDED)
    assert [event.event.rpartition(".")[2] for event in run.events] == ["started", "succeeded"]
    assert (facts.gangs[0].nodes, facts.gangs[0].places) == (2, ("host-1",))


def test_progress_is_shown_only_after_a_step_of_the_attempt(run):
    run.begin(attempt=2)
    assert run.pages.refreshed[-1] == (2, False)
    run.report(1)
    assert run.pages.refreshed[-1] == (2, True)


def test_chronicle_goes_on_in_another_process(run):
    run.begin()
    run.report(7)
    run.reporter.stop(GangEnd.PREEMPTED)
    run.leave()
    run.now += 50
    run.open()
    run.begin()
    run.report(8)
    facts = run.end()
    assert [gang.end for gang in facts.gangs] == [GangEnd.PREEMPTED, GangEnd.SUCCEEDED]
    assert (facts.began_at, facts.preemptions) == (1000.0, 1)


def test_chronicle_that_somebody_changed_is_not_used(run):
    run.begin()
    run.end()
    data = bytes(run.store.get(run.memory.key)).replace(b"train-1", b"train-2")
    run.store.put(run.memory.key, data)
    run.open()
    run.begin()
    facts = run.end()
    assert len(facts.gangs) == 1
    assert any("is not in its report" in text for _, text in run.lines)


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        pytest.param(IncidentKind.FAILURE, logging.ERROR, id="failure"),
        pytest.param(IncidentKind.HANG, logging.ERROR, id="hang"),
        pytest.param(IncidentKind.SUSPICION, logging.WARNING, id="suspicion"),
        pytest.param(IncidentKind.PREEMPTION, logging.WARNING, id="preemption"),
    ],
)
def test_incident_is_a_line_that_leads_to_its_page_and_an_event(run, kind, level):
    run.begin()
    run.tell(kind)
    facts = run.end(GangStatus.FAILED)
    assert run.lines == [(level, "Rank 1 sleeps in `load`. See http://ui/1")]
    assert [event.payload["link"] for event in run.events if event.event.endswith("incident")] == [
        "http://ui/1"
    ]
    assert facts.incidents[0].url == "http://ui/1"


def test_incident_is_a_file_in_the_run_folder_of_which_its_page_tells(run):
    run.begin()
    run.tell(IncidentKind.HANG)
    run.end(GangStatus.FAILED)
    (place,) = run.pages.evidence
    key = place.removeprefix(f"{run.store.url}/")
    assert key == "run/incidents/19700101T001640Z-01-hang.txt"
    assert "Rank 1 sleeps in `load`" in bytes(run.store.get(key)).decode()


def test_end_that_no_rank_is_to_blame_for_is_an_incident_too(run):
    lost = diagnose_lost_launcher(-9)
    run.begin()
    run.reporter(GangEnded(status=GangStatus.FAILED, diagnosis=asdict(lost)))
    facts = run.leave()
    assert [(one.kind, one.category) for one in facts.incidents] == [(IncidentKind.FAILURE, "LauncherLost")]
    assert run.pages.incidents == [1]


def test_gang_that_took_too_long_says_so_on_a_page_and_in_its_event(run):
    run.begin()
    run.reporter(GangEnded(status=GangStatus.TIMED_OUT))
    facts = run.leave()
    assert [one.category for one in facts.incidents] == ["TimedOut"]
    (failed,) = [event for event in run.events if event.event.endswith("gang.failed")]
    assert "longer than `run_timeout_seconds" in failed.payload["reason"]


def test_failure_that_was_judged_is_one_incident(run):
    diagnosis = diagnose_lost_launcher(1)
    run.begin()
    judged = blame(Incident(number=1, kind=IncidentKind.FAILURE, sentence=""), diagnosis)
    run.reporter(IncidentSeen(incident=asdict(judged)))
    run.reporter(GangEnded(status=GangStatus.FAILED, diagnosis=asdict(diagnosis)))
    assert len(run.leave().incidents) == 1


def test_incident_without_a_page_is_a_line_all_the_same(tmp_path):
    run = Run(tmp_path, link="")
    run.begin()
    run.tell(IncidentKind.FAILURE)
    run.end(GangStatus.FAILED)
    assert run.lines == [(logging.ERROR, "Rank 1 sleeps in `load`.")]


def test_incidents_have_a_page_up_to_a_number_and_a_line_after_it(run):
    run.begin()
    for number in range(1, MAX_INCIDENTS + 4):
        run.tell(IncidentKind.FAILURE, number)
    run.end(GangStatus.FAILED)
    assert run.pages.incidents == list(range(1, MAX_INCIDENTS + 1))
    assert sum("sleeps" in text for _, text in run.lines) == MAX_INCIDENTS + 3
    assert sum("have no page" in text for _, text in run.lines) == 1


def test_failure_after_many_preemptions_has_a_page(run):
    run.begin()
    for number in range(1, MAX_WARNINGS + 6):
        run.tell(IncidentKind.PREEMPTION, number)
    run.tell(IncidentKind.FAILURE, MAX_WARNINGS + 6)
    run.end(GangStatus.FAILED)
    assert run.pages.incidents == [*range(1, MAX_WARNINGS + 1), MAX_WARNINGS + 6]


def test_incident_is_in_the_chronicle_at_once(run):
    run.begin()
    run.tell(IncidentKind.FAILURE)
    wait_for(lambda: (kept := run.memory.load()) is not None and kept.facts().incident_count == 1)
    run.open()  # the process before was killed
    run.begin()
    run.tell(IncidentKind.FAILURE)
    assert len(run.end(GangStatus.FAILED).incidents) == 2
    assert run.pages.incidents == [2]


def test_gang_that_is_over_before_the_run_folder_answers_is_told_of(silent):
    silent.begin()
    silent.tell(IncidentKind.FAILURE)
    silent.reporter(GangEnded(status=GangStatus.FAILED))
    silent.reporter.stop(GangEnd.FAILED)
    silent.reporter.close()
    assert silent.pages.incidents == [1]
    assert [event.event.rpartition(".")[2] for event in silent.events][-1] == "failed"
    assert not list(silent.store.list("run/calls/"))


def test_state_is_suspected_until_the_gang_moves_again(run):
    run.begin()
    run.tell(IncidentKind.SUSPICION)
    run.report(2)
    run.report(3)
    run.end()
    assert [phase for phase, _ in run.states] == [Phase.SUSPECTED, Phase.RUNNING]


def test_phases_of_a_job_are_those_that_its_worker_named(tmp_path):
    job = PoolJob(flow_run_id=str(uuid4()), sent_at=900.0, work_pool="gpus")
    run = Run(tmp_path, job=job)
    queued = Pending(name="Queued", message="3 gangs are ahead", timestamp=datetime.fromtimestamp(910, UTC))
    admitted = Pending(name="Admitted", timestamp=datetime.fromtimestamp(950, UTC))
    started = Running(timestamp=datetime.fromtimestamp(960, UTC))
    run.states_of_job += [started, queued, admitted]
    run.begin()
    facts = run.end()
    assert [(phase.at, phase.name, phase.is_queue) for phase in facts.phases] == [
        (910.0, "Queued", True),
        (950.0, "Admitted", False),
    ]
    assert (facts.began_at, facts.place) == (900.0, "work pool gpus")


def test_gang_does_not_notice_what_is_wrong_with_its_report(run):
    run.begin()
    run.pages.is_broken = True
    run.report(1)
    run.reporter(IncidentSeen(incident={"kind": "nonsense"}))
    run.pages.is_broken = False
    assert run.end().step == 1


def test_messages_are_kept_until_the_run_folder_answers(tmp_path, monkeypatch):
    answers = threading.Event()
    load = RunMemory.load

    def load_late(memory: RunMemory) -> Any:
        answers.wait(10.0)
        return load(memory)

    monkeypatch.setattr(RunMemory, "load", load_late)
    run = Run(tmp_path)
    run.begin()
    run.report(5)
    assert run.pages.facts() is None
    answers.set()
    run.reporter._keeper.close(within_seconds=10.0)
    facts = run.pages.facts()
    assert facts is not None
    assert facts.step == 5


def test_store_that_stays_away_holds_up_nobody(tmp_path, monkeypatch):
    def load(memory: RunMemory) -> Any:
        raise StoreError("it is away")

    monkeypatch.setattr(RunMemory, "load", load)
    monkeypatch.setattr("prefect_torch_elastic.reporting.LAST_WORD_SECONDS", 0.2)
    run = Run(tmp_path)
    run.begin()
    run.report(5)
    run.reporter(GangEnded(status=GangStatus.SUCCEEDED))
    run.reporter.close()
    assert [text for _, text in run.lines if "it is away" in text]


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run whose folder does not answer until the end of the test."""
    ends = threading.Event()

    def load(memory: RunMemory) -> Any:
        ends.wait(20.0)
        return None

    monkeypatch.setattr(RunMemory, "load", load)
    monkeypatch.setattr("prefect_torch_elastic.reporting.QUICK_WORD_SECONDS", 0.2)
    run = Run(tmp_path)
    yield run
    ends.set()
    run.reporter.stop(GangEnd.CANCELLED)
    run.reporter.close()


def test_lines_of_the_log_do_not_wait_for_the_run_folder(silent):
    before = len(silent.reporter._early)
    silent.reporter(LogLines(rank=0, lines=[(20, "x" * 1000)]))
    silent.reporter(Notice(level=20, text="it goes on"))
    assert len(silent.reporter._early) == before


def test_report_goes_on_without_the_gangs_before_when_the_run_folder_is_silent(silent):
    silent.begin()
    silent.report(5)
    assert silent.pages.facts() is None
    silent.reporter._load_until = 0.0
    facts = silent.pages.facts()
    silent.report(6)
    assert (facts.step, silent.pages.facts().step) == (5, 6)
    assert [text for _, text in silent.lines if "is not in its report" in text]
    assert len(silent.lines) == 1


def test_chronicle_that_comes_too_late_is_skipped(run):
    run.begin()
    run.end()
    run.open()
    run.reporter._keeper.close(within_seconds=10.0)
    chronicle = run.reporter._chronicle
    run.reporter._load()
    assert run.reporter._chronicle is chronicle


def test_gang_does_not_notice_that_no_thread_could_start(tmp_path, monkeypatch):
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        run = Run(tmp_path)
    run.begin()
    run.reporter._is_loaded.wait(0.1)
    assert run.end().step is None
