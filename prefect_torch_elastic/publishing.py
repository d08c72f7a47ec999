"""The pages of a run in Prefect: rendered and sent in a thread of their own, whatever the API does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import get_current_settings

from prefect_torch_elastic.artifacts import runpages
from prefect_torch_elastic.artifacts.courier import Courier, Work
from prefect_torch_elastic.artifacts.links import fetch_base, render_link
from prefect_torch_elastic.artifacts.publisher import Document, Publisher
from prefect_torch_elastic.calls import Call
from prefect_torch_elastic.dispatch.polling import describe_outage, open_client
from prefect_torch_elastic.incidents import Incident
from prefect_torch_elastic.runfacts import RunFacts, describe_slowness, find_slow_ranks

_STATE = "state"

Said = Callable[[str], object]


class RunPages:
    """Publishes the pages of one call.

    Args:
        call: It.
        facts: Returns what is known by now, None if nothing is yet; it is called in the thread.
        open_api: Opens a client of the API.
        find_ui: Returns the address of the UI, empty without one; asked once, in the thread.
    """

    def __init__(
        self,
        call: Call,
        facts: Callable[[], RunFacts | None],
        *,
        open_api: Callable[[], AbstractContextManager[SyncPrefectClient]] = open_client,
        find_ui: Callable[[], str] | None = None,
    ) -> None:
        self._log: Any = call.log
        self._job, self._facts = call.job, facts
        self._find_ui = find_ui or _find_ui
        self._ui: str | None = None
        self._publisher = Publisher(open_api, flow_run_id=call.flow_run_id, task_run_id=call.task_run_id)
        self._courier = Courier(
            "prefect-torch-elastic pages",
            tell=lambda text: self._log.warning("The run's pages in Prefect: %s", text),
            name_outage=_name_outage,
            leave=self._publisher.close,
        )
        self._unsaid: dict[str, Said] = {}
        self._has_report = False
        self._slow: set[int] = set()

    def refresh(self, *, attempt: int, has_steps: bool) -> None:
        """Let the pages be made anew soon, each at its own pace.

        Args:
            attempt: The one that runs.
            has_steps: Whether its gang has reported one; before that there is no progress to show.
        """
        self._courier.post("report", self._show_report, every_seconds=runpages.REPORT_SECONDS)
        if has_steps:
            progress = self._work(lambda facts: runpages.make_progress(facts, attempt=attempt))
            self._courier.post(f"progress {attempt}", progress, every_seconds=runpages.PROGRESS_SECONDS)
            metrics = self._work(runpages.make_metrics)
            self._courier.post("metrics", metrics, every_seconds=runpages.METRICS_SECONDS)

    def add_incident(
        self,
        incident: Incident,
        *,
        number: int,
        at: float,
        evidence: str,
        folder: str,
        said: Said,
        linked: Said,
    ) -> None:
        """Publish the page of an incident, and call `said` with its address, or without one if it has none.

        Args:
            incident: It.
            number: In the run.
            at: When it was seen.
            evidence: Where its file in the run folder is.
            folder: Where the files of the ranks are.
            said: Called once, in any thread, at the latest when the run's pages are closed.
            linked: Called with the address once there is one, which may be after `said` was told of none.
        """
        slot = f"incident {number}"

        def work() -> None:
            facts, link = self._facts(), ""
            try:
                if facts is not None:
                    page = runpages.make_incident(
                        incident, facts, number=number, at=at, evidence=evidence, folder=folder
                    )
                    link = self._publish(page)
                    if link:
                        linked(link)
                    if link and slot not in self._unsaid:  # the API was away
                        self._log.info("The page of an incident before: %s", link)
            finally:
                self._say(slot, link)

        self._unsaid[slot] = said
        self._courier.post(slot, work)

    def show_state(self, show: Work) -> None:
        """Let a state of the run be shown, unless a newer one comes first."""
        self._courier.post(_STATE, show)

    def ask(self, slot: str, question: Callable[[SyncPrefectClient], object]) -> None:
        """Ask the API something in the thread, with its client."""

        def work() -> None:
            question(self._publisher.client)

        self._courier.post(slot, work)

    def close(self, *, within_seconds: float) -> None:
        """Bring the last versions, and wait for that no longer than this."""
        self._courier.drop(_STATE)  # how the run ends is said by others
        self._courier.close(within_seconds=within_seconds)
        for slot in list(self._unsaid):
            self._say(slot, "")

    def _say(self, slot: str, link: str) -> None:
        if said := self._unsaid.pop(slot, None):
            said(link)

    def _work(self, make: Callable[[RunFacts], Document]) -> Work:
        def work() -> None:
            if (facts := self._facts()) is not None:
                self._publish(make(facts))

        return work

    def _show_report(self) -> None:
        if (facts := self._facts()) is None:
            return
        link = self._publish(runpages.make_report(facts))
        if link and not self._has_report:
            self._log.info("The report of this run, as far as it is: %s", link)
        self._has_report = True
        if link and self._job is not None:
            pointer = runpages.make_pointer(facts, link=link, flow_run_id=self._job.flow_run_id)
            self._publisher.publish(pointer)
        self._name_slow(facts)

    def _name_slow(self, facts: RunFacts) -> None:
        slow = find_slow_ranks(facts.ranks)
        for rank in slow:
            if rank.rank not in self._slow:
                text = "Rank %s on node %s is slow: %s; the report has all ranks."
                self._log.warning(text, rank.rank, rank.node, describe_slowness(rank))
        self._slow |= {rank.rank for rank in slow}

    def _publish(self, document: Document) -> str:
        """Publish a page and return where it is."""
        artifact_id = self._publisher.publish(document)
        if self._ui is None:
            self._ui = self._find_ui()
        return render_link(self._ui, artifact_id)


def _find_ui() -> str:
    url = get_current_settings().ui_url or ""
    try:
        return fetch_base(url)
    except (httpx.HTTPError, httpx.InvalidURL):  # only browsers of people reach it
        return url.rstrip("/")


def _name_outage(error: BaseException) -> str:
    outage = describe_outage(error)
    return f"the API does not answer ({outage})" if outage else ""
