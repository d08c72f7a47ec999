"""What is known about a failed gang, as plain data: each rank's evidence, and the verdict on all of it.

Pure. `Category` is a contract for automations; see `docs/failures.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Category(StrEnum):
    """The kinds of failure, stable names."""

    USER_ERROR = "UserError"
    NON_RETRYABLE = "NonRetryable"
    DEVICE_OUT_OF_MEMORY = "DeviceOutOfMemory"
    HOST_OUT_OF_MEMORY = "HostOutOfMemory"
    KILLED = "Killed"
    SHARED_MEMORY = "SharedMemory"
    CRASHED = "Crashed"
    EXITED_EARLY = "ExitedEarly"
    STOPPED_RESPONDING = "StoppedResponding"
    HANG = "Hang"
    COLLECTIVES_APART = "CollectivesApart"
    STUCK_SAVE = "StuckSave"
    COLLECTIVE_TIMEOUT = "CollectiveTimeout"
    PEER_LOST = "PeerLost"
    RESULT_NOT_SENDABLE = "ResultNotSendable"
    CALL_NOT_LOADABLE = "CallNotLoadable"
    SETUP_FAILED = "SetupFailed"
    NODE_LOST = "NodeLost"
    LAUNCHER_LOST = "LauncherLost"
    TIMED_OUT = "TimedOut"


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """What one node saw of one rank of a failed gang.

    Attributes:
        failed_at: Monotonic seconds of the node at which the rank raised or ended; None if it did neither.
        returned_at: When its function returned; None if it did not.
        exit_code: None while it ran, or when a signal ended it.
        told_to_stop: It ended only after the agent had asked it to.
        stage: How far it came: `start`, `load`, `run`, `result`.
        reason: The agent's own words for what it saw, such as `was stopped (SIGSTOP) for 8 s`.
        oom_killed: The kernel's counter rose while it died; None where there is no counter.
        memory_limit_bytes: The limit of its control group; None without one.
        traceback: Text of the exception, the user's frames last.
        non_retryable: The exception says that running again cannot help.
        last_lines: The end of its log.
    """

    rank: int
    local_rank: int
    node_rank: int
    pid: int = 0
    failed_at: float | None = None
    returned_at: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    told_to_stop: bool = False
    stage: str = "run"
    reason: str = ""
    exc_type: str | None = None
    exc_message: str = ""
    traceback: str = ""
    non_retryable: bool = False
    oom_killed: bool | None = None
    memory_limit_bytes: int | None = None
    step: int | None = None
    log: str = ""
    stacks: str = ""
    error: str = ""
    last_lines: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The verdict on one failure; `render_failure` turns it into text."""

    category: Category
    summary: str
    cure: str
    rank: int | None = None
    local_rank: int | None = None
    node_rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    exc_type: str | None = None
    exc_message: str = ""
    traceback: str = ""
    step: int | None = None
    victims: list[int] = field(default_factory=list[int])
    log: str = ""
    error: str = ""
    last_lines: list[str] = field(default_factory=list[str])
    non_retryable: bool = False
    pods_remain: bool = False  # of a lost node: no pod went away, so none is waited for


def parse_diagnosis(fields: Mapping[str, Any]) -> Diagnosis:
    """Return the diagnosis whose fields travelled as JSON."""
    values: dict[str, Any] = {**fields, "category": Category(fields["category"])}
    return Diagnosis(**values)
