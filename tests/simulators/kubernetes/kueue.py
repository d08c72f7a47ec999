"""Kueue's side of a JobSet: its Workload is created, followed, evicted and requeued here; quota is next door.

Every look does one thing; the write brings the next look. `kueue_quota` decides who is admitted.
"""

from __future__ import annotations

import re

from tests.simulators.kubernetes import kueue_states
from tests.simulators.kubernetes.conditions import (
    find_condition,
    is_true,
    list_owned,
    record_event,
)
from tests.simulators.kubernetes.kueue_evictions import (
    COMPONENT,
    Pair,
    PodsReadyPolicy,
    find_eviction,
    find_message,
    follow_eviction,
    measure_patience,
)
from tests.simulators.kubernetes.kueue_workloads import (
    FINALIZER,
    JOB_UID,
    QUEUE,
    make_priority,
    make_workload,
    read_labels,
    start_jobset,
    stop_jobset,
)
from tests.simulators.kubernetes.objects import Obj, copy_object
from tests.simulators.kubernetes.storage import Key, Storage

WORKLOADS = "kueue-workload-controller"
_NAME = re.compile(r"^jobset-(.*)-[0-9a-f]{5}$")


def reconcile(
    storage: Storage, key: Key, now: float, *, pods_ready: PodsReadyPolicy | None = None
) -> float | None:
    """Look at one JobSet and its Workload, or at a Workload whose JobSet may be gone (the key says which).

    Returns:
        Seconds until they have to be looked at again; None when only a write can change anything.
    """
    if key[0] == "workloads":
        _abandon_orphan(storage, key, now)
        return None
    jobset = storage.get(*key)
    if jobset is None or "deletionTimestamp" in jobset["metadata"]:
        return None
    if QUEUE not in read_labels(jobset):
        return None
    workload = next(iter(list_owned(storage, jobset, "Workload")), None)
    if workload is None:
        if not (is_true(jobset, "Completed") or is_true(jobset, "Failed")):
            _create_workload(storage, jobset, now)
        return None
    if "deletionTimestamp" in workload["metadata"]:
        _drop_finalizer(storage, workload)
        return None
    pair = Pair(storage=storage, jobset=jobset, workload=workload, now=now, pods_ready=pods_ready)
    return _follow(pair)


def _create_workload(storage: Storage, jobset: Obj, now: float) -> None:
    workload = make_workload(storage, jobset)
    if workload is None:  # a wrong priority class: no Workload and no event, which is how it really is
        return
    created = storage.create("workloads", workload)["metadata"]
    message = f"Created Workload: {created['namespace']}/{created['name']}"
    record_event(storage, jobset, COMPONENT, "CreatedWorkload", message, now=now)


def _abandon_orphan(storage: Storage, key: Key, now: float) -> None:
    """Finish a Workload whose JobSet is gone or going, and let go of it."""
    workload = storage.get(*key)
    if workload is None:
        return
    name = _NAME.sub(r"\1", key[2])  # an orphan has lost its ownerReference
    jobset = storage.get("jobsets", key[1], name)
    same = jobset is not None and jobset["metadata"]["uid"] == read_labels(workload).get(JOB_UID)
    if jobset is not None and same and "deletionTimestamp" not in jobset["metadata"]:
        return

    def finish(obj: Obj) -> None:
        text = "The workload's owner no longer exists"
        kueue_states.write_finish(obj, "OwnerNotFound", text, now=now)

    if not is_true(workload, "Finished"):
        storage.mutate(*key, finish, status=True)
    _drop_finalizer(storage, workload)


def _drop_finalizer(storage: Storage, workload: Obj) -> None:
    def drop(obj: Obj) -> None:
        if FINALIZER in (obj["metadata"].get("finalizers") or ()):
            obj["metadata"]["finalizers"].remove(FINALIZER)
            if not obj["metadata"]["finalizers"]:
                del obj["metadata"]["finalizers"]

    storage.mutate("workloads", workload["metadata"]["namespace"], workload["metadata"]["name"], drop)


def _follow(pair: Pair) -> float | None:
    workload = pair.workload
    if is_true(workload, "Finished"):
        _drop_finalizer(pair.storage, workload)
        return None
    if _finish(pair) or _update_spec(pair) or _update_pods_ready(pair):
        return None
    if is_true(workload, "Evicted"):
        return follow_eviction(pair)
    if reason := find_eviction(pair):
        pair.tell(pair.workload, WORKLOADS, f"EvictedDueTo{reason}", find_message(pair.workload))
        return None
    if pair.is_reserved and pair.is_suspended:
        pair.write_jobset(start_jobset)
        queue = workload["status"]["admission"]["clusterQueue"]
        pair.tell(pair.jobset, COMPONENT, "Started", f"Admitted by clusterQueue {queue}")
    elif not pair.is_reserved and not pair.is_suspended:  # somebody's own `suspend: false` does not count
        pair.write_jobset(stop_jobset)
    return measure_patience(pair) if pair.is_reserved else None


def _finish(pair: Pair) -> bool:
    """Step "finished" comes before "evicted": a JobSet that fails while it is evicted has failed."""
    kind, reason = ("Failed", "Failed") if is_true(pair.jobset, "Failed") else ("Completed", "Succeeded")
    end = find_condition(pair.jobset, kind)
    if end is None:
        return False
    text = end["message"]
    pair.write(lambda obj: kueue_states.write_finish(obj, reason, text, now=pair.now))
    metadata = pair.workload["metadata"]
    name = f"{metadata['namespace']}/{metadata['name']}"
    pair.tell(pair.jobset, COMPONENT, "FinishedWorkload", f"Workload '{name}' is declared finished")
    return True


def _update_spec(pair: Pair) -> bool:
    """Follow the labels of the JobSet: another priority at any time, another queue while it waits."""
    wanted = copy_object(pair.workload["spec"])
    wanted.update(make_priority(pair.storage, pair.jobset) or {})
    if not pair.is_reserved:
        wanted["queueName"] = read_labels(pair.jobset)[QUEUE]
    if wanted == pair.workload["spec"]:
        return False
    pair.write(lambda obj: obj.update(spec=wanted), status=False)
    return True


def _update_pods_ready(pair: Pair) -> bool:
    counts = (pair.jobset.get("status") or {}).get("replicatedJobsStatus") or ()
    ready = sum(count["ready"] + count["succeeded"] for count in counts)
    replicas = sum(replicated.get("replicas", 1) for replicated in pair.jobset["spec"]["replicatedJobs"])
    admitted = is_true(pair.workload, "Admitted")
    before = pair.workload["metadata"]["resourceVersion"]
    pair.write(
        lambda obj: kueue_states.write_pods_ready(
            obj, admitted=admitted, ready=ready >= replicas, now=pair.now
        )
    )
    return pair.workload["metadata"]["resourceVersion"] != before
