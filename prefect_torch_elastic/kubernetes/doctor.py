"""What a cluster must have before a gang can run in it, each found out without creating anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from prefect_torch_elastic.errors import ElasticError
from prefect_torch_elastic.kubernetes import naming
from prefect_torch_elastic.kubernetes.answers import INSTALL, ClusterError
from prefect_torch_elastic.kubernetes.client import Cluster, Kind
from prefect_torch_elastic.kubernetes.conditions import read_condition
from prefect_torch_elastic.kubernetes.manifest import render_job, render_jobset, render_pod
from prefect_torch_elastic.kubernetes.request import GangRequest
from prefect_torch_elastic.kubernetes.resources import JOBSET_GROUP, KINDS, KUEUE_GROUP
from prefect_torch_elastic.store import open_store, parse_directory, probe_store

_STORE_SECONDS = 20.0


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"  # gangs run, and something about them is not known or not said
    ERROR = "error"  # no gang runs


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: How bad it is.
        subject: What was looked at, in a word or two.
        text: What was found.
        cure: What helps; empty if nothing is wrong.
    """

    level: Level
    subject: str
    text: str
    cure: str = ""


@dataclass(frozen=True, kw_only=True)
class Right:
    """Verbs on one kind that a worker uses, and what is lost without them; empty: then no gang runs."""

    kind: Kind
    verbs: tuple[str, ...]
    lost: str = ""


# The Role in docs/kubernetes/rbac.yaml grants these, and a test compares the two.
RIGHTS = (
    Right(kind=Kind.JOBSET, verbs=("create", "get", "list", "watch", "patch", "delete")),
    Right(kind=Kind.JOB, verbs=("list", "watch")),
    Right(kind=Kind.POD, verbs=("list",)),
    Right(kind=Kind.SECRET, verbs=("create",)),
    Right(kind=Kind.WORKLOAD, verbs=("list", "watch"), lost="why a gang waits in its queue is not told"),
    Right(
        kind=Kind.LOCAL_QUEUE,
        verbs=("get", "list"),
        lost="a gang in a queue that does not exist waits, and the queues that do are not named",
    ),
    Right(kind=Kind.PRIORITY_CLASS, verbs=("get",), lost="`doctor` cannot find the priority class"),
)


def check_cluster(
    cluster: Cluster,
    *,
    namespace: str,
    queue: str | None = None,
    priority: str | None = None,
    request: GangRequest | None = None,
) -> list[Finding]:
    """Return what was found of everything that a gang needs, in the order in which it needs it.

    Args:
        cluster: Under the identity of the worker.
        namespace: Where gangs are to run.
        queue: Their LocalQueue; None if they need none.
        priority: Their WorkloadPriorityClass.
        request: A gang that is tried out; by default a small one.
    """
    try:
        user = cluster.whoami()
    except ClusterError as error:
        return [_fail("API", error)]
    found = [_well("API", f"it answers, and knows us as {user}")]
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("versions", lambda: _check_versions(cluster, needs_kueue=queue is not None)),
        ("rights", lambda: _check_rights(cluster, namespace, user, needs_kueue=queue is not None)),
    ]
    if queue is not None:
        checks.append(("queue", lambda: _check_queue(cluster, namespace, queue)))
    if priority is not None:
        checks.append(("priority", lambda: _check_priority(cluster, priority)))
    trial = request or _make_trial(namespace, queue, priority)
    checks.append(("manifest", lambda: _check_manifests(cluster, trial)))
    for subject, check in checks:
        try:
            found += check()
        except ElasticError as error:
            found.append(_fail(subject, error))
    return found


def check_store(url: str, *, credentials: dict[str, Any] | None = None) -> Finding:
    """Return whether the store can be used, as seen from here."""
    try:
        probe_store(open_store(url, credentials, retry_seconds=_STORE_SECONDS))
        if parse_directory(url) is None:
            return _well("store", f"`{url}` can be written and read from here")
    except ElasticError as error:
        return _fail("store", error)
    return Finding(
        level=Level.WARNING,
        subject="store",
        text=f"`{url}` is a directory, which works from here",
        cure="Pods need it at the same path: mount a shared volume with `volumes`, or use an object store.",
    )


def _check_versions(cluster: Cluster, *, needs_kueue: bool) -> Iterator[Finding]:
    served = cluster.versions()
    ours = KINDS[Kind.JOBSET].version
    if ours in served[JOBSET_GROUP]:
        yield _well("JobSet", f"`{JOBSET_GROUP}/{ours}` is served")
    else:
        text = "JobSet is not installed in this cluster"
        if served[JOBSET_GROUP]:
            text = f"JobSet serves {', '.join(served[JOBSET_GROUP])}, and not `{ours}`"
        yield Finding(level=Level.ERROR, subject="JobSet", text=text, cure=INSTALL["JobSet"])
    match served[KUEUE_GROUP], needs_kueue:
        case [], True:
            text = "Kueue is not installed in this cluster"
            yield Finding(level=Level.ERROR, subject="Kueue", text=text, cure=INSTALL["Kueue"])
        case [], False:
            yield _well("Kueue", "it is not installed, and not needed without a queue")
        case versions, _ if "v1beta2" in versions:
            yield _well("Kueue", f"`{KUEUE_GROUP}/v1beta2` is served")
        case versions, _:
            text = f"it serves {', '.join(versions)}: it is older than 0.15"
            cure = "0.12 is the oldest that counts preemptions; see `kubectl get deployment -n kueue-system`."
            yield Finding(level=Level.WARNING, subject="Kueue", text=text, cure=cure)


def _check_rights(cluster: Cluster, namespace: str, user: str, *, needs_kueue: bool) -> Iterator[Finding]:
    missing: list[tuple[str, str]] = []
    for right in RIGHTS:
        resource = KINDS[right.kind]
        if resource.group == KUEUE_GROUP and not needs_kueue:
            continue
        verbs = [verb for verb in right.verbs if not cluster.can(verb, right.kind, namespace)]
        if verbs:
            missing.append((f"{', '.join(verbs)} {resource.qualified}", right.lost))
    cure = "Apply `docs/kubernetes/rbac.yaml`, with this account and namespace in it."
    if needed := [what for what, lost in missing if not lost]:
        text = f"{user} cannot do this in '{namespace}': {'; '.join(needed)}"
        yield Finding(level=Level.ERROR, subject="rights", text=text, cure=cure)
    for what, lost in missing:
        if lost:
            text = f"{user} cannot {what} in '{namespace}': {lost}"
            yield Finding(level=Level.WARNING, subject="rights", text=text, cure=cure)
    if not missing:
        yield _well("rights", f"{user} may do in '{namespace}' all that a worker does")


def _check_queue(cluster: Cluster, namespace: str, queue: str) -> Iterator[Finding]:
    found = _look(cluster, Kind.LOCAL_QUEUE, namespace, queue)
    if isinstance(found, Finding):
        yield found
        return
    active = read_condition(found, "Active")
    if active.is_false:
        text = f"LocalQueue `{queue}` admits nothing: {active.message or active.reason}"
        cure = f"See `kubectl describe localqueue {queue} -n {namespace}`."
        yield Finding(level=Level.ERROR, subject="queue", text=text, cure=cure)
        return
    yield _well("queue", f"LocalQueue `{queue}` leads to ClusterQueue `{found['spec']['clusterQueue']}`")


def _check_priority(cluster: Cluster, priority: str) -> Iterator[Finding]:
    found = _look(cluster, Kind.PRIORITY_CLASS, "", priority)
    if isinstance(found, Finding):
        yield found
    else:
        yield _well("priority", f"WorkloadPriorityClass `{priority}` has the value {found.get('value')}")


def _look(cluster: Cluster, kind: Kind, namespace: str, name: str) -> dict[str, Any] | Finding:
    """Return an object that a gang names, or what is wrong with it."""
    subject = "queue" if kind is Kind.LOCAL_QUEUE else "priority"
    resource = KINDS[kind]
    place = f" in '{namespace}'" if namespace else ""
    try:
        found = cluster.get(kind, namespace, name)
    except ClusterError as error:
        if not error.forbidden:
            raise
        text = f"whether {resource.kind} `{name}` exists is not known: {error.said}"
        return Finding(level=Level.WARNING, subject=subject, text=text, cure=error.cure)
    if found is not None:
        return found
    others = [f"`{item['metadata']['name']}`" for item in _list(cluster, kind, namespace)]
    return Finding(
        level=Level.ERROR,
        subject=subject,
        text=f"there is no {resource.kind} `{name}`{place}: a gang that names it would wait for ever",
        cure=f"Name one of {', '.join(others)}."
        if others
        else "Create it, see `docs/kubernetes/queue.yaml`.",
    )


def _list(cluster: Cluster, kind: Kind, namespace: str) -> list[dict[str, Any]]:
    try:
        return list(cluster.list(kind, namespace).items)
    except ClusterError:  # who may get one object may not be allowed to list them
        return []


def _check_manifests(cluster: Cluster, request: GangRequest) -> Iterator[Finding]:
    """Try the JobSet, and the Job and the pod that come of it: each is looked at only by its own checks."""
    jobset = render_jobset(request)
    for kind, manifest in (
        (Kind.JOBSET, jobset),
        (Kind.JOB, render_job(jobset)),
        (Kind.POD, render_pod(jobset)),
    ):
        name = KINDS[kind].kind
        try:
            kept = cluster.create(kind, request.namespace, manifest, dry_run=True)
        except ClusterError as error:
            if kind is not Kind.JOBSET and error.forbidden:
                text = f"{name}: not tried, {error.said}"
                cure = "This right serves `doctor` only, see the end of `docs/kubernetes/rbac.yaml`."
                yield Finding(level=Level.WARNING, subject="manifest", text=text, cure=cure)
            elif not (error.not_installed or error.forbidden):  # these have been said
                yield _fail("manifest", error)
                if error.status == 404:  # there is no such namespace, for any of them
                    return
            continue
        if kind is Kind.JOBSET and _find_rules(kept) != _find_rules(manifest):
            text = "this JobSet drops fields of the failure policy: it is older than 0.10"
            yield Finding(level=Level.ERROR, subject="manifest", text=text, cure=INSTALL["JobSet"])
        else:
            yield _well("manifest", f"{name}: the cluster would take it")


def _find_rules(jobset: dict[str, Any]) -> list[Any]:
    rules: list[dict[str, Any]] = jobset["spec"]["failurePolicy"]["rules"]
    return [(rule.get("action"), rule.get("onJobFailureMessagePatterns")) for rule in rules]


def _make_trial(namespace: str, queue: str | None, priority: str | None) -> GangRequest:
    return GangRequest(
        name=naming.name_jobset("doctor", flow_run_id="doctor", nnodes=2),
        namespace=namespace,
        nnodes=2,
        command=("python", "-m", "prefect_torch_elastic.node"),
        image="doctor",  # nothing is ever pulled
        pool_id="doctor",
        flow_run_id="doctor",
        flow_run_name="doctor",
        worker_name="doctor",
        cpu="1",
        memory="1Gi",
        queue=queue,
        queue_priority=priority,
    )


def _well(subject: str, text: str) -> Finding:
    return Finding(level=Level.OK, subject=subject, text=text)


def _fail(subject: str, error: ElasticError) -> Finding:
    cure = error.cure if isinstance(error, ClusterError) else ""
    text = str(error).removesuffix(cure).strip().removesuffix(".")
    return Finding(level=Level.ERROR, subject=subject, text=text, cure=cure)
