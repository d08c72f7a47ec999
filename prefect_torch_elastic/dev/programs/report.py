"""How a program of the stack tells the supervisor what it has become: one JSON line in an inherited pipe."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from enum import StrEnum

from prefect_torch_elastic.node.processes import die_with_parent


class Event(StrEnum):
    """What may happen to a part."""

    STARTED = "started"
    READY = "ready"


@dataclass(frozen=True, kw_only=True)
class Report:
    """One event of one part, from the process that is the part."""

    part: str
    event: Event
    pid: int

    def send(self, pipe: int) -> None:
        """Write the line; shorter than PIPE_BUF, so that lines of several writers do not mix."""
        os.write(pipe, json.dumps(asdict(self)).encode() + b"\n")


def parse_reports(data: bytes) -> tuple[list[Report], bytes]:
    """Return the whole lines as reports, and the rest."""
    *lines, rest = data.split(b"\n")
    found = map(json.loads, lines)
    return [Report(part=item["part"], event=Event(item["event"]), pid=item["pid"]) for item in found], rest


def bind_to_supervisor(pid: int) -> None:
    """Die when the supervisor dies, and at once if it has died already."""
    die_with_parent()
    if os.getppid() != pid:
        sys.exit("the supervisor of this stack has gone")
