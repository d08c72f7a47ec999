"""Stopping a child run: it is asked, it gets its grace, and then it is called Cancelled."""

from __future__ import annotations

from enum import StrEnum
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Cancelled, Cancelling

from prefect_torch_elastic.dispatch.polling import Caller, Means, Poll, describe_outage

STOP_LABEL = "torch-elastic.stop"
"""Label of a child run that asks its host to stop; the value says why.

Not the state Cancelling: a process worker answers that with SIGTERM and, 30 s later, SIGKILL, whatever grace
the gang was given.
"""

TICK_SECONDS = 0.1
LOOK_SECONDS = 0.5
MARGIN_SECONDS = 15.0  # the host looks every 2 s, kills what is left 8 s after the grace, and reports
SAY_AWAY_SECONDS = 5.0
AWAY_SECONDS = 30.0  # a server that restarts is back by then; whoever presses Ctrl-C waits for it
LAST_WORD_SECONDS = 5.0


class StopEnd(StrEnum):
    """How far a stop came."""

    OVER = "over"  # the run has ended
    ASKED = "asked"  # it was told, and ends by itself
    UNHEARD = "unheard"  # the API took nothing: the run goes on, or starts some time


def stop_child(
    child_id: UUID,
    *,
    reason: str,
    grace_seconds: float,
    log: Any,
    leave_after_seconds: float | None = None,
    means: Means = Means(),  # noqa: B008  (frozen)
) -> StopEnd:
    """Stop a child run; an API that is away, or refuses, is said, not raised and not hung on.

    A child that never ran is Cancelled at once. One that runs is asked, by a label that its host looks at,
    and waited for; after its grace it is called Cancelled all the same. Ctrl-C ends the wait, not the stop.

    Args:
        child_id: The child flow run.
        reason: Why, for the state's message.
        grace_seconds: What the child gives its processes between SIGTERM and SIGKILL.
        log: The task run's logger.
        leave_after_seconds: Wait no longer than this, because this process will be killed; the child has been
            asked, and ends by itself.
        means: Clock and callers.
    """
    assert reason
    caller = means.make_api_caller()
    log.info("The child run is asked to stop: %s", reason)
    stop = _Stop(child_id, reason, log=log, means=means, caller=caller)
    try:
        return stop.wait(grace_seconds, leave_after_seconds=leave_after_seconds)
    except KeyboardInterrupt:
        asked = "It was asked to stop" if stop.is_asked else "Nobody could ask it to stop"
        log.warning("Interrupted: the end of the child run is not waited for. %s. %s", asked, stop.cure)
        return stop.end
    finally:
        caller.close()


class _Stop:
    """One stop: asks until the API has heard it, then looks until the run is over."""

    def __init__(
        self,
        child_id: UUID,
        reason: str,
        *,
        log: Any,
        means: Means,
        caller: Caller[SyncPrefectClient],
    ) -> None:
        self._child_id, self._reason = child_id, reason
        self._log, self._clock, self._sleep, self._caller = log, means.clock, means.sleep, caller
        self.is_asked = False
        self.cure = f"If it still runs: `prefect flow-run cancel {child_id}`."

    @property
    def end(self) -> StopEnd:
        """How far it came, of a run that is not over."""
        return StopEnd.ASKED if self.is_asked else StopEnd.UNHEARD

    def wait(self, grace_seconds: float, *, leave_after_seconds: float | None) -> StopEnd:
        """Return how far it came; after its grace the run is called Cancelled."""
        steps = Poll(lambda: self._caller.ask(self._step))
        began = heard = self._clock()
        outage, said = "it has said nothing yet", False
        while (now := self._clock()) - began < grace_seconds + MARGIN_SECONDS:
            if answer := steps.look(now):
                steps.rest(now + LOOK_SECONDS)
                error = answer.exception()
                if error is not None and not (outage := describe_outage(error)):
                    return self._give_up(_say(error))  # whoever is ended by a timeout raises that
                if error is not None:
                    pass
                elif answer.result():
                    self._log.info("The child run is over, %.0f s after it was asked to stop.", now - began)
                    return StopEnd.OVER
                else:
                    heard, said = now, False
            if not said and now - heard >= SAY_AWAY_SECONDS:
                said = True
                self._log.warning("The Prefect API does not answer (%s): it is asked again.", outage)
            if now - heard >= AWAY_SECONDS:
                return self._give_up(f"the Prefect API does not answer ({outage})")
            if leave_after_seconds is not None and now - began >= leave_after_seconds and self.is_asked:
                self._log.info(
                    "The child run ends within its %g s of grace: this process ends before.", grace_seconds
                )
                return self.end
            self._sleep(TICK_SECONDS)
        return self._call_it_cancelled(grace_seconds)

    def _give_up(self, why: str) -> StopEnd:
        self._log.warning("The child run is not stopped: %s. %s", why, self.cure)
        return self.end

    def _step(self, client: SyncPrefectClient) -> bool:
        """Ask the run to stop, once; return whether it is over. Runs in the caller's thread."""
        try:
            run = client.read_flow_run(self._child_id)
            if not self.is_asked and not (run.state and run.state.is_final()):
                client.update_flow_run_labels(self._child_id, {STOP_LABEL: self._reason})
                if run.run_count == 0:
                    client.set_flow_run_state(self._child_id, Cancelling(message=self._reason))
                    run = client.read_flow_run(self._child_id)
            self.is_asked = True
            state = run.state
            if state is None:
                return True
            # The server makes Cancelled of Cancelling if no worker has taken the run, and drops the message.
            no_reason = state.is_cancelled() and not state.message
            if run.run_count == 0 and (state.is_cancelling() or no_reason):
                # Nothing ran, and a run that is Cancelling cannot begin: nobody else would end it.
                client.set_flow_run_state(self._child_id, Cancelled(message=self._reason))
                return False
            return state.is_final()
        except ObjectNotFound:
            return True
        except PrefectHTTPStatusError as error:  # labels have no ObjectNotFound: deleted since the look
            if error.response.status_code == 404:
                return True
            raise

    def _call_it_cancelled(self, grace_seconds: float) -> StopEnd:
        """End a run whose host does not: it is gone, or it cannot end its processes."""
        state = Cancelled(message=f"{self._reason} It did not end within {grace_seconds:g} s.")
        answer = self._caller.ask(lambda client: client.set_flow_run_state(self._child_id, state, force=True))
        until = self._clock() + LAST_WORD_SECONDS
        while not answer.done() and self._clock() < until:
            self._sleep(TICK_SECONDS)
        error = answer.exception() if answer.done() else TimeoutError("no answer")
        is_told = error is None or isinstance(error, ObjectNotFound)
        self.is_asked = self.is_asked or is_told  # its host looks at the state too
        called = "is called Cancelled now" if is_told else f"could not be called Cancelled ({_say(error)})"
        self._log.warning(
            "The child run has not ended within its %g s of grace and %g s more, and %s. "
            "Its processes may still run: look at the machine of its worker.",
            *(grace_seconds, MARGIN_SECONDS, called),
        )
        return self.end


def _say(error: BaseException | None) -> str:
    return "" if error is None else describe_outage(error) or f"{type(error).__name__}: {error}"
