"""What a gang's manifest and the program in its pods agree on: variables, exit codes, last words. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum, StrEnum

from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.ranks import parse_endpoint

CONTRACT_VARIABLE = "PREFECT_TORCH_ELASTIC_CONTRACT"
NNODES_VARIABLE = "PREFECT_TORCH_ELASTIC_NNODES"
LEADER_VARIABLE = "PREFECT_TORCH_ELASTIC_LEADER"
GANG_VARIABLE = "PREFECT_TORCH_ELASTIC_GANG"
GRACE_VARIABLE = "PREFECT_TORCH_ELASTIC_GRACE_SECONDS"
ATTEMPT_VARIABLE = "PREFECT_TORCH_ELASTIC_ATTEMPT"
POD_VARIABLE = "PREFECT_TORCH_ELASTIC_POD"
POD_UID_VARIABLE = "PREFECT_TORCH_ELASTIC_POD_UID"
POD_IP_VARIABLE = "PREFECT_TORCH_ELASTIC_POD_IP"
NODE_NAME_VARIABLE = "PREFECT_TORCH_ELASTIC_NODE_NAME"
TERMINATION_LOG_VARIABLE = "PREFECT_TORCH_ELASTIC_TERMINATION_LOG"
INDEX_VARIABLE = "JOB_COMPLETION_INDEX"  # set by the Job controller

CONTRACT = "1"  # a number that grows when a manifest or a program no longer fits one of before

MOST_MESSAGE_BYTES = 4096  # what a kubelet keeps of a termination message


class ExitCode(IntEnum):
    """How a pod of a gang leaves.

    The codes 64, 65 and 78 (EX_USAGE, EX_DATAERR, EX_CONFIG of sysexits.h) end the JobSet at once; any other
    that is not 0 costs an attempt, unless Kubernetes itself took the pod away.
    """

    DONE = 0
    LOST = 1
    USAGE = 64
    FAILED = 65
    CONFIGURATION = 78
    STOPPED = 143


class Why(StrEnum):
    """What a pod's last words call its end."""

    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"
    STOPPED = "stopped"
    DISMISSED = "dismissed"  # the gang is over, and its leader says why
    LOST_NODE = "lost-node"  # another pod went first
    LEADER_UNREACHABLE = "leader-unreachable"


FINAL_CODES = (ExitCode.USAGE, ExitCode.FAILED, ExitCode.CONFIGURATION)


@dataclass(frozen=True, kw_only=True)
class Pod:
    """The place of this pod in its gang.

    Attributes:
        node: From 0, which is the leader.
        nnodes: Pods of the gang.
        leader_host: Name of the leader; it may not resolve yet.
        leader_port: Where the leader waits.
        gang: Name of the gang in this attempt, the same in all of its pods, and after a preemption.
        attempt: How often the JobSet has started the gang again, from 0; a preemption does not count.
        name: Of the pod.
        address: Its IP.
        machine: Name of the cluster's node that it runs on.
        grace_seconds: From SIGTERM to SIGKILL for the ranks; the pod itself has more.
        termination_log: Path of the file for the last words, empty without one.
    """

    node: int
    nnodes: int
    leader_host: str
    leader_port: int
    gang: str
    attempt: int
    name: str
    address: str
    machine: str
    grace_seconds: float
    termination_log: str

    @property
    def is_leader(self) -> bool:
        return self.node == 0

    @property
    def hold_seconds(self) -> float:
        """How long a victim waits for its own SIGTERM, so that it does not speak before the culprit."""
        return self.grace_seconds + 10.0


@dataclass(frozen=True, kw_only=True)
class LastWords:
    """Why a pod left, for whoever reads the pod's status.

    Attributes:
        exit_code: Of the pod.
        why: In one word.
        message: For people.
        node: Of the gang.
        rank: The culprit, if there is one.
        category: Of the failure, see `evidence.Category`.
        step: The last one that was reported.
    """

    exit_code: int
    why: Why
    message: str
    node: int
    rank: int | None = None
    category: str | None = None
    step: int | None = None


def read_pod(environment: Mapping[str, str]) -> Pod | None:
    """Return the place in a gang that a pod's environment names, None outside of one.

    Raises:
        SpecError: If the variables contradict each other: nobody but our manifest sets them.
    """
    if NNODES_VARIABLE not in environment:
        return None
    _check_contract(environment.get(CONTRACT_VARIABLE, ""))
    try:
        host, port = parse_endpoint(environment[LEADER_VARIABLE])
        node, nnodes = int(environment[INDEX_VARIABLE]), int(environment[NNODES_VARIABLE])
        attempt = int(environment.get(ATTEMPT_VARIABLE) or 0)
        pod = Pod(
            node=node,
            nnodes=nnodes,
            leader_host=host,
            leader_port=port,
            gang=f"{environment[GANG_VARIABLE]}-{attempt}",
            attempt=attempt,
            name=environment.get(POD_VARIABLE, ""),
            address=environment[POD_IP_VARIABLE],
            machine=environment.get(NODE_NAME_VARIABLE, ""),
            grace_seconds=float(environment[GRACE_VARIABLE]),
            termination_log=environment.get(TERMINATION_LOG_VARIABLE, ""),
        )
    except (KeyError, ValueError) as error:
        raise SpecError(
            f"the environment of this pod names no place in a gang: {type(error).__name__} {error}. "
            "A worker of type `torch-elastic` sets these variables: see its manifest with "
            "`prefect-torch-elastic plan`."
        ) from error
    if not 0 <= node < nnodes:
        raise SpecError(
            f"`{INDEX_VARIABLE}={node}` is not in a gang of `{NNODES_VARIABLE}={nnodes}`. Its Job has "
            "another number of completions: see what else changes the JobSet (`kubectl get jobset -o yaml`), "
            "such as a webhook or a policy of the cluster."
        )
    return pod


def _check_contract(found: str) -> None:
    if found != CONTRACT:
        raise SpecError(
            f"the manifest of this pod has `{CONTRACT_VARIABLE}={found}`, and the program in it knows "
            f"`{CONTRACT}`: worker and image have different versions of prefect-torch-elastic. Install the "
            "worker's version in the image, or that of the image where the worker runs."
        )


def render_last_words(words: LastWords) -> str:
    """Return them as JSON that a kubelet keeps whole; a long message is cut."""
    fields = {name: value for name, value in asdict(words).items() if value is not None}
    text = json.dumps(fields)
    while len(text) > MOST_MESSAGE_BYTES:  # a character is one to six of them in JSON
        fields["message"] = fields["message"][: len(fields["message"]) * 9 // 10 - 1]
        text = json.dumps(fields)
    return text
