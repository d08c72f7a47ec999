"""How a gang and what belongs to it are named in a cluster: objects, labels, annotations, variables (pure).

JobSet derives the names of Jobs, pods and hosts from the name of the gang; the longest of them must be a DNS
label. The JobSet that cannot keep that is refused, or, worse, accepted with pods that nobody can create.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable

from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.pod import (
    ATTEMPT_VARIABLE,
    CONTRACT_VARIABLE,
    GANG_VARIABLE,
    GRACE_VARIABLE,
    INDEX_VARIABLE,
    LEADER_VARIABLE,
    NNODES_VARIABLE,
    NODE_NAME_VARIABLE,
    POD_IP_VARIABLE,
    POD_UID_VARIABLE,
    POD_VARIABLE,
    TERMINATION_LOG_VARIABLE,
)
from prefect_torch_elastic.spec_checks import refusal

MANAGER = "prefect-torch-elastic"
ROLE = "node"  # of the one replicatedJob; it is a part of every pod's name
CONTAINER = "trainer"
RENDEZVOUS_PORT = 29400
TERMINATION_LOG = "/dev/termination-log"

# Labels of all that is created for a gang.
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
POOL_LABEL = f"{MANAGER}.io/pool"
FLOW_RUN_LABEL = f"{MANAGER}.io/flow-run"
# Of pods only: Prefect's own observer calls a run crashed when a *Job* with this label fails, also when the
# gang goes on with its next attempt.
PREFECT_FLOW_RUN_LABEL = "prefect.io/flow-run-id"
# Annotations of the JobSet.
KEPT_ANNOTATION = "prefect-torch-elastic.io/kept"  # by the user's `ttl_seconds_after_finished`
WORKER_ANNOTATION = f"{MANAGER}.io/worker"
FLOW_RUN_NAME_ANNOTATION = f"{MANAGER}.io/flow-run-name"

# Labels and annotations that Kueue and JobSet define.
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
WORKLOAD_OF_LABEL = "kueue.x-k8s.io/job-uid"
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
ATTEMPT_LABEL = "jobset.sigs.k8s.io/restart-attempt"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
TOPOLOGY_ANNOTATIONS = {
    "required": "kueue.x-k8s.io/podset-required-topology",
    "preferred": "kueue.x-k8s.io/podset-preferred-topology",
    "unconstrained": "kueue.x-k8s.io/podset-unconstrained-topology",
}

SHARED_STORE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
OWN_VARIABLES = frozenset(
    {NNODES_VARIABLE, LEADER_VARIABLE, GANG_VARIABLE, GRACE_VARIABLE, ATTEMPT_VARIABLE, INDEX_VARIABLE}
    | {POD_VARIABLE, POD_UID_VARIABLE, POD_IP_VARIABLE, NODE_NAME_VARIABLE}
    | {TERMINATION_LOG_VARIABLE, SHARED_STORE_VARIABLE, CONTRACT_VARIABLE}
)

OWN_LABELS = frozenset({MANAGED_BY_LABEL, POOL_LABEL, FLOW_RUN_LABEL, PREFECT_FLOW_RUN_LABEL})

LONGEST_NAME = 40
_LONGEST_DNS_LABEL = 63
_DIGEST_LENGTH = 8
_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?", re.ASCII)
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)


def name_jobset(title: str, *, flow_run_id: str, nnodes: int) -> str:
    """Return the name of a run's gang: what can be kept of its title, and a digest of the run.

    The same run has the same name again, so that a worker finds what it created before it died.

    Args:
        title: Any text, such as the name of the flow run.
        flow_run_id: The run.
        nnodes: How many pods there are: the last one has the longest name.
    """
    ascii_title = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    slug = re.sub(r"[^a-z0-9]+", "-", ascii_title.lower()).strip("-")
    if not slug[:1].isalpha():
        slug = f"gang-{slug}"
    # A digest, not a piece of the id: the head of a time-ordered UUID is the same for a whole minute.
    digest = hashlib.sha256(flow_run_id.encode()).hexdigest()[:_DIGEST_LENGTH]
    longest = min(LONGEST_NAME, longest_name(nnodes)) - len(digest) - 1
    return f"{slug[:longest].strip('-')}-{digest}"


def longest_name(nnodes: int) -> int:
    """Return how long the name of a gang may be before a pod's `NAME-node-0-INDEX-xxxxx` is no DNS label.

    Source: https://github.com/kubernetes-sigs/jobset/blob/v0.12.0/pkg/webhooks/jobset_webhook.go
    """
    return _LONGEST_DNS_LABEL - len(f"-{ROLE}-0-{nnodes - 1}-xxxxx")


def check_name(name: str, *, nnodes: int) -> str:
    """Return the name of a gang if its pods can be created.

    Raises:
        SpecError: If they cannot.
    """
    longest = longest_name(nnodes)
    if not _DNS_LABEL.fullmatch(name) or len(name) > longest:
        accepted = f"at most {longest} small letters, digits and `-` for {nnodes} nodes, a letter first"
        raise refusal("name", name, accepted, why="it is the host name of pods")
    return name


def check_label_value(field: str, value: str) -> str:
    """Return the value of a label if Kubernetes accepts it.

    Raises:
        SpecError: If it does not.
    """
    if not _LABEL_VALUE.fullmatch(value):
        raise refusal(field, value, "at most 63 letters, digits, `-`, `_` and `.`")
    return value


def check_variables(field: str, names: Iterable[str]) -> None:
    """Refuse environment variables by which a pod learns what it is.

    Raises:
        SpecError: If one of `names` is such a variable.
    """
    if taken := sorted(OWN_VARIABLES.intersection(names)):
        raise SpecError(
            f"`{taken[0]}` cannot be set in `{field}`: the pods of a gang find each other by it. Remove it."
        )


def name_job(jobset: str) -> str:
    """Return the name of the gang's one Job."""
    return f"{jobset}-{ROLE}-0"


def name_host(jobset: str, node_rank: int) -> str:
    """Return where a pod is reached from its namespace; its record appears some seconds after its IP."""
    return f"{name_job(jobset)}-{node_rank}.{jobset}"


def name_leader(jobset: str) -> str:
    """Return `HOST:PORT` of the rendezvous."""
    return f"{name_host(jobset, 0)}:{RENDEZVOUS_PORT}"


def name_secret(jobset: str) -> str:
    """Return the name of the Secret with the credentials of the gang's pods."""
    return f"{jobset}-credentials"


def select_pool(pool_id: str) -> str:
    """Return the label selector of all that was created for a work pool."""
    return f"{MANAGED_BY_LABEL}={MANAGER},{POOL_LABEL}={pool_id}"


def select_pods(jobset: str) -> str:
    """Return the label selector of the pods of a gang."""
    return f"{JOBSET_LABEL}={jobset}"


def select_workload(jobset_uid: str) -> str:
    """Return the label selector of Kueue's Workload for a JobSet."""
    return f"{WORKLOAD_OF_LABEL}={jobset_uid}"
