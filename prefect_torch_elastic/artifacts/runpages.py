"""Which artifacts a run has, and how often each is renewed. Pure.

Few of them, each changed in place: the lists of the UI show every version as a card of its own, and fetch all
of them whole. A progress for each attempt, metrics and a report for the run, and a page for each incident.
"""

from __future__ import annotations

from prefect_torch_elastic.artifacts.incidentpage import render_incident
from prefect_torch_elastic.artifacts.progresspage import render_metrics, render_progress
from prefect_torch_elastic.artifacts.publisher import ArtifactKind, Document, render_key
from prefect_torch_elastic.artifacts.reportpage import render_report
from prefect_torch_elastic.artifacts.tables import Page, escape_markdown
from prefect_torch_elastic.incidents import Incident
from prefect_torch_elastic.runfacts import RunFacts

PROGRESS_SECONDS = 15.0
METRICS_SECONDS = 30.0
REPORT_SECONDS = 30.0
MAX_INCIDENTS = 20  # that ended ranks, in a run
MAX_WARNINGS = 10  # suspicions and preemptions


def make_progress(facts: RunFacts, *, attempt: int) -> Document:
    """Return the progress of an attempt: a donut on its task run in the graph."""
    page = render_progress(facts)
    return Document(
        key=render_key("progress", facts.run_key, attempt),
        kind=ArtifactKind.PROGRESS,
        description=page.description,
        data=page.percent,
    )


def make_metrics(facts: RunFacts) -> Document:
    """Return the charts of a run."""
    return _make(render_key("metrics", facts.run_key), render_metrics(facts))


def make_report(facts: RunFacts) -> Document:
    """Return the report of a run."""
    return _make(render_key("run-report", facts.run_key), render_report(facts))


def make_incident(
    incident: Incident, facts: RunFacts, *, number: int, at: float, evidence: str, folder: str
) -> Document:
    """Return the page of an incident.

    Args:
        incident: It.
        facts: Of the run.
        number: In the run; the incident itself has one in its gang.
        at: When it was seen.
        evidence: Where its file in the run folder is.
        folder: Where the files of the ranks are.
    """
    page = render_incident(incident, title=facts.title, at=at, evidence=evidence, folder=folder)
    return _make(render_key("incident", facts.run_key, number), page)


def has_page(incident: Incident, facts: RunFacts) -> bool:
    """Whether the newest incident has a page: one that ended ranks does not give way to warnings."""
    is_warning = incident.kind.is_warning
    same = [one for one in facts.incidents if one.kind.is_warning == is_warning]
    return len(same) <= (MAX_WARNINGS if is_warning else MAX_INCIDENTS)


def make_pointer(facts: RunFacts, *, link: str, flow_run_id: str) -> Document:
    """Return what the page of a pool's job shows: the run's pages are those of the task that waits for it."""
    text = f"The report of {escape_markdown(facts.title)} is [on the page of its task]({link})."
    return Document(
        key=render_key("report-link", facts.run_key),  # not of the report, whose newest version this would be
        kind=ArtifactKind.MARKDOWN,
        description="The report is with the task.",  # a card cuts longer lines
        data=text,
        flow_run_id=flow_run_id,
    )


def _make(key: str, page: Page) -> Document:
    return Document(key=key, kind=ArtifactKind.MARKDOWN, description=page.description, data=page.markdown)
