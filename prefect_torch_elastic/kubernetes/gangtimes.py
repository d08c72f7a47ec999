"""How long a gang has waited, started and run: clocks that stand still in other phases (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect_torch_elastic.kubernetes.phases import GangPhase

if TYPE_CHECKING:
    from prefect_torch_elastic.kubernetes.status import GangReading


class GangTimes:
    """Adds up the times between the phases of a gang.

    Attributes:
        waiting_seconds: Without quota.
        starting_seconds: With quota, and not all pods running.
        running_seconds: With all pods running.
    """

    def __init__(self, now: float) -> None:
        self.waiting_seconds = self.starting_seconds = self.running_seconds = 0.0
        self._phase: GangPhase | None = GangPhase.CREATED
        self._since = now

    def see(self, now: float, phase: GangPhase | None) -> None:
        """Take in the phase that begins now, or goes on; None is the end."""
        elapsed, before = now - self._since, self._phase
        if before is None or before.is_final:
            pass
        elif before.waits:
            self.waiting_seconds += elapsed
        elif before is GangPhase.RUNNING:
            self.running_seconds += elapsed
        else:
            self.starting_seconds += elapsed
        self._phase, self._since = phase, now

    def render(self, status: GangReading | None) -> str:
        """Return the sentence for the end of the log."""
        said = (
            f"The gang waited {render_seconds(self.waiting_seconds)} for its quota, took "
            f"{render_seconds(self.starting_seconds)} to start and stop, and ran "
            f"{render_seconds(self.running_seconds)}."
        )
        if status is None:
            return said
        counts = ((status.preemptions, "preemption"), (status.restarts, "new attempt"))
        many = [f"{count} {word}{'s' if count > 1 else ''}" for count, word in counts if count]
        return f"{said} It had {' and '.join(many)}." if many else said


def render_seconds(seconds: float) -> str:
    """Return `40 s`, `5 min 3 s` or `2 h 10 min`."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes_left} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
