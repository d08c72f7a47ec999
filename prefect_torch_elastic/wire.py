"""All that crosses between driver, launcher, agents and ranks: JSON messages on a socket pair, or on TCP.

Each message is one dataclass below with its name in `kind`; a reader gets the dataclass back. Objects of user
code never travel here: they are files (`parcel`), and messages carry their paths. Between machines there are
no paths and no secrets: what a node of another machine needs it fetches from the store.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, get_args

from prefect_torch_elastic.arrivals import Arrivals
from prefect_torch_elastic.observations import (
    CheckpointSaved,
    EvidenceTaken,
    LastCollective,
    NodeSample,
    RankSample,
    RankSnapshot,
)
from prefect_torch_elastic.rankstate import StopReason


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
        storage: Where the run folder is and what its checkpoints follow, with the store's credentials.
        node: Agent only: index of the simulated node.
        nproc: Agent only: processes on this node.
        devices: Agent only: GPU ids for `CUDA_VISIBLE_DEVICES`; None leaves the variable as it is.
        endpoint: Agent only: `host:port` of the store that the nodes meet at; empty for one node.
        restart_count: Agent only: restarts that the gang has spent; not 0 for an agent that replaces another.
        after_round: Agent only: the gang's newest round so far; a new agent's rounds come after it.
        meeting: Of a gang whose nodes are machines: `address:port` at which the leader waits for the others.
        gang: Of such a gang: the name of this incarnation; nodes of another one are turned away.
        address: Agent only: this machine's address, which its peers can reach; empty for this machine alone.
        preemptions: How often the run was preempted so far.
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
    storage: dict[str, Any] = field(default_factory=dict[str, Any])
    node: int = 0
    nproc: int = 1
    devices: list[str] | None = None
    endpoint: str = ""
    restart_count: int = 0
    after_round: int = 0
    meeting: str = ""
    gang: str = ""
    address: str = ""
    preemptions: int = 0


@dataclass(frozen=True, kw_only=True)
class JoinGang:
    """Launcher to the host of another machine: your node's part in the gang; fields as in `RunGang`.

    `folder` is the name of the attempt's folder, the same on all machines.
    """

    node: int
    attempt: int
    folder: str
    nproc: int
    endpoint: str
    restart_count: int
    preemptions: int


@dataclass(frozen=True, kw_only=True)
class Dismiss:
    """Downwards, to hosts of other machines: the outcome is kept; leave with this exit code."""

    exit_code: int


@dataclass(frozen=True, kw_only=True)
class StopGang:
    """Downwards: end the gang; a word on each rank's page, SIGTERM, and SIGKILL after `grace_seconds`."""

    reason: StopReason
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
class TakeEvidence:
    """Launcher to agents: let all ranks write down where they are; nothing is ended by that."""

    number: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class RoundEnded:
    """Launcher to driver: the ranks of a round are over; `diagnosis` has the fields of a `Diagnosis`."""

    round: int
    action: VerdictAction
    restarts: int
    diagnosis: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class IncidentSeen:
    """Launcher to driver: something went wrong; the fields of an `Incident`."""

    incident: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class NodeLeaves:
    """From the host of another machine: it was asked to end, so the whole gang has to stop and save."""

    node: int


@dataclass(frozen=True, kw_only=True)
class RankError:
    """From the host of another machine, before `RanksFailed`: the parcel with a rank's exception (base64)."""

    rank: int
    data: str


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
    | JoinGang
    | Dismiss
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
    | NodeLeaves
    | RankError
    | NodeSample
    | TakeEvidence
    | EvidenceTaken
    | CheckpointSaved
    | RoundEnded
    | IncidentSeen
    | Notice
    | GangEnded
)
Losable = LogLines | Progress | NodeSample | Notice
"""What is for people, or comes again: it is dropped while nobody reads."""

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
    if kind is NodeSample:
        fields["ranks"] = [_parse_sample(rank) for rank in fields["ranks"]]
    if kind is EvidenceTaken:
        fields["ranks"] = [_parse_snapshot(rank) for rank in fields["ranks"]]
    if kind is LogLines:
        fields["lines"] = [(level, text) for level, text in fields["lines"]]
    if kind is StopGang:
        fields["reason"] = StopReason(fields["reason"])
    if kind in (Verdict, RoundEnded):
        fields["action"] = VerdictAction(fields["action"])
    if kind is GangEnded:
        fields["status"] = GangStatus(fields["status"])
    return kind(**fields)


def _parse_sample(fields: dict[str, Any]) -> RankSample:
    arrivals = fields.pop("arrivals")
    return RankSample(**fields, arrivals=Arrivals(**arrivals) if arrivals else None)


def _parse_snapshot(fields: dict[str, Any]) -> RankSnapshot:
    collectives = [LastCollective(**collective) for collective in fields.pop("collectives")]
    return RankSnapshot(**fields, collectives=collectives)
