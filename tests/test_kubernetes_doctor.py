"""What `doctor` finds in a simulated cluster, and that docs/kubernetes grants what it asks for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from prefect_torch_elastic.cli.doctor import doctor
from prefect_torch_elastic.kubernetes.client import Cluster
from prefect_torch_elastic.kubernetes.doctor import RIGHTS, Finding, Level, check_cluster, check_store
from prefect_torch_elastic.kubernetes.resources import KINDS
from tests.simulators.kubernetes.server import ApiServer
from tests.simulators.kubernetes.storage import Storage
from tests.simulators.scriptedapi import ScriptedApi, make_kubeconfig, ok, status

PAGES = Path(__file__).parent.parent / "docs" / "kubernetes"


@pytest.fixture
def server() -> Iterator[ApiServer]:
    storage = Storage()
    storage.create("namespaces", {"metadata": {"name": "ml"}})
    storage.create(
        "localqueues",
        {"metadata": {"name": "lq", "namespace": "ml"}, "spec": {"clusterQueue": "cq"}},
    )
    storage.create("workloadpriorityclasses", {"metadata": {"name": "low"}, "value": 100})
    with ApiServer(storage) as server:
        yield server


@pytest.fixture
def kubeconfig(server: ApiServer, tmp_path: Path) -> str:
    return str(server.write_kubeconfig(tmp_path / "kubeconfig"))


@pytest.fixture
def cluster(kubeconfig: str) -> Iterator[Cluster]:
    cluster = Cluster.connect(kubeconfig=kubeconfig)
    yield cluster
    cluster.close()


def check(cluster: Cluster, **options: Any) -> list[Finding]:
    """Return what is not well."""
    asked: dict[str, Any] = {"namespace": "ml", "queue": "lq"} | options
    found = check_cluster(cluster, **asked)
    return [finding for finding in found if finding.level is not Level.OK]


def test_check_cluster_finds_all_well_and_creates_nothing(server: ApiServer, cluster: Cluster):
    found = check_cluster(cluster, namespace="ml", queue="lq", priority="low")
    assert [finding for finding in found if finding.level is not Level.OK] == []
    assert [finding.subject for finding in found] == [
        *("API", "JobSet", "Kueue", "rights", "queue", "priority"),
        *("manifest", "manifest", "manifest"),
    ]
    assert not any(server.storage.list(plural) for plural in ("jobsets", "jobs", "pods"))


def test_check_cluster_stops_when_nobody_answers(kubeconfig: str, server: ApiServer):
    server.close()
    cluster = Cluster.connect(kubeconfig=kubeconfig)
    cluster._sleep = lambda _: None
    (finding,) = check_cluster(cluster, namespace="ml")
    assert finding.level is Level.ERROR
    assert "did not answer" in finding.text
    assert "kubeconfig" in finding.cure


def test_check_cluster_says_that_jobset_is_not_installed(server: ApiServer, cluster: Cluster):
    server.absent_groups.add("jobset.x-k8s.io")
    (finding,) = check(cluster)
    assert (finding.level, finding.text) == (Level.ERROR, "JobSet is not installed in this cluster")
    assert "https://jobset.sigs.k8s.io" in finding.cure


def test_check_cluster_needs_kueue_only_for_a_queue(server: ApiServer, cluster: Cluster):
    server.absent_groups.add("kueue.x-k8s.io")
    assert check(cluster, queue=None) == []
    assert check(cluster)[0].text == "Kueue is not installed in this cluster"


def test_check_cluster_names_the_rights_that_are_missing_c047(server: ApiServer, cluster: Cluster):
    server.faults.deny("create", "jobsets")
    server.faults.deny("watch", "workloads")
    user = cluster.whoami()
    needed, wanted = (finding for finding in check(cluster) if finding.subject == "rights")
    assert needed.level is Level.ERROR
    assert needed.text == f"{user} cannot do this in 'ml': create jobsets.jobset.x-k8s.io"
    assert wanted.level is Level.WARNING
    assert wanted.text.startswith(f"{user} cannot watch workloads.kueue.x-k8s.io in 'ml': ")
    assert "docs/kubernetes/rbac.yaml" in wanted.cure


def test_check_cluster_names_the_queues_that_there_are(cluster: Cluster):
    (finding,) = check(cluster, queue="lp")
    assert finding.level is Level.ERROR
    assert "there is no LocalQueue `lp` in 'ml'" in finding.text
    assert finding.cure == "Name one of `lq`."


def test_check_cluster_says_why_a_queue_admits_nothing(server: ApiServer, cluster: Cluster):
    inactive = {"type": "Active", "status": "False", "reason": "ClusterQueueDoesNotExist", "message": "no cq"}
    server.storage.create(
        "localqueues",
        {
            "metadata": {"name": "dead", "namespace": "ml"},
            "spec": {"clusterQueue": "cq"},
        },
    )
    server.storage.mutate(
        "localqueues",
        "ml",
        "dead",
        lambda queue: queue.update(status={"conditions": [inactive]}),
        status=True,
    )
    (finding,) = check(cluster, queue="dead")
    assert (finding.level, finding.text) == (Level.ERROR, "LocalQueue `dead` admits nothing: no cq")


def test_check_cluster_says_that_a_priority_class_is_missing(cluster: Cluster):
    (finding,) = check(cluster, priority="high")
    assert "there is no WorkloadPriorityClass `high`" in finding.text
    assert finding.cure == "Name one of `low`."


def test_check_cluster_only_warns_when_it_may_not_look(server: ApiServer, cluster: Cluster):
    server.faults.deny("get", "workloadpriorityclasses")
    found = check(cluster, priority="low")
    assert {finding.level for finding in found} == {Level.WARNING}
    assert any("is not known" in finding.text for finding in found)


@pytest.mark.parametrize("plural", ["jobs", "pods"])
def test_check_cluster_only_warns_when_it_may_not_try(server: ApiServer, cluster: Cluster, plural: str):
    server.faults.deny("create", plural)
    (finding,) = check(cluster)
    assert finding.level is Level.WARNING
    assert "not tried" in finding.text


def test_check_cluster_repeats_why_a_pod_is_refused(server: ApiServer, cluster: Cluster):
    text = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": unrestricted capabilities'
    server.faults.fail("create", "pods", status=403, text=text)
    (finding,) = check(cluster)
    assert finding.level is Level.ERROR
    assert "violates PodSecurity" in finding.text
    assert "another Pod Security level" in finding.cure


def test_check_cluster_says_once_that_the_namespace_is_missing(cluster: Cluster):
    (finding,) = check(cluster, namespace="nowhere", queue=None)
    assert finding.text.endswith('namespaces "nowhere" not found')
    assert "kubectl create namespace nowhere" in finding.cure


def test_check_cluster_finds_a_jobset_that_is_too_old(tmp_path: Path):
    api = ScriptedApi()
    try:
        old = 'strict decoding error: unknown field "spec.failurePolicy.rules[0].onJobFailureMessagePatterns"'
        allowed = {"status": {"allowed": True}}
        api.on(
            "POST /apis/authentication.k8s.io/v1/selfsubjectreviews",
            ok({"status": {"userInfo": {"username": "me"}}}),
        )
        api.on("POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews", ok(allowed))
        api.on("GET /apis/jobset.x-k8s.io", ok({"versions": [{"version": "v1alpha2"}]}))
        api.on("POST /apis/jobset.x-k8s.io/v1alpha2/namespaces/ml/jobsets", status(400, "BadRequest", old))
        api.on("POST /apis/batch/v1/namespaces/ml/jobs", ok({}))
        api.on("POST /api/v1/namespaces/ml/pods", ok({}))
        cluster = Cluster.connect(credentials={"config": make_kubeconfig(api.url)})
        (finding,) = check(cluster, queue=None)
        assert finding.level is Level.ERROR
        assert "onJobFailureMessagePatterns" in finding.text
        assert "0.10" in finding.cure
        cluster.close()
    finally:
        api.close()


def test_check_store_tries_it_and_warns_of_a_directory(tmp_path: Path):
    finding = check_store(str(tmp_path / "store"))
    assert finding.level is Level.WARNING
    assert "Pods need it at the same path" in finding.cure


def test_check_store_says_what_is_wrong(tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert check_store(str(tmp_path / "file" / "store")).level is Level.ERROR


# --- the command


def test_doctor_prints_a_table_and_the_cures(kubeconfig: str, capsys: pytest.CaptureFixture[str]):
    assert doctor(namespace="ml", queue="lp", kubeconfig=kubeconfig) == 1
    said = capsys.readouterr().out
    assert "there is no LocalQueue `lp`" in said
    assert "error (queue): Name one of `lq`." in said


def test_doctor_prints_json_for_programs(kubeconfig: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    store = str(tmp_path / "store")
    assert doctor(namespace="ml", queue="lq", kubeconfig=kubeconfig, store=store, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert {finding["level"] for finding in found} == {"ok", "warning"}
    assert found[-1]["subject"] == "store"


# --- docs/kubernetes


def load(name: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all((PAGES / name).read_text()) if document]


def granted() -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for document in load("rbac.yaml")
        for rule in document.get("rules", [])
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_role_grants_all_that_a_worker_does():
    asked = {
        (KINDS[right.kind].group, KINDS[right.kind].plural, verb) for right in RIGHTS for verb in right.verbs
    }
    assert asked <= granted()


def test_role_grants_nothing_else():
    asked = {
        (KINDS[right.kind].group, KINDS[right.kind].plural, verb) for right in RIGHTS for verb in right.verbs
    }
    assert granted() - asked == {
        ("kueue.x-k8s.io", "workloadpriorityclasses", "list"),
        ("visibility.kueue.x-k8s.io", "localqueues/pendingworkloads", "get"),
        ("batch", "jobs", "create"),
        ("", "pods", "create"),
    }


def test_worker_runs_under_the_account_of_the_role():
    account = next(document for document in load("rbac.yaml") if document["kind"] == "ServiceAccount")
    (deployment,) = load("worker.yaml")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    assert deployment["metadata"]["namespace"] == account["metadata"]["namespace"]


def test_queue_of_the_page_admits_a_gang():
    documents = {document["kind"]: document for document in load("queue.yaml")}
    assert documents["LocalQueue"]["spec"]["clusterQueue"] == documents["ClusterQueue"]["metadata"]["name"]
    (group,) = documents["ClusterQueue"]["spec"]["resourceGroups"]
    assert group["flavors"][0]["name"] == documents["ResourceFlavor"]["metadata"]["name"]
    assert set(group["coveredResources"]) == {quota["name"] for quota in group["flavors"][0]["resources"]}
