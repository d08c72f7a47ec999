"""From the moments of the dispatch benchmark's rounds to the seconds that each part of a call takes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

POLL, BACK, FIRST_LINE = "worker poll", "back", "first line"
# What ends with the birth of a process, from the rank upwards; a launcher is born while its host begins.
OURS = ("ranks", "arrival", "", "process start")
PEER = ("ranks", "arrival", "process start")
_LAUNCHER = 2


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Where the time of one call went.

    Attributes:
        seconds: By part, one after the other: `send` until the child run exists; `worker poll` until the
            worker takes it; `process start`; `begin` until the run is Running; `arrival` of the order in the
            agent that forks the ranks, or torchrun's birth; `ranks` until the last one is born; `first line`
            of the user in that one; `back` until the driver has the value.
        launcher: For how long our launcher imported torch and waited for its gang, next to all that.
    """

    seconds: Mapping[str, float]
    launcher: float | None

    @property
    def until_first_line(self) -> float:
        """From the call to the last rank's first line."""
        return sum(self.seconds.values()) - self.seconds[BACK]

    @property
    def without_poll(self) -> float:
        """The same without the wait for the worker's next poll, which is a matter of luck."""
        return self.until_first_line - self.seconds[POLL]


def split_round(moments: Mapping[str, Any], births: Sequence[str]) -> Parts:
    """Return the parts of one call.

    Args:
        moments: What `dispatch_flow` wrote.
        births: `OURS` or `PEER`.
    """
    states, ranks = moments["states"], moments["ranks"]
    marks = {
        "send": moments["created"],
        POLL: next(at for kind, at in states if kind == "PENDING"),
        "begin": next(at for kind, at in states if kind == "RUNNING"),
        FIRST_LINE: max(rank["at"] for rank in ranks),
        BACK: moments["back"],
    }
    born = [max(ages) for ages in zip(*(rank["born"] for rank in ranks), strict=True)]
    marks |= {part: at for part, at in zip(births, born, strict=False) if part}
    ordered = sorted(marks.items(), key=lambda mark: mark[1])
    steps = pairwise([("", moments["called"]), *ordered])
    return Parts(
        seconds={name: after - before for (_, before), (name, after) in steps},
        launcher=born[1] - born[_LAUNCHER] if births is OURS else None,
    )


def even_out(rounds: Iterable[Parts], poll: float) -> list[float]:
    """Return the seconds until the first line as if each call had waited `poll` for the worker's poll."""
    return [one.without_poll + poll for one in rounds]


def render_medians(rounds: Sequence[Parts]) -> dict[str, float]:
    """Return the median of each part."""
    medians = {name: statistics.median(one.seconds[name] for one in rounds) for name in rounds[0].seconds}
    if launchers := [one.launcher for one in rounds if one.launcher is not None]:
        medians["(launcher)"] = statistics.median(launchers)
    return {name: round(seconds, 3) for name, seconds in medians.items()}
