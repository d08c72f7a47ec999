"""The leader of a gang of pods: what it knows of earlier incarnations, and how all of them leave.

A JobSet starts the gang again after a failure, and Kueue after a preemption; both start the same command.
What an incarnation leaves in the run folder tells the next one which of the two it is.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from prefect.client.schemas.objects import State

from prefect_torch_elastic.attempts import Action, decide_attempt
from prefect_torch_elastic.calls import Meeting
from prefect_torch_elastic.channel import ChannelClosed
from prefect_torch_elastic.dispatch.documents import parse_document, sign_document
from prefect_torch_elastic.errors import ObjectMissing, TransferError
from prefect_torch_elastic.evidence import Category, Diagnosis
from prefect_torch_elastic.hosting.asking import rest
from prefect_torch_elastic.hosting.leaving import hold, write_last_words
from prefect_torch_elastic.hosting.ownrun import OwnRun
from prefect_torch_elastic.hosting.persistence import persist
from prefect_torch_elastic.hosting.reports import Report, report_stop
from prefect_torch_elastic.hosting.stops import StopCause
from prefect_torch_elastic.jsonfields import Check, check_fields, check_text, check_whole_number
from prefect_torch_elastic.local import Launcher
from prefect_torch_elastic.outcomes import CallRecord
from prefect_torch_elastic.pod import ExitCode, LastWords, Pod, Why
from prefect_torch_elastic.ranks import render_endpoint
from prefect_torch_elastic.spec import Spec
from prefect_torch_elastic.wire import Dismiss

FIRST_REST_SECONDS, LONGEST_REST_SECONDS = 5.0, 60.0
_ENDLESS = 10**9  # the JobSet counts attempts, and ends the gang when they are spent
_GONE = (Category.NODE_LOST, Category.PEER_LOST)


@dataclass(frozen=True, kw_only=True)
class Incarnation:
    """What one incarnation of a gang says of itself when it begins.

    Attributes:
        attempt: The JobSet's count of restarts.
        preemptions: How often the gang came back within an attempt: its quota was taken and given again.
        newest: The newest checkpoint at its begin, as `step/uuid`; empty without one.
        fruitless: How many attempts in a row before this one have left no checkpoint.
    """

    attempt: int
    preemptions: int = 0
    newest: str = ""
    fruitless: int = 0

    @property
    def rest_seconds(self) -> float:
        """How long to wait before the ranks start: JobSets start again at once, for ever failing."""
        if not self.fruitless:
            return 0.0
        return min(FIRST_REST_SECONDS * 2 ** (self.fruitless - 1), LONGEST_REST_SECONDS)


def follow_up(before: Incarnation | None, *, attempt: int, newest: str) -> Incarnation:
    """Return the incarnation that comes after another one, None if it is the first."""
    if before is None:
        return Incarnation(attempt=attempt, newest=newest)
    if before.attempt == attempt:
        return Incarnation(attempt=attempt, preemptions=before.preemptions + 1, newest=newest, fruitless=0)
    fruitless = before.fruitless + 1 if newest == before.newest else 0
    return Incarnation(attempt=attempt, preemptions=before.preemptions, newest=newest, fruitless=fruitless)


class Leader:
    """This pod as the leader of its gang.

    Args:
        pod: Its place.
        own: Its flow run.

    Attributes:
        comes_back: Whether a pod that is taken away goes on when it is started again. A gang does; a plain
            function may have done half of its work, so its end is reported.
    """

    def __init__(self, pod: Pod, own: OwnRun) -> None:
        self._pod, self._own = pod, own
        self.comes_back = True
        self._launcher: Launcher | None = None

    def begin(self, record: CallRecord) -> Meeting:
        """Take note of this incarnation, rest if those before came to nothing, and say where nodes meet."""
        now = self._take_note(record)
        if seconds := now.rest_seconds:
            self._own.logger.warning(
                "%s in a row have made no progress; the next one begins in %.0f s.",
                "The last attempt" if now.fruitless == 1 else f"The last {now.fruitless} attempts",
                seconds,
            )
            rest(seconds, self._own.stop_requested)
        return Meeting(
            endpoint=render_endpoint(self._pod.address, self._pod.leader_port),
            gang=self._pod.gang,
            attempt=self._pod.attempt + 1,
            preemptions=now.preemptions,
            keep=self._keep,
        )

    def has_begun(self, record: CallRecord) -> bool:
        """Take note that a plain function begins; return whether a pod before this one has done so."""
        log, stopped = self._own.logger, self._own.stop_requested
        if persist(lambda: self._read_note(record), log=log, give_up=stopped) is not None:
            return True
        self._write_note(record, Incarnation(attempt=self._pod.attempt))
        return False

    def _take_note(self, record: CallRecord) -> Incarnation:
        log, stopped = self._own.logger, self._own.stop_requested

        def read() -> Incarnation:
            commits = record.log.refresh().commits
            newest = f"{commits[0].step}/{commits[0].uuid}" if commits else ""
            return follow_up(self._read_note(record), attempt=self._pod.attempt, newest=newest)

        # Apart: a note whose answer got lost is written again, and must not count as another incarnation.
        now = persist(read, log=log, give_up=stopped)
        self._write_note(record, now)
        return now

    def _name_note(self, record: CallRecord) -> str:
        return f"{record.folder}/calls/{record.call}/begun-{self._own.id}"

    def _write_note(self, record: CallRecord, now: Incarnation) -> None:
        key, note = self._name_note(record), sign_document(asdict(now), key=record.key)
        log, stopped = self._own.logger, self._own.stop_requested
        persist(lambda: record.store.put(key, note), log=log, give_up=stopped)

    def _read_note(self, record: CallRecord) -> Incarnation | None:
        """Return the incarnation before; what is not understood costs no more than a count."""
        key = self._name_note(record)
        try:
            body = parse_document(record.store.get(key), key, key=record.key)
            return Incarnation(**check_fields("incarnation", body, _FIELDS))
        except ObjectMissing:
            return None
        except (TransferError, ValueError) as error:
            self._own.logger.warning("What the gang was before is not known: %s", error)
            return None

    def _keep(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def starts_again(self, diagnosis: Diagnosis, spec: Spec) -> bool:
        """Whether a failure is for the JobSet to judge, which forms the gang again as its budget says.

        It knows what no pod does: whether one that is gone was taken away, which spends nothing.
        """
        decision = decide_attempt(diagnosis, attempt=1, max_attempts=_ENDLESS, elsewhere=True)
        may_be_free = spec.max_attempts > 1 or self.is_victim(diagnosis)
        return may_be_free and decision.action is Action.NEW_ATTEMPT

    def is_victim(self, diagnosis: Diagnosis) -> bool:
        """Whether the cause of a failure is another pod that went away: it has to be seen to fail first.

        Where every pod is still there, or one never came, nobody would end the others: they leave at once.
        """
        return diagnosis.category in _GONE and not diagnosis.pods_remain and self._pod.nnodes > 1

    def report_stop(self) -> Report:
        """Return what a pod says that has to stop.

        One that was taken away reports nothing: it comes back, or somebody else says why not.
        """
        own = self._own
        stopped = Report(ending=None, state=None, exit_code=ExitCode.STOPPED, why=Why.STOPPED)
        if own.stop is None:  # another pod of the gang has to go
            return replace(stopped, message="Another pod of the gang has to go.", is_victim=True)
        report = report_stop(own)  # it asks the API who sent a signal
        if own.stop.cause is StopCause.SIGNAL and self.comes_back:
            return replace(stopped, message="Asked to end.")
        return replace(report, why=Why.STOPPED, message=f"Stopped: {own.stop_reason}.")

    def must_leave(self) -> bool:
        """Whether nothing more can be waited for: this pod is killed soon after its grace."""
        told = self._own.signalled_at
        return told is not None and time.monotonic() - told >= self._pod.grace_seconds

    def turn_back(self) -> int:
        """Return the exit code of a pod whose run is over already, or may not begin: all pods end then.

        The other pods wait for their leader, unless the call has its value: those leave with 0, as this one.
        """
        state = self._own.run.state if self._own.run else None
        is_done = state is not None and state.is_completed()
        code, why = (ExitCode.DONE, Why.DONE) if is_done else (ExitCode.FAILED, Why.REFUSED)
        words = LastWords(exit_code=code, why=why, message=_render_over(state), node=self._pod.node)
        write_last_words(self._pod, words)
        return int(code)

    def leave(self, report: Report) -> int:
        """Let all pods leave as the report says, and return this one's exit code.

        The outcome is in the store and the API knows it; what a pod says by its exit code comes last.
        """
        own, pod = self._own, self._pod
        code = report.exit_code
        if own.signalled_at is not None:
            code = ExitCode.STOPPED
        if report.is_victim or code is ExitCode.STOPPED:  # the others wait for their own signal, as we do
            self._close()
            if hold(pod, lambda: own.signalled_at is not None):
                code = ExitCode.STOPPED
            elif code is ExitCode.STOPPED:  # nobody takes this pod away, so it says that it ends on its own
                code = ExitCode.LOST
        else:
            self._dismiss(code)
            self._close()
        write_last_words(pod, _render_words(report, code, pod.node))
        return int(code)

    def _dismiss(self, code: ExitCode) -> None:
        if self._launcher is not None:
            with suppress(ChannelClosed):  # it is dead: the others have noticed
                self._launcher.channel.send(Dismiss(exit_code=int(code)))

    def _close(self) -> None:
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            launcher.close()


def _render_over(state: State[Any] | None) -> str:
    if state is None:
        return "The run was deleted in Prefect. Run its flow again if the work is still wanted."
    if state.is_completed():
        return f"The run is `{state.name}` already."
    if state.is_final():
        return f"The run is `{state.name}` already. Run its flow again if the work is still wanted."
    return (
        f"The run is `{state.name}`, and the Prefect API does not let it start. The log of node 0 has the "
        "API's reasons; see what limits or pauses this run, and run its flow again."
    )


def _render_words(report: Report, code: ExitCode, node: int) -> LastWords:
    diagnosis, state = report.diagnosis, report.state
    why = Why.STOPPED if code is ExitCode.STOPPED else report.why
    if report.is_victim and (diagnosis or code is not ExitCode.STOPPED):
        why = Why.LOST_NODE
    said = diagnosis.summary if diagnosis else report.message or (state.message if state else None)
    return LastWords(
        exit_code=int(code),
        why=why,
        message=said or report.why,
        node=node,
        rank=diagnosis.rank if diagnosis else None,
        category=str(diagnosis.category) if diagnosis else None,
        step=diagnosis.step if diagnosis else None,
    )


_FIELDS: dict[str, Check] = {
    "attempt": check_whole_number,
    "preemptions": check_whole_number,
    "newest": check_text,
    "fruitless": check_whole_number,
}
