"""The status of a gang: captured lives replayed, the sentences for people, and objects of any shape."""

from __future__ import annotations

import copy
import json
import random
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_torch_elastic.kubernetes.phases import GangPhase
from prefect_torch_elastic.kubernetes.podfailures import diagnose_pods
from prefect_torch_elastic.kubernetes.status import GangReading, needs_pods, read_status

FIXTURES = Path(__file__).parent / "fixtures" / "kubernetes"
NOW = datetime(2026, 11, 29, 13, 0, tzinfo=UTC)
P = GangPhase

LIVES: dict[str, list[GangPhase]] = {
    "preempted": [
        *(P.CREATED, P.QUEUED, P.ADMITTED, P.STARTING, P.RUNNING, P.STOPPING, P.PREEMPTED),
        *(P.ADMITTED, P.STARTING, P.RUNNING, P.SUCCEEDED),
    ],
    "too-large": [P.CREATED, P.QUEUED, P.INADMISSIBLE],
    "no-such-queue": [P.CREATED, P.QUEUED, P.INADMISSIBLE],
    "no-such-priority": [P.CREATED],
    "unschedulable": [P.CREATED, P.QUEUED, P.ADMITTED, P.STARTING],
    "failed": [
        *(P.CREATED, P.QUEUED, P.ADMITTED, P.STARTING, P.RUNNING, P.RESTARTING, P.RUNNING),
        *(P.STOPPING, P.FAILED),
    ],
    "not-retried": [P.CREATED, P.STARTING, P.RUNNING, P.STOPPING, P.FAILED],
    "deadline": [P.CREATED, P.STARTING, P.RUNNING, P.STOPPING, P.FAILED],
    "given-up": [
        *(P.CREATED, P.QUEUED, P.ADMITTED, P.STARTING, P.STOPPING, P.REQUEUED),
        *(P.ADMITTED, P.STARTING, P.STOPPING, P.REQUEUED),
        *(P.ADMITTED, P.STARTING, P.STOPPING, P.DEACTIVATED),
    ],
    "drained": [P.CREATED, P.QUEUED, P.ADMITTED, P.STARTING, P.RUNNING, P.RESTARTING, P.RUNNING],
}


@cache
def load(name: str) -> list[dict[str, Any]]:
    return json.loads((FIXTURES / f"{name}.json").read_text())["steps"]


def read(step: dict[str, Any], **facts: Any) -> GangReading:
    known = {key: step[key] for key in ("jobset", "workload", "job", "pods")}
    return read_status(**{"now": datetime.fromisoformat(step["now"]), **known, **facts})


def replay(name: str) -> list[GangReading]:
    return [read(step) for step in load(name)]


def find(name: str, phase: GangPhase, *, which: int = -1) -> dict[str, Any]:
    """Return a step of a captured life in that phase, for a test to change."""
    found = [step for step in load(name) if read(step).phase is phase]
    return copy.deepcopy(found[which])


def condition(type: str, status: str, reason: str = "", message: str = "") -> dict[str, Any]:
    return {"type": type, "status": status, "reason": reason, "message": message}


def queued(message: str, *, reason: str = "Pending") -> dict[str, Any]:
    """Return a captured gang in a queue, with other words of Kueue."""
    step = find("too-large", P.INADMISSIBLE)
    step["workload"]["status"]["conditions"] = [condition("QuotaReserved", "False", reason, message)]
    return step


@pytest.mark.parametrize("name", sorted(LIVES))
def test_status_follows_a_captured_life(name: str) -> None:
    phases = [status.phase for status in replay(name)]
    changes = [phase for index, phase in enumerate(phases) if index == 0 or phases[index - 1] is not phase]
    assert changes == LIVES[name]


def test_status_calls_a_held_queue_a_wait_and_not_a_mistake() -> None:
    assert P.INADMISSIBLE not in {status.phase for status in replay("held")}


def test_status_counts_preemptions_from_the_workload() -> None:
    last = replay("preempted")[-1]
    assert (last.preemptions, last.evictions, last.restarts) == (1, 1, 0)


def test_status_counts_restarts_and_their_limit() -> None:
    last = replay("failed")[-1]
    assert (last.restarts, last.counted_restarts, last.max_restarts) == (1, 1, 1)


def test_status_says_what_is_missing_in_the_queue_c042() -> None:
    said = "couldn't assign flavors to pod set w: insufficient unused quota for nvidia.com/gpu in flavor f"
    status = read(queued(f"{said}, 8 more needed"), position=(3, 3))
    assert status.phase is P.QUEUED
    assert status.message == "Queued in `lq` at place 3: 8 more `nvidia.com/gpu` needed."
    assert status.detail == f"{said}, 8 more needed"


def test_status_names_both_places_when_the_quota_is_shared() -> None:
    assert "at place 2 (5 among all" in read(queued(""), position=(2, 5)).message


def test_status_names_the_kinds_of_machines_when_there_is_a_choice() -> None:
    short = "insufficient unused quota for {} in flavor {}, {} more needed"
    lacks = [("cpu", "a100", "4"), ("nvidia.com/gpu", "a100", "8"), ("nvidia.com/gpu", "h200", "2")]
    message = read(queued(", ".join(short.format(*lack) for lack in lacks))).message
    assert message == (
        "Queued in `lq`: 4 more `cpu` and 8 more `nvidia.com/gpu` (`a100`), or "
        "2 more `nvidia.com/gpu` (`h200`) needed."
    )


def test_status_says_what_can_never_fit_c042() -> None:
    status = read(find("too-large", P.INADMISSIBLE))
    assert "it asks for 16 `nvidia.com/gpu`, and the queue has 8 at most. Ask for less" in status.message


def test_status_waits_when_only_one_kind_of_machine_is_too_small() -> None:
    never = (
        "insufficient quota for cpu in flavor small, previously considered podsets requests (0) + "
        "current podset request (16) > maximum capacity (8)"
    )
    status = read(queued(f"{never}, insufficient unused quota for cpu in flavor large, 3 more needed"))
    assert (status.phase, status.message) == (P.QUEUED, "Queued in `lq`: 3 more `cpu` needed.")


def test_status_reads_the_older_words_for_what_never_fits() -> None:
    said = "insufficient quota for cpu in flavor f, request > maximum capacity (16 > 8)"
    assert "asks for 16 `cpu`, and the queue has 8 at most" in read(queued(said)).message


def test_status_names_a_queue_that_is_missing_c042() -> None:
    status = read(find("no-such-queue", P.INADMISSIBLE))
    assert "queue `no-such-lq`: there is no such queue in its namespace. Correct `queue`" in status.message


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        pytest.param("Pending", "untolerated taint {gpu NoSchedule} in flavor f", id="taint"),
        pytest.param("Pending", "flavor f doesn't match node affinity", id="affinity"),
        pytest.param("ExceedsMaxQuota", "whatever", id="granular"),
        pytest.param("Inadmissible", "Workload namespace doesn't match ClusterQueue selector", id="selector"),
    ],
)
def test_status_is_inadmissible_in_the_words_of_kueue(reason: str, message: str) -> None:
    status = read(queued(message, reason=reason))
    assert status.phase is P.INADMISSIBLE
    assert message in status.message


def test_status_tells_a_preempted_gang_what_comes_next() -> None:
    messages = [status.message for status in replay("preempted")]
    assert (
        "Preempted for a workload with a higher priority (preemption 1). Its pods save their work and stop "
        "(2 pods still have to end); then it waits in `lq`."
    ) in messages
    assert (
        "Preempted for a workload with a higher priority (preemption 1). It waits in `lq`: 8 more "
        "`nvidia.com/gpu` needed. It goes on from its last checkpoint."
    ) in messages


def test_status_has_the_preemption_without_what_follows_from_it() -> None:
    assert read(find("preempted", P.PREEMPTED)).preemption == (
        "Preempted for a workload with a higher priority (preemption 1)"
    )
    assert not read(find("given-up", P.REQUEUED)).preemption


def test_status_says_who_preempted_when_quota_was_lent() -> None:
    step = find("preempted", P.PREEMPTED)
    for item in step["workload"]["status"]["conditions"]:
        if item["type"] == "Preempted":
            item["reason"] = "InCohortReclamation"
    assert read(step).message.startswith("Preempted because another queue takes back the quota")


def test_status_says_when_kueue_tries_again_and_looks_again_then() -> None:
    step = find("given-up", P.REQUEUED)
    step["workload"]["status"]["requeueState"] = {"count": 1, "requeueAt": "2026-11-29T13:09:00Z"}
    status = read(step, now=datetime(2026, 11, 29, 13, 8, 30, tzinfo=UTC))
    assert "puts it back into `lq` at 13:09:00 UTC" in status.message
    assert status.look_again_seconds == 30


def test_status_says_why_kueue_gave_up() -> None:
    final = replay("given-up")[-1]
    assert final.message.startswith("Kueue gave the gang up: its pods did not all run within the time")
    assert not any("Somebody" in status.message for status in replay("given-up"))


def test_status_names_the_pod_that_no_machine_fits() -> None:
    message = replay("unschedulable")[-1].message
    assert "`job-w-0-0-sbjrs` waits: no machine fits (0/2 nodes are available: 2 Insufficient" in message
    assert "and 1 more waits likewise" in message


def test_status_names_the_pod_whose_image_is_missing_c049() -> None:
    step = find("preempted", P.STARTING)
    waiting = {"reason": "ErrImagePull", "message": "not found"}
    for pod in step["pods"]:
        pod["status"]["phase"] = "Pending"
        pod["status"]["containerStatuses"] = [
            {"name": "trainer", "image": "missing:1", "state": {"waiting": waiting}}
        ]
    step["job"]["status"]["ready"] = 0
    message = read(step).message
    assert (
        "waits: its image `missing:1` cannot be pulled (ErrImagePull), and 1 more waits likewise." in message
    )


def test_status_says_that_old_pods_keep_new_ones_away() -> None:
    step = find("preempted", P.STARTING, which=0)
    step["pods"], step["job"]["status"] = [], {"active": 2, "terminating": 1, "ready": 0}
    assert read(step).message == "Starting: 0 of 2 pods run; 1 of before still has to end."


def test_status_says_that_nobody_manages_the_gang_and_why_c042() -> None:
    step = find("no-such-priority", P.CREATED)
    created = datetime.fromisoformat(step["jobset"]["metadata"]["creationTimestamp"])
    early = read(step, now=created + timedelta(seconds=20))
    late = read(step, now=created + timedelta(seconds=31))
    assert (early.phase, early.look_again_seconds) == (P.CREATED, 10)
    assert late.phase is P.UNMANAGED
    assert "no WorkloadPriorityClass" in late.message
    assert "prefect-torch-elastic doctor --namespace s-never --queue lq" in late.message


def test_status_says_how_to_resume_a_suspended_gang_without_a_queue() -> None:
    step = find("no-such-priority", P.CREATED)
    step["jobset"]["metadata"]["labels"] = {}
    assert "kubectl -n s-never patch jobset nores" in read(step, now=NOW + timedelta(days=1)).message


def test_status_is_queued_when_workloads_may_not_be_read() -> None:
    step = find("no-such-priority", P.CREATED)
    status = read(step, now=NOW + timedelta(days=1), sees_workloads=False)
    assert status.phase is P.QUEUED


def test_status_hints_at_refused_pods_when_none_come() -> None:
    step = find("preempted", P.ADMITTED)
    status = read(step, now=NOW + timedelta(days=1))
    assert status.phase is P.ADMITTED
    assert (
        "kubectl -n s-preempt describe jobset,job -l jobset.sigs.k8s.io/jobset-name=lowjob" in status.message
    )


def test_status_waits_for_an_admission_check() -> None:
    step = queued("")
    step["workload"]["status"]["conditions"] = [
        condition("QuotaReserved", "True"),
        condition("Admitted", "False", "UnsatisfiedAdmissionChecks"),
    ]
    assert read(step).phase is P.PROVISIONING


def test_status_fails_when_kueue_cannot_start_the_gang() -> None:
    step = queued("")
    step["workload"]["status"]["conditions"] = [condition("Finished", "True", "FailedToStart", "conflict")]
    assert (read(step).phase, read(step).detail) == (P.FAILED, "conflict")


def test_status_says_that_restarts_after_disruptions_do_not_count() -> None:
    step = find("drained", P.RESTARTING, which=0)
    step["jobset"]["spec"]["failurePolicy"]["rules"] = [
        {
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": ["(", "condition DisruptionTarget "],
        }
    ]
    words = "Pod s/p has condition DisruptionTarget matching FailJob rule at index 1"
    step["job"]["status"]["conditions"] = [condition("FailureTarget", "True", "PodFailurePolicy", words)]
    assert "after a disruption, which does not count" in read(step).message


def test_status_ignores_the_failed_job_of_a_past_attempt() -> None:
    step = find("failed", P.RUNNING, which=-1)
    step["job"] = find("failed", P.RESTARTING, which=0)["job"]
    step["pods"] = []
    assert read(step).phase is P.STARTING


def test_status_is_gone_without_a_jobset() -> None:
    assert (
        read({"now": NOW.isoformat(), "jobset": None, "workload": None, "job": None, "pods": []}).phase
        is P.GONE
    )


def test_status_is_stopping_while_the_jobset_is_deleted() -> None:
    step = find("preempted", P.RUNNING)
    step["jobset"]["metadata"]["deletionTimestamp"] = "2026-11-29T13:00:00Z"
    assert read(step).message == "The gang is being deleted (2 pods still have to end)."


def test_pods_are_needed_only_while_they_start_or_have_failed() -> None:
    needed = {
        read(step).phase
        for name in LIVES
        for step in load(name)
        if needs_pods(step["jobset"], step["workload"])
    }
    assert needed >= {P.STARTING, P.FAILED}
    assert not needed & {P.QUEUED, P.INADMISSIBLE, P.PREEMPTED, P.REQUEUED, P.DEACTIVATED, P.SUCCEEDED}


def test_phases_end_or_wait_but_not_both() -> None:
    assert not any(phase.is_final and phase.waits for phase in GangPhase)
    assert {phase for phase in GangPhase if phase.is_final} == {P.SUCCEEDED, P.FAILED, P.DEACTIVATED, P.GONE}


JUNK = [None, "", "x", 7, True, [], {}, [None], [{}], {"x": None}, -1, "2026-13-99T99:99:99Z"]


def damage(thing: Any, chance: random.Random) -> Any:
    """Return a copy with fields left out, or replaced by something of another type."""
    if chance.random() < 0.05:
        return chance.choice(JUNK)
    if isinstance(thing, dict):
        return {key: damage(value, chance) for key, value in thing.items() if chance.random() < 0.95}
    return [damage(item, chance) for item in thing] if isinstance(thing, list) else thing


def damage_object(thing: Any, chance: random.Random) -> dict[str, Any]:
    damaged = damage(thing, chance)
    return damaged if isinstance(damaged, dict) else {}


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_status_never_raises_whatever_the_objects_look_like(seed: int) -> None:
    chance = random.Random(seed)

    def pick(kind: str) -> dict[str, Any]:
        return damage_object(chance.choice(load(chance.choice(sorted(LIVES))))[kind], chance)

    jobset, workload, job = pick("jobset"), pick("workload"), pick("job")
    pods = [
        damage_object(pod, chance) for pod in load("failed")[chance.randrange(len(load("failed")))]["pods"]
    ]
    needs_pods(jobset, workload)
    assert read_status(jobset=jobset, workload=workload, job=job, pods=pods, now=NOW).message
    diagnose_pods(pods, job=job, grace_seconds=30)
