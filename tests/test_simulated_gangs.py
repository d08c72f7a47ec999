"""One gang in the shape of ours in the simulated cluster: what it survives, and what it is charged for."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from tests.simulators.kubernetes.conditions import find_condition, is_true, list_owned, read_reason
from tests.simulators.kubernetes.objects import Obj
from tests.simulators.kubernetes.rehearsal import PLAN, TICK_SECONDS, Rehearsal

SCENARIO = Path(__file__).parent / "fixtures" / "simulator" / "failure.json"
GOLDEN_RULES = [
    {
        "name": "config",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": ["exit code (64|65|78) "],
    },
    {
        "name": "disruption",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": ["condition DisruptionTarget "],
    },
]
GOLDEN_POD_RULES = [
    {
        "action": "FailJob",
        "onExitCodes": {"containerName": "main", "operator": "In", "values": [64, 65, 78]},
    },
    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
]


class Gang:
    """A rehearsal of one JobSet that a test moves on by hand."""

    def __init__(
        self, *, plan: str = "run=60;stop=1", max_restarts: int = 2, queue: bool = True, **facts: Any
    ):
        scenario = json.loads(SCENARIO.read_text())
        action = scenario["actions"][0]
        action.update(name="gang", labels={**action["labels"], **facts.get("labels", {})} if queue else {})
        spec = action["spec"]
        spec["suspend"] = queue
        spec["failurePolicy"] = {
            "maxRestarts": max_restarts,
            "restartStrategy": "BlockingRecreate",
            "rules": GOLDEN_RULES,
        }
        job = spec["replicatedJobs"][0]["template"]["spec"]
        job["podFailurePolicy"] = {"rules": GOLDEN_POD_RULES}
        job["podReplacementPolicy"] = "Failed"
        job["template"]["metadata"]["annotations"] = {PLAN: plan}
        self.spec = spec
        self.rehearsal = Rehearsal(scenario, batch_seconds=facts.get("batch_seconds", 1.0))
        self.storage = self.rehearsal.storage
        self.rehearsal.act(action)

    def go(self, seconds: float) -> None:
        """Let time pass."""
        end = self.rehearsal.clock.now + seconds
        while self.rehearsal.clock.now < end:
            self.rehearsal.controllers.step()
            self.rehearsal.kubelet.step()
            self.rehearsal.clock.now += TICK_SECONDS
        self.rehearsal.controllers.step()

    def act(self, do: str, **facts: Any) -> None:
        self.rehearsal.act({"do": do, "name": "gang", **facts})

    @property
    def jobset(self) -> Obj:
        return self.get("jobsets", "gang")

    @property
    def workload(self) -> Obj:
        return self.rehearsal.find_workload("gang")

    @property
    def pods(self) -> list[Obj]:
        return self.storage.list("pods", self.rehearsal.namespace)

    def get(self, plural: str, name: str) -> Obj:
        found = self.storage.get(plural, self.rehearsal.namespace, name)
        assert found is not None, name
        return found


def test_gang_is_given_up_when_a_pod_says_do_not_retry():
    gang = Gang(plan="run=60;run.1=1;exit.1=65;stop=1")
    gang.go(8)
    assert read_reason(gang.jobset, "Failed") == "FailJobSetFailurePolicyAction"
    condition = find_condition(gang.get("jobs", "gang-w-0"), "Failed")
    assert condition is not None
    assert "exit code 65 matching FailJob rule at index 0" in condition["message"]


def test_gang_is_restarted_uncounted_when_a_pod_is_disrupted():
    gang = Gang(max_restarts=0)
    gang.go(2)
    gang.act("evict-pod", name="gang-w-0-1")
    gang.go(8)
    status = gang.jobset["status"]
    assert (status["restarts"], status.get("restartsCountTowardsMax", 0)) == (1, 0)
    assert len([pod for pod in gang.pods if is_true(pod, "Ready")]) == 2


def test_gang_is_restarted_and_counted_when_a_pod_is_deleted_by_hand():
    gang = Gang()
    gang.go(2)
    gang.act("delete-pod", name="gang-w-0-1")
    gang.go(8)
    status = gang.jobset["status"]
    assert (status["restarts"], status["restartsCountTowardsMax"]) == (1, 1)


def test_blocking_recreate_waits_for_every_old_pod():
    gang = Gang(plan="run=60;run.1=1;exit.1=1;stop=5")
    gang.go(5)
    assert [pod["metadata"]["labels"]["jobset.sigs.k8s.io/restart-attempt"] for pod in gang.pods] == [
        "0",
        "0",
    ]
    gang.go(5)
    assert {pod["metadata"]["labels"]["jobset.sigs.k8s.io/restart-attempt"] for pod in gang.pods} == {"1"}


def test_suspended_gang_is_not_charged_for_pods_that_exit_143():
    gang = Gang()
    gang.go(2)
    gang.act("hold", value="HoldAndDrain")
    gang.go(4)
    gang.act("hold", value="None")
    gang.go(4)
    assert gang.jobset["status"]["restarts"] == 0
    assert len([pod for pod in gang.pods if is_true(pod, "Ready")]) == 2


def test_suspended_gang_fails_for_good_when_a_pod_says_do_not_retry():
    gang = Gang(plan="run=60;stop=3", batch_seconds=0.0)
    gang.go(2)
    gang.act("hold", value="HoldAndDrain")
    gang.go(1)
    gang.rehearsal.kubelet.end(gang.pods[0], 64)
    gang.go(4)
    assert read_reason(gang.jobset, "Failed") == "FailJobSetFailurePolicyAction"


def test_gang_never_ends_when_a_rank_exits_0_on_a_drain_and_the_other_does_not():
    gang = Gang()
    gang.go(2)
    gang.rehearsal.kubelet.end(gang.pods[0], 0)
    gang.go(3)
    job = gang.get("jobs", "gang-w-0")
    assert (job["status"]["completedIndexes"], job["status"]["active"]) == ("0", 1)


def test_kueue_takes_back_what_a_person_suspends():
    gang = Gang()
    gang.go(2)
    gang.act("suspend", value=True)
    gang.go(3)
    assert gang.jobset["spec"]["suspend"] is False
    assert gang.jobset["status"]["restarts"] == 0


def test_kueue_takes_back_what_a_person_resumes_without_quota():
    gang = Gang()
    gang.act("hold", value="Hold")
    gang.go(1)
    gang.act("suspend", value=False)
    gang.go(1)
    assert (gang.jobset["spec"]["suspend"], gang.pods) == (True, [])


def test_workload_appears_once_its_priority_class_does():
    gang = Gang(labels={"kueue.x-k8s.io/priority-class": "urgent"})
    gang.go(2)
    assert list_owned(gang.storage, gang.jobset, "Workload") == []
    gang.storage.create("workloadpriorityclasses", {"metadata": {"name": "urgent"}, "value": 7})
    gang.go(1)
    assert gang.workload["spec"]["priority"] == 7


def test_workload_is_admitted_once_its_local_queue_exists():
    gang = Gang(labels={"kueue.x-k8s.io/queue-name": "later"})
    gang.go(1)
    assert read_reason(gang.workload, "QuotaReserved") == "Inadmissible"
    metadata = {"name": "later", "namespace": gang.rehearsal.namespace}
    gang.storage.create("localqueues", {"metadata": metadata, "spec": {"clusterQueue": "cq-failure"}})
    gang.go(1)
    assert is_true(gang.workload, "Admitted")


def test_pods_carry_what_kueue_and_the_job_controller_add():
    gang = Gang()
    gang.go(1)
    pod = gang.pods[1]
    assert pod["metadata"]["labels"]["kueue.x-k8s.io/podset"] == "w"
    assert pod["metadata"]["annotations"]["kueue.x-k8s.io/workload"] == gang.workload["metadata"]["name"]
    assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == ("gang-w-0-1", "gang")
    path = "metadata.labels['batch.kubernetes.io/job-completion-index']"
    assert pod["spec"]["containers"][0]["env"][-1] == {
        "name": "JOB_COMPLETION_INDEX",
        "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}},
    }


def test_eviction_gives_the_pod_template_back_as_it_was():
    gang = Gang()
    before = copy.deepcopy(gang.jobset["spec"]["replicatedJobs"])
    gang.go(2)
    assert gang.jobset["spec"]["replicatedJobs"] != before
    gang.act("activate", value=False)
    gang.go(3)
    assert gang.jobset["spec"]["replicatedJobs"] == before


def test_second_gang_of_a_name_runs_beside_the_old_pods_after_a_background_delete():
    gang = Gang(plan="run=60;stop=10")
    gang.go(2)
    gang.act("delete", propagation="Background")
    gang.go(1)
    gang.act("create", labels={"kueue.x-k8s.io/queue-name": "lq"}, spec=gang.spec)
    gang.go(2)
    hosts = [pod["spec"]["hostname"] for pod in gang.pods if pod["status"]["phase"] == "Running"]
    assert hosts.count("gang-w-0-0") == 2


def test_foreground_delete_keeps_the_jobset_until_every_pod_is_gone():
    gang = Gang(plan="run=60;stop=5")
    gang.go(2)
    gang.act("delete", propagation="Foreground")
    gang.go(4)
    assert "deletionTimestamp" in gang.jobset["metadata"]
    gang.go(3)
    left = [kind for kind in ("jobsets", "jobs", "pods", "workloads", "services") if gang.storage.list(kind)]
    assert left == []


def test_times_of_conditions_have_whole_seconds():
    gang = Gang()
    gang.go(1.5)
    condition = find_condition(gang.workload, "Admitted")
    assert condition is not None
    assert condition["lastTransitionTime"].endswith(":20Z")
