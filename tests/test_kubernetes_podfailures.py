"""Why a pod failed: the words of the kubelet, the scheduler and the program, and which pod is to blame."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prefect_torch_elastic.kubernetes.podfailures import PodFailure, diagnose_pods


def pod(index: int = 1, *, phase: str = "Failed", machine: str = "gpu-7", **status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": f"gang-node-0-{index}-x{index}",
            "labels": {"batch.kubernetes.io/job-completion-index": str(index)},
        },
        "spec": {"nodeName": machine} if machine else {},
        "status": {"phase": phase, **status},
    }


def ended(exit_code: int, *, reason: str = "Error", message: str = "", second: int = 0) -> dict[str, Any]:
    terminated = {
        "exitCode": exit_code,
        "reason": reason,
        "message": message,
        "finishedAt": f"2026-11-29T13:00:{second:02}Z",
    }
    return {"containerStatuses": [{"name": "trainer", "state": {"terminated": terminated}}]}


def waiting(reason: str, message: str = "", *, container: str = "trainer") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"containerStatuses": [{"name": container, "image": "registry/train:1", "state": state}]}


def word(why: str, message: str, *, exit_code: int = 1, **facts: Any) -> str:
    return json.dumps({"exit_code": exit_code, "why": why, "message": message, **facts})


def disrupted(reason: str, message: str = "", *, second: int = 0) -> dict[str, Any]:
    since = f"2026-11-29T13:00:{second:02}Z"
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
    return {"conditions": [{**condition, "lastTransitionTime": since}]}


def failed_job(message: str, *, reason: str = "PodFailurePolicy", **spec: Any) -> dict[str, Any]:
    condition = {"type": "Failed", "status": "True", "reason": reason, "message": message}
    return {"spec": spec, "status": {"conditions": [condition]}}


LOST = failed_job("Job has reached the specified backoff limit", reason="BackoffLimitExceeded")


def diagnose(*pods: dict[str, Any], job: dict[str, Any] | None = LOST) -> PodFailure:
    failure = diagnose_pods(pods, job=job, grace_seconds=60)
    assert failure is not None
    return failure


@pytest.mark.parametrize(
    ("status", "category", "said", "cure"),
    [
        pytest.param(ended(137, reason="OOMKilled"), "HostOutOfMemory", "OOMKilled", "`memory`", id="oom"),
        pytest.param(ended(137), "Killed", "killed by SIGKILL", "memory", id="sigkill"),
        pytest.param(ended(135), "SharedMemory", "SIGBUS (exit code 135)", "`shm_size`", id="sigbus-c044"),
        pytest.param(
            ended(1, message="x\nRuntimeError: unable to write to file </torch_1>: /dev/shm is full"),
            *("SharedMemory", "/dev/shm is full", "`shm_size`"),
            id="shm-in-the-log-c044",
        ),
        pytest.param(ended(139), "Crashed", "SIGSEGV", "", id="segv"),
        pytest.param(
            ended(3, message="a\nlast words\n"), "ExitedEarly", "last line: last words.", "", id="code"
        ),
        pytest.param(
            ended(127, message="python: not found"),
            "NotStarted",
            "python: not found",
            "`image`",
            id="no-python",
        ),
        pytest.param(ended(128, reason="StartError"), "NotStarted", "exit code 128", "`image`", id="start"),
        pytest.param(
            ended(137, reason="ContainerStatusUnknown"), "NodeLost", "cannot tell", "", id="unknown-status"
        ),
        pytest.param(
            {"reason": "Evicted", "message": "The node was low on resource: ephemeral-storage."},
            *("Evicted", "low on resource: ephemeral-storage.", "`ephemeral_storage`"),
            id="disk-c049",
        ),
        pytest.param(
            {"reason": "Evicted", "message": "The node was low on resource: memory."},
            *("Evicted", "low on resource: memory.", "`memory`"),
            id="pressure-c049",
        ),
        pytest.param(
            {"reason": "Evicted", "message": 'Usage of EmptyDir volume "dshm" exceeds the limit "1Gi".'},
            *("Evicted", "dshm", "`shm_size`"),
            id="volume-c049",
        ),
        pytest.param(
            {"reason": "NodeLost"}, "NodeLost", "lost with its machine", "not count", id="node-c049"
        ),
        pytest.param(
            {"reason": "UnexpectedAdmissionError", "message": "no healthy devices present"},
            *("NotAdmitted", "no healthy devices present", "administrator"),
            id="device",
        ),
        pytest.param({"reason": "OutOfcpu"}, "NotAdmitted", "OutOfcpu", "administrator", id="out-of"),
        pytest.param(
            disrupted("DeletionByTaintManager", "Taint manager: deleting"),
            *("NodeLost", "its machine does not answer", "not count"),
            id="taint-c049",
        ),
        pytest.param(
            disrupted("EvictionByEvictionAPI"), "Disrupted", "drains its machine", "not count", id="drain"
        ),
        pytest.param(disrupted("PreemptionByScheduler"), "Disrupted", "higher pod", "", id="preempting"),
        pytest.param(disrupted("SomethingNew"), "Disrupted", "(SomethingNew)", "", id="new-reason"),
    ],
)
def test_failure_names_cause_and_cure(status: dict[str, Any], category: str, said: str, cure: str) -> None:
    failure = diagnose(pod(1, **status))
    assert failure.category == category
    assert failure.message.startswith("Pod `gang-node-0-1-x1` (node 1 on `gpu-7`) ")
    assert said in failure.message
    assert cure in failure.cure
    assert (failure.pod, failure.node, failure.node_name) == ("gang-node-0-1-x1", 1, "gpu-7")


@pytest.mark.parametrize(
    ("status", "category", "said", "blocks"),
    [
        pytest.param(
            waiting("ImagePullBackOff", "Back-off pulling image"),
            "ImagePull",
            "`registry/train:1`",
            True,
            id="image",
        ),
        pytest.param(
            waiting("CreateContainerConfigError", 'secret "hf" not found'),
            *("ContainerConfig", 'secret "hf" not found', True),
            id="secret",
        ),
        pytest.param(
            {
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/2 nodes are available: 2 Insufficient cpu. preemption: 0/2 nodes ...",
                    }
                ]
            },
            *("Unschedulable", "(0/2 nodes are available: 2 Insufficient cpu).", False),
            id="unschedulable",
        ),
    ],
)
def test_failure_says_why_a_pod_does_not_start_c049(
    status: dict[str, Any], category: str, said: str, blocks: bool
) -> None:
    failure = diagnose(pod(0, phase="Pending", **status), job={})
    assert (failure.category, failure.blocks_start, failure.exit_code) == (category, blocks, None)
    assert said in failure.message


def test_failure_is_none_while_pods_only_start() -> None:
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    pods = [
        pod(0, phase="Pending", **waiting("ContainerCreating")),
        pod(1, phase="Pending", conditions=[gated]),
        pod(2, phase="Running"),
    ]
    assert diagnose_pods(pods, job={}, grace_seconds=60) is None


def test_failure_is_what_the_program_said_last() -> None:
    said = word("rank-failed", "rank 3 failed: ValueError: no", exit_code=65, category="UserError")
    failure = diagnose(pod(1, **ended(65, message=said)))
    assert failure.message.endswith("failed: rank 3 failed: ValueError: no.")
    assert (failure.category, failure.exit_code) == ("UserError", 65)
    assert failure.cure.startswith("Mend the function")


def test_failure_blames_the_rank_and_not_its_victims() -> None:
    victim = word("lost-node", "rank 0: connection closed by peer")
    culprit = word("rank-failed", "rank 1 failed", category="UserError")
    failure = diagnose(pod(0, **ended(1, message=victim)), pod(1, **ended(1, message=culprit, second=9)))
    assert (failure.node, failure.is_consequence) == (1, False)


def test_failure_blames_the_cluster_before_a_rank_that_failed_earlier() -> None:
    said = word("rank-failed", "rank 0 failed", category="UserError")
    failure = diagnose(
        pod(0, **ended(1, message=said)), pod(1, **ended(143, second=9), **disrupted("DeletionByPodGC"))
    )
    assert (failure.node, failure.category) == (1, "NodeLost")


def test_failure_blames_the_pod_that_failed_first() -> None:
    assert diagnose(pod(0, **ended(1, second=5)), pod(1, **ended(2, second=4))).node == 1


def test_failure_counts_the_pods_with_the_same_trouble() -> None:
    pods = [pod(index, phase="Pending", **waiting("ErrImagePull")) for index in range(3)]
    assert diagnose(*pods, job={}).message.endswith("(2 more pods likewise.)")


def test_failure_hints_at_grace_when_a_stopped_pod_was_killed() -> None:
    killed = pod(1, **ended(137))
    killed["metadata"]["deletionTimestamp"] = "2026-11-29T13:00:00Z"
    failure = diagnose(killed)
    assert "did not within 60 s" in failure.message
    assert (failure.is_consequence, "`grace_seconds`" in failure.cure) == (True, True)


def test_failure_is_none_when_pods_were_stopped_and_the_job_goes_on() -> None:
    assert diagnose_pods([pod(1, **ended(143))], job={"status": {}}, grace_seconds=60) is None


def test_failure_is_a_stop_when_that_is_all_the_failed_job_has() -> None:
    assert diagnose(pod(1, **ended(143))).category == "Stopped"


def test_failure_names_the_unreachable_leader_last() -> None:
    said = word("leader-unreachable", "`gang-node-0-0.gang:29400` does not answer")
    failure = diagnose(pod(1, **ended(1, message=said)))
    assert (failure.category, failure.is_consequence) == ("LeaderUnreachable", True)
    assert "NetworkPolicy" in failure.cure


@pytest.mark.parametrize(
    ("words", "category", "exit_code", "node"),
    [
        pytest.param(
            "Container trainer for pod ml/gang-node-0-3-x failed with exit code 64 matching FailJob rule",
            *("ExitedEarly", 64, 3),
            id="code",
        ),
        pytest.param(
            "Pod ml/gang-node-0-2-x has condition DisruptionTarget matching FailJob rule at index 1",
            *("Disrupted", None, 2),
            id="disruption",
        ),
    ],
)
def test_failure_is_what_the_job_remembers_when_the_pod_is_gone(
    words: str, category: str, exit_code: int | None, node: int
) -> None:
    failure = diagnose(pod(1, **ended(143)), job=failed_job(words))
    assert (failure.category, failure.exit_code, failure.node) == (category, exit_code, node)


def test_failure_is_the_deadline_whatever_the_pods_say() -> None:
    job = failed_job("too long", reason="DeadlineExceeded", activeDeadlineSeconds=3)
    failure = diagnose(pod(1, **ended(1)), job=job)
    assert failure.message == "The gang ran longer than its `active_deadline_seconds` of 3 s."


def test_failure_looks_into_init_containers() -> None:
    failed = {"name": "fetch", "state": {"terminated": {"exitCode": 4, "reason": "Error"}}}
    assert diagnose(pod(1, initContainerStatuses=[failed])).exit_code == 4


def test_failure_ignores_pods_that_ended_well() -> None:
    assert diagnose_pods([pod(0, phase="Succeeded", **ended(0))], job={}, grace_seconds=60) is None
