"""All that crosses between driver, launcher, agents and ranks of a machine: JSON messages on a socket pair.

Each message is one dataclass below with its name in `kind`; a reader gets the dataclass back. Objects of user
code never travel here: they are files (`parcel`), and messages carry their paths.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, get_args


class GangStatus(StrEnum):
    """How a gang ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    TIMED_OUT = "timed out"


class VerdictAction(StrEnum):
    """What a gang does after a round."""

    RESTART = "restart"
    FINISH = "finish"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class RunGang:
    """Driver to launcher, launcher to agent: form a gang and run this call in it.

    Attributes:
        run_key: Stable name of the run over restarts, attempts and retries.
        attempt: This gang's number in the run, from 1.
        folder: Folder of the attempt; logs, results and evidence of all nodes are written there.
        call: Path of the parcel with function and arguments.
        secret: HMAC key of the parcels, as hex.
        fields: The fields of the `Spec`.
        environment: Environment of the ranks, without what the agent adds.
        directory: Working directory of the ranks.
        search_path: `sys.path` of the flow, so that ranks import what the flow imports.
        modules: Modules that the call names, imported once per node instead of once per rank.
        flow_run_id: For `get_context()` and for logs; empty without a flow.
        task_run_id: The same for the task.
        node: Agent only: index of the simulated node.
        nproc: Agent only: processes on this node.
        devices: Agent only: GPU ids for `CUDA_VISIBLE_DEVICES`; None leaves the variable as it is.
        endpoint: Agent only: `host:port` of the store that the nodes meet at; empty for one node.
        restart_count: Agent only: restarts that the gang has spent; not 0 for an agent that replaces another.
        after_round: Agent only: the gang's newest round so far; a new agent's rounds come after it.
    """

    run_key: str
    attempt: int
    folder: str
    call: str
    secret: str
    fields: dict[str, Any]
    environment: dict[str, str]
    directory: str
    search_path: list[str]
    modules: list[str]
    flow_run_id: str = ""
    task_run_id: str = ""
    node: int = 0
    nproc: int = 1
    devices: list[str] | None = None
    endpoint: str = ""
    restart_count: int = 0
    after_round: int = 0


@dataclass(frozen=True, kw_only=True)
class StopGang:
    """Downwards: end the gang; SIGTERM, `grace_seconds`, SIGKILL."""

    reason: str
    grace_seconds: float


@dataclass(frozen=True, kw_only=True)
class Quit:
    """Downwards: no more gangs will come; leave."""


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Where one rank lives."""

    rank: int
    local_rank: int
    node_rank: int
    pid: int
    log: str


@dataclass(frozen=True, kw_only=True)
class RanksStarted:
    """Upwards: the ranks of a node run (again)."""

    node: int
    round: int
    world_size: int
    restart_count: int
    warm: bool
    ranks: list[RankInfo]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class LogLines:
    """Upwards: lines of one rank that belong into the task run's log: `(level, text)`."""

    rank: int
    lines: list[tuple[int, str]]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Upwards: what rank 0 reported last."""

    step: int
    total_steps: int | None
    metrics: dict[str, Any]
    phase: str


@dataclass(frozen=True, kw_only=True)
class RanksFailed:
    """Agent to launcher: ranks of this node failed and all are down; `ranks` are fields of `RankEvidence`."""

    node: int
    round: int
    ranks: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RanksReturned:
    """Agent to launcher: every rank of this node returned."""

    node: int
    round: int


@dataclass(frozen=True, kw_only=True)
class NodeRegroups:
    """Agent to launcher: this node ends its ranks and leaves the round, because other nodes came or went."""

    node: int
    round: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Launcher to agent: what the gang does next."""

    round: int
    action: VerdictAction
    restart_count: int


@dataclass(frozen=True, kw_only=True)
class NodeDone:
    """Agent to launcher: this node's part in the gang is over, no rank of it is left.

    `warm`: the agent can fork the next gang's ranks; `killed`: ranks that outstayed their grace.
    """

    node: int
    problem: str = ""
    killed: list[int] = field(default_factory=list[int])
    warm: bool = True


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Upwards: one state change in words, with a logging level."""

    level: int
    text: str


@dataclass(frozen=True, kw_only=True)
class GangEnded:
    """Launcher to driver: the gang is over and nothing of it is left.

    Attributes:
        status: How it ended; `stopped` is as ordered.
        result: Path of rank 0's parcel, when it succeeded.
        diagnosis: Fields of the `Diagnosis`, when it failed.
        error: Path of the parcel with the culprit's exception, empty when it could not travel.
        restarts: Restarts that were spent.
        killed: Ranks that did not leave within their grace and were killed.
    """

    status: GangStatus
    result: str = ""
    diagnosis: dict[str, Any] = field(default_factory=dict[str, Any])
    error: str = ""
    restarts: int = 0
    killed: list[int] = field(default_factory=list[int])


Message = (
    RunGang
    | StopGang
    | Quit
    | RanksStarted
    | LogLines
    | Progress
    | RanksFailed
    | RanksReturned
    | NodeRegroups
    | Verdict
    | NodeDone
    | Notice
    | GangEnded
)
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}


def encode_message(message: Message) -> bytes:
    """Return a message as JSON that `parse_message` reads."""
    return json.dumps({"kind": type(message).__name__, **dataclasses.asdict(message)}).encode()


def parse_message(body: bytes) -> Message:
    """Return the dataclass of one JSON body."""
    fields = json.loads(body)
    kind = _KINDS[fields.pop("kind")]
    if kind is RanksStarted:
        fields["ranks"] = [RankInfo(**rank) for rank in fields["ranks"]]
    if kind is LogLines:
        fields["lines"] = [(level, text) for level, text in fields["lines"]]
    if kind is Verdict:
        fields["action"] = VerdictAction(fields["action"])
    if kind is GangEnded:
        fields["status"] = GangStatus(fields["status"])
    return kind(**fields)
