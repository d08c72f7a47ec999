"""Our nodes on a control plane of others: a simulated one, which acts as a real one where it matters."""

from __future__ import annotations

import base64
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.simulators import cluster as clusters
from tests.simulators.cluster import Cluster
from tests.simulators.kubelet import Kubelet
from tests.simulators.kubernetes import admission, podverbs
from tests.simulators.kubernetes.borrowing import OWNER_LABEL
from tests.simulators.kubernetes.faults import Faults
from tests.simulators.kubernetes.nodeobjects import NodeObjects
from tests.simulators.kubernetes.nodes import Nodes
from tests.simulators.kubernetes.objects import Obj
from tests.simulators.kubernetes.refusals import ForbiddenError
from tests.simulators.kubernetes.restclient import RestClient
from tests.simulators.kubernetes.runner import Controllers
from tests.simulators.kubernetes.scheduling import Scheduling
from tests.simulators.kubernetes.server import ApiServer
from tests.simulators.kubernetes.storage import Storage

NOT_READY = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}
NO_PID = "4194305"  # more than there are on Linux


class ControlPlane:
    """Server and controllers, and a loop that acts as kube-scheduler and as Kueue's word about queues."""

    def __init__(self, kubeconfig: Path) -> None:
        self.storage, self.has_scheduler = Storage(), True
        self.server = ApiServer(self.storage)
        self.kubeconfig = kubeconfig
        self._controllers = Controllers(self.storage, batch_seconds=0.05)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._act)

    def __enter__(self) -> ControlPlane:
        self.server.start().write_kubeconfig(self.kubeconfig)
        self._controllers.start()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._controllers.close()
        self.server.close()

    def _act(self) -> None:
        while not self._ended.wait(0.02):
            for queue in self.storage.list("localqueues"):
                if not queue.get("status"):
                    where = (queue["metadata"]["namespace"], queue["metadata"]["name"])
                    self.storage.mutate("localqueues", *where, _open, status=True)
            waiting = [pod for pod in self.storage.list("pods") if not pod["spec"].get("nodeName")]
            for pod in waiting if self.has_scheduler else ():
                self._schedule(pod)

    def _schedule(self, pod: Obj) -> None:
        nodes = [node for node in self.storage.list("nodes") if not node.get("spec", {}).get("taints")]
        if nodes:
            podverbs.bind(
                self.storage, pod, node=nodes[len(pod["metadata"]["name"]) % len(nodes)]["metadata"]["name"]
            )


def _open(queue: Obj) -> None:
    queue["status"] = {"conditions": [{"type": "Active", "status": "True", "reason": "Ready"}]}


@pytest.fixture
def plane(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ControlPlane]:
    monkeypatch.setattr(admission, "admit_create", _as_real(admission.admit_create))
    monkeypatch.setenv(clusters.REAL_CLUSTER, str(tmp_path / "kubeconfig"))
    with ControlPlane(tmp_path / "kubeconfig") as started:
        yield started


def _as_real(admit: Callable[..., None]) -> Callable[..., None]:
    """Return what a real server's plug-ins add: nodes begin with a taint, and pods need a service account."""

    def admit_create(storage: Storage, resource: Any, obj: Obj, *, strict: bool) -> None:
        admit(storage, resource, obj, strict=strict)
        if resource.plural == "nodes":
            obj["spec"] = {"taints": [NOT_READY]}
        if resource.plural == "pods":
            namespace = obj["metadata"]["namespace"]
            if storage.get("serviceaccounts", namespace, "default") is None:
                raise ForbiddenError(
                    f'error looking up service account {namespace}/default: "default" not found'
                )

    return admit_create


def make_pod(name: str, *command: str) -> Obj:
    container = {"name": "trainer", "image": "example/trainer:1", "command": [*command]}
    return {"metadata": {"name": name}, "spec": {"restartPolicy": "Never", "containers": [container]}}


def make_gang(*command: str, queue: str) -> Obj:
    pod = make_pod("", *command)["spec"]
    pod["containers"][0]["resources"] = {"requests": {"cpu": "1", "memory": "1Gi"}}
    job = {"completionMode": "Indexed", "parallelism": 2, "completions": 2, "backoffLimit": 0}
    node = {"name": "node", "replicas": 1, "template": {"spec": {**job, "template": {"spec": pod}}}}
    labels = {"kueue.x-k8s.io/queue-name": queue}
    return {
        "metadata": {"name": "gang", "labels": labels},
        "spec": {"suspend": True, "replicatedJobs": [node]},
    }


def wait_for_phase(cluster: Cluster, phase: str, count: int = 1) -> list[Obj]:
    cluster.wait_for(lambda: len(cluster.pods(phase=phase)) == count)
    return cluster.pods(phase=phase)


# --- a cluster in it -------------------------------------------------------------------------------------


def test_gang_runs_where_the_scheduler_of_a_real_cluster_puts_it(plane: ControlPlane):
    with Cluster() as cluster:
        cluster.add_queue("lq")
        cluster.api.create("jobsets", make_gang("true", queue="lq"), namespace=cluster.namespace)
        cluster.wait_for(lambda: (cluster.jobset("gang") or {}).get("status", {}).get("terminalState"))
        nodes = [node["metadata"]["name"] for node in plane.storage.list("nodes")]
        assert nodes == [f"node-0-{cluster.namespace}", f"node-1-{cluster.namespace}"]
        assert {pod["spec"]["nodeName"] for pod in cluster.pods()} <= {*nodes}
        assert plane.server.counts["create", "pods/binding"] == 0


def test_pods_get_nodes_after_a_while_in_a_real_cluster_without_a_scheduler(plane: ControlPlane, monkeypatch):
    monkeypatch.setattr(clusters, "_SCHEDULER_SECONDS", 0.3)
    plane.has_scheduler = False
    with Cluster() as cluster:
        cluster.api.create("pods", make_pod("one", "true"), namespace=cluster.namespace)
        wait_for_phase(cluster, "Succeeded")


def test_pod_without_a_node_is_left_to_the_scheduler(plane: ControlPlane):
    with Cluster(nodes=0) as cluster:
        cluster.api.create("pods", make_pod("one", "true"), namespace=cluster.namespace)
        plane.storage.create("nodes", {"metadata": {"name": "of-others"}, "spec": {}})
        [pod] = wait_for_phase(cluster, "Succeeded")
        assert pod["spec"]["nodeName"] == "of-others"


def test_pods_of_other_namespaces_are_left_alone(plane: ControlPlane):
    with Cluster() as cluster:
        cluster.api.create("serviceaccounts", {"metadata": {"name": "default"}}, namespace="default")
        cluster.api.create("pods", make_pod("theirs", "true"), namespace="default")
        cluster.api.create("pods", make_pod("ours", "true"), namespace=cluster.namespace)
        wait_for_phase(cluster, "Succeeded")
        theirs = plane.storage.get("pods", "default", "theirs") or {}
        assert theirs["spec"]["nodeName"]
        assert theirs["status"]["phase"] == "Pending"


def test_node_that_is_lost_gets_no_more_pods(plane: ControlPlane):
    with Cluster(nodes=2) as cluster:
        lost, other = (node.name for node in cluster.kubelet.nodes.all())
        cluster.lose_node(lost, taint_after_seconds=60.0)
        cluster.api.create("pods", make_pod("one", "true"), namespace=cluster.namespace)
        [pod] = wait_for_phase(cluster, "Succeeded")
        assert pod["spec"]["nodeName"] == other


def test_nothing_is_left_on_a_real_server_after_a_test_that_failed(plane: ControlPlane):
    with Cluster() as cluster:
        cluster.add_queue("lq")
        cluster.add_priority_class("low", 100)
        cluster.api.create("jobsets", make_gang("sleep", "300", queue="lq"), namespace=cluster.namespace)
        wait_for_phase(cluster, "Running", 2)
    for plural in (
        "jobsets",
        "jobs",
        "pods",
        "nodes",
        "clusterqueues",
        "resourceflavors",
        "workloadpriorityclasses",
    ):
        assert not plane.storage.list(plural), plural
    assert plane.storage.get("namespaces", "", cluster.namespace) is None


def test_what_a_killed_test_has_left_is_removed_by_the_next_one(plane: ControlPlane):
    for name, owner in (("left", NO_PID), ("others", "1")):
        plane.storage.create("nodes", {"metadata": {"name": name, "labels": {OWNER_LABEL: owner}}})
    plane.storage.create("namespaces", {"metadata": {"name": "test-left", "labels": {OWNER_LABEL: NO_PID}}})
    with Cluster(nodes=0):
        assert [node["metadata"]["name"] for node in plane.storage.list("nodes")] == ["others"]
        assert plane.storage.get("namespaces", "", "test-left") is None


def test_priority_class_of_others_with_another_value_is_refused(plane: ControlPlane):
    plane.storage.create("workloadpriorityclasses", {"metadata": {"name": "low"}, "value": 5})
    with (
        Cluster(nodes=0) as cluster,
        pytest.raises(ValueError, match="`low` of this cluster has the value 5, not 7"),
    ):
        cluster.add_priority_class("low", 7)


# --- what it rests on ------------------------------------------------------------------------------------


def test_nodes_are_ready_without_a_taint_and_keep_saying_so(plane: ControlPlane):
    now = 1_800_000_000.0
    objects = NodeObjects(RestClient(plane.server.url), clock=lambda: now)
    nodes = Nodes(1)
    objects.register(nodes.all())
    now += 60.0
    objects.beat(nodes.all())
    [node] = plane.storage.list("nodes")
    ready = node["status"]["conditions"][-1]
    assert (ready["type"], ready["status"], ready["lastHeartbeatTime"]) == (
        "Ready",
        "True",
        "2027-01-15T08:01:00Z",
    )
    assert node["status"]["allocatable"] == {**nodes.all()[0].capacity, "pods": "110"}
    assert not node["spec"].get("taints")
    objects.report_lost("node-0")
    assert plane.storage.list("nodes")[0]["spec"]["taints"][0]["key"] == "node.kubernetes.io/unreachable"


def make_unbound(uid: str, **spec: Any) -> Obj:
    return {"metadata": {"uid": uid}, "spec": {"containers": [], **spec}, "status": {}}


def test_kubelet_chooses_nodes_only_once_a_pod_has_waited_in_vain():
    now = 0.0
    scheduling = Scheduling(RestClient("http://unused"), Nodes(1), patience_seconds=3.0, clock=lambda: now)
    assert scheduling.place(make_unbound("one")) is None
    now = 3.0
    assert scheduling.place(make_unbound("two")) is None  # it has only just come
    assert scheduling.place(make_unbound("one")) == "node-0"
    assert scheduling.place(make_unbound("two")) == "node-0"


def test_kubelet_never_chooses_nodes_where_a_scheduler_has_said_a_word():
    now = 0.0
    scheduling = Scheduling(RestClient("http://unused"), Nodes(1), patience_seconds=3.0, clock=lambda: now)
    pod = make_unbound("one")
    pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]
    scheduling.see(pod)
    assert scheduling.place(pod) is None
    now = 60.0
    assert scheduling.place(pod) is None


def test_pod_that_was_deleted_before_it_ran_has_ended_for_its_job(plane: ControlPlane, tmp_path: Path):
    pod = make_pod("one", "true")
    pod["metadata"] |= {"namespace": "default", "finalizers": ["batch.kubernetes.io/job-tracking"]}
    pod["spec"]["nodeName"] = "of-others"
    plane.storage.create("pods", pod)
    plane.storage.delete("pods", "default", "one")
    kubelet = Kubelet(RestClient(plane.server.url), namespace="default", folder=tmp_path)
    changes = plane.storage.subscribe("pods")
    kubelet.start()
    change = changes.get(timeout=10)
    kubelet.close()
    assert change
    assert change[2]["status"]["phase"] == "Failed"


def test_request_is_repeated_while_a_webhook_is_not_ready():
    faults = Faults()
    faults.fail("create", "configmaps", status=500, times=2, text='failed calling webhook "mjobset.kb.io"')
    with ApiServer(Storage(), faults=faults) as server:
        RestClient(server.url).create("configmaps", {"metadata": {"name": "one"}}, namespace="default")
        assert server.counts["create", "configmaps"] == 3


# --- TLS -------------------------------------------------------------------------------------------------


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate that signs itself, for the loopback and for a client, and return it and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "tls.crt").write_bytes(certificate.public_bytes(pem))
    (folder / "tls.key").write_bytes(key.private_bytes(pem, *plain))
    return folder / "tls.crt", folder / "tls.key"


def write_kubeconfig(path: Path, server: str, cluster: dict[str, Any], user: dict[str, Any]) -> Path:
    content = {
        "clusters": [{"name": "c", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(content))
    return path


def test_pods_run_on_a_server_that_wants_a_client_certificate(plane: ControlPlane, tmp_path: Path):
    certificate, key = make_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificate))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificate, key)
    with ApiServer(plane.storage) as server:
        assert server._http
        server._http.socket = context.wrap_socket(server._http.socket, server_side=True)
        held = base64.b64encode(certificate.read_bytes()).decode()
        user = {"client-certificate-data": held, "client-key": "tls.key"}
        url = server.url.replace("http:", "https:")
        write_kubeconfig(plane.kubeconfig, url, {"certificate-authority-data": held}, user)
        with Cluster() as cluster:
            cluster.api.create("pods", make_pod("one", "sleep", "300"), namespace=cluster.namespace)
            wait_for_phase(cluster, "Running")
        assert server.counts["watch", "pods"] == 1


def test_kubeconfig_may_name_a_token_and_trust_anybody(tmp_path: Path):
    (tmp_path / "token").write_text("secret\n")
    blind = {"insecure-skip-tls-verify": True}
    client = RestClient.connect(
        write_kubeconfig(tmp_path / "kubeconfig", "https://127.0.0.1:6443/", blind, {"tokenFile": "token"})
    )
    assert client._headers == {"Authorization": "Bearer secret"}
    assert client._pool.connection_pool_kw["ssl_context"].verify_mode == ssl.CERT_NONE


def test_kubeconfig_that_logs_in_by_a_program_is_refused(tmp_path: Path):
    path = write_kubeconfig(tmp_path / "kubeconfig", "https://127.0.0.1", {}, {"exec": {"command": "login"}})
    with pytest.raises(ValueError, match="logs in by a program; give it a token or a client certificate"):
        RestClient.connect(path)
