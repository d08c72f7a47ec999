"""When to save, when to ask the others, and whether a last save still fits. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from prefect_torch_elastic.spec import CheckpointPolicy

DEFAULT_EVERY_SECONDS = 600.0
VOTE_SECONDS = 1.0  # how often the ranks agree on stops: what a stop may wait, besides the step
_MOST_STEPS = 50  # steps may become slower before the next vote
_MARGIN_SECONDS = 2.0  # to leave the loop, and for the agent to see it


def is_due_by_step(policy: CheckpointPolicy, *, step: int, last_step: int) -> bool:
    """Whether a save is due after `step` completed steps, the last one being at `last_step`."""
    if policy.every_steps is None or step <= last_step:
        return False
    return step // policy.every_steps > last_step // policy.every_steps


def is_due_by_time(policy: CheckpointPolicy, *, seconds: float) -> bool:
    """Whether a save is due `seconds` after the last one; without any rule, every ten minutes."""
    if policy.every_seconds is not None:
        return seconds >= policy.every_seconds
    return policy.every_steps is None and seconds >= DEFAULT_EVERY_SECONDS


def next_vote(step: int, *, steps_since: int, seconds_since: float) -> int:
    """Return the step of the next vote, a second from now as far as the last steps tell.

    A few quick steps do not decide about many: the distance doubles at most.
    """
    if steps_since < 1 or seconds_since <= 0.0:
        return step + 1
    return step + max(1, min(_MOST_STEPS, 2 * steps_since, int(VOTE_SECONDS * steps_since / seconds_since)))


@dataclass(kw_only=True)
class SaveClock:
    """How long saves take: a moving mean of whole saves, from the first byte to the commit."""

    seconds: float | None = None

    def add(self, seconds: float) -> None:
        self.seconds = seconds if self.seconds is None else 0.5 * self.seconds + 0.5 * seconds

    def fits(self, seconds_left: float) -> bool:
        """Whether another save can be expected to end in time; without a measurement it is tried."""
        return self.seconds is None or self.seconds + _MARGIN_SECONDS <= seconds_left
