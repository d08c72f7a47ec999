"""The simulated nodes: pods become processes, and the API server hears what becomes of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.simulators.cluster import Cluster
from tests.simulators.kubernetes.objects import Obj
from tests.simulators.kubernetes.podenv import ConfigError, expand, read_field
from tests.simulators.kubernetes.podprocesses import ContainerProcess
from tests.simulators.kubernetes.podstatus import Place

# Says READY once it can be told to stop, leaves a child behind, and exits with 143 on SIGTERM.
STOPPABLE = "trap 'exit 143' TERM; sleep 300 & echo READY; while true; do sleep 0.02; done"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=2, capacity={"cpu": "2", "memory": "8Gi"}) as cluster:
        yield cluster


def create_pod(cluster: Cluster, name: str, *command: str, **changes: Any) -> None:
    container = {"name": "trainer", "image": "example/trainer:1", "command": [*command]}
    for field in ("env", "envFrom", "image", "terminationMessagePolicy", "resources"):
        if field in changes:
            container[field] = changes.pop(field)
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 20, "containers": [container]}
    metadata = {"name": name, **changes.pop("metadata", {})}
    cluster.api.create(
        "pods", {"metadata": metadata, "spec": {**spec, **changes}}, namespace=cluster.namespace
    )


def get_pod(cluster: Cluster, name: str) -> Obj | None:
    return cluster.api.get("pods", name, namespace=cluster.namespace)


def phase_of(cluster: Cluster, name: str) -> str:
    return (get_pod(cluster, name) or {}).get("status", {}).get("phase", "")


def state_of(pod: Obj | None, kind: str) -> Obj:
    statuses = (pod or {}).get("status", {}).get("containerStatuses") or [{}]
    return statuses[0].get("state", {}).get(kind) or {}


def condition_of(pod: Obj | None, kind: str) -> Obj:
    conditions = (pod or {}).get("status", {}).get("conditions") or []
    return next((condition for condition in conditions if condition["type"] == kind), {})


def wait_for_phase(cluster: Cluster, name: str, phase: str) -> Obj:
    cluster.wait_for(lambda: phase_of(cluster, name) == phase)
    return get_pod(cluster, name) or {}


def wait_until_printed(cluster: Cluster, name: str, text: str) -> None:
    wait_for_phase(cluster, name, "Running")
    cluster.wait_for(lambda: text in cluster.log(name))


def wait_for_reason(cluster: Cluster, name: str, reason: str) -> None:
    cluster.wait_for(lambda: state_of(get_pod(cluster, name), "waiting").get("reason") == reason)


def wait_until_gone(cluster: Cluster, name: str) -> None:
    cluster.wait_for(lambda: get_pod(cluster, name) is None)


def run_python(cluster: Cluster, name: str, code: str, **changes: Any) -> str:
    """Run a script as a pod to its end, and return what it printed."""
    create_pod(cluster, name, "python", "-c", code, **changes)
    wait_for_phase(cluster, name, "Succeeded")
    return cluster.log(name)


# --- from creation to end --------------------------------------------------------------------------------


def test_pod_goes_through_the_stages_of_a_real_one(cluster):
    changes = cluster.storage.subscribe("pods")
    create_pod(cluster, "one", "true")
    wait_for_phase(cluster, "one", "Succeeded")
    stages = []
    while change := changes.get(timeout=0):
        pod = change[2]
        stage = (pod["spec"].get("nodeName", ""), pod["status"]["phase"], *_states(pod))
        if stage not in stages:
            stages.append(stage)
    # captured from Kubernetes 1.36.2
    assert stages == [
        ("", "Pending"),
        ("node-0", "Pending"),
        ("node-0", "Pending", "waiting"),
        ("node-0", "Running", "running"),
        ("node-0", "Succeeded", "terminated"),
    ]


def _states(pod: Obj) -> list[str]:
    return [next(iter(status["state"])) for status in pod["status"].get("containerStatuses", [])]


def test_pod_that_runs_is_ready_and_has_an_address_of_its_own(cluster):
    for name in ("one", "two"):
        create_pod(cluster, name, "sleep", "300")
    pods = [wait_for_phase(cluster, name, "Running") for name in ("one", "two")]
    assert all(condition_of(pod, "Ready")["status"] == "True" for pod in pods)
    assert len({pod["status"]["podIP"] for pod in pods}) == 2
    assert all(pod["status"]["podIP"].startswith("127.20.") for pod in pods)
    assert {pod["spec"]["nodeName"] for pod in pods} == {"node-0", "node-1"}


def test_pod_that_fails_reports_exit_code_and_termination_message(cluster):
    create_pod(
        cluster,
        "one",
        "bash",
        "-c",
        'printf \'{"exit_code": 65}\' > "$LOG"; exit 65',
        env=[{"name": "LOG", "value": "/dev/termination-log"}],
    )
    pod = wait_for_phase(cluster, "one", "Failed")
    ended = state_of(pod, "terminated")
    assert (ended["exitCode"], ended["reason"], ended["message"]) == (65, "Error", '{"exit_code": 65}')
    assert condition_of(pod, "Ready") | {"status": "False", "reason": "PodFailed"} == condition_of(
        pod, "Ready"
    )


def test_pod_that_wrote_no_message_falls_back_to_its_log(cluster):
    policy = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    create_pod(cluster, "one", "bash", "-c", "echo out of luck; exit 1", **policy)
    assert state_of(wait_for_phase(cluster, "one", "Failed"), "terminated")["message"] == "out of luck\n"


def test_command_that_does_not_exist_is_a_start_error(cluster):
    create_pod(cluster, "one", "no-such-program")
    ended = state_of(wait_for_phase(cluster, "one", "Failed"), "terminated")
    assert (ended["exitCode"], ended["reason"]) == (128, "StartError")
    assert '"no-such-program": executable file not found in $PATH' in ended["message"]


def test_init_containers_run_first_and_in_order(cluster):
    initial = [
        {"name": name, "image": "x", "command": ["bash", "-c", f"echo {name}"]}
        for name in ("first", "second")
    ]
    create_pod(cluster, "one", "echo", "main", initContainers=initial)
    pod = wait_for_phase(cluster, "one", "Succeeded")
    assert cluster.log("one").split() == ["first", "second", "main"]
    assert [status["name"] for status in pod["status"]["initContainerStatuses"]] == ["first", "second"]


def test_main_container_does_not_run_when_an_init_container_fails(cluster):
    initial = [{"name": "first", "image": "x", "command": ["false"]}]
    create_pod(cluster, "one", "echo", "main", initContainers=initial)
    wait_for_phase(cluster, "one", "Failed")
    assert cluster.log("one") == ""


# --- what a container gets -------------------------------------------------------------------------------

PRINT_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


def test_container_gets_fields_of_its_pod(cluster):
    paths = {
        "POD": "metadata.name",
        "UID_": "metadata.uid",
        "ATTEMPT": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']",
        "NOTE": "metadata.annotations['note']",
        "IP": "status.podIP",
        "NODE": "spec.nodeName",
    }
    env = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in paths.items()]
    metadata = {"labels": {"jobset.sigs.k8s.io/restart-attempt": "2"}, "annotations": {"note": "x"}}
    found = json.loads(run_python(cluster, "one", PRINT_ENVIRONMENT, env=env, metadata=metadata))
    pod = get_pod(cluster, "one") or {}
    assert {name: found[name] for name in paths} == {
        "POD": "one",
        "UID_": pod["metadata"]["uid"],
        "ATTEMPT": "2",
        "NOTE": "x",
        "IP": pod["status"]["podIP"],
        "NODE": pod["spec"]["nodeName"],
    }


def test_container_gets_values_of_secrets(cluster):
    secret = {"metadata": {"name": "keys"}, "data": {"KEY": "c2VjcmV0", "OTHER": "b3RoZXI="}}
    cluster.api.create("secrets", secret, namespace=cluster.namespace)
    found = json.loads(
        run_python(
            cluster,
            "one",
            PRINT_ENVIRONMENT,
            env=[{"name": "API_KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "KEY"}}}],
            envFrom=[{"secretRef": {"name": "keys"}, "prefix": "P_"}],
        )
    )
    assert (found["API_KEY"], found["P_KEY"], found["P_OTHER"]) == ("secret", "secret", "other")


def test_container_inherits_nothing_from_the_test(cluster, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://of-the-test")
    found = json.loads(run_python(cluster, "one", PRINT_ENVIRONMENT))
    assert "PREFECT_API_URL" not in found
    assert found["HOME"] != os.environ["HOME"]
    assert Path(found["TMPDIR"]).parent == Path(found["HOME"]).parent


def test_container_can_import_our_code_and_uses_our_python(cluster):
    printed = run_python(
        cluster, "one", "import sys, prefect_torch_elastic as p; print(sys.executable, p.__file__)"
    )
    assert printed.split()[0] == sys.executable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("$(A)-$(B)", "1-2", id="filled-in"),
        pytest.param("$(C)", "$(C)", id="unknown"),
        pytest.param("$$(A)", "$(A)", id="escaped"),
        pytest.param("$A", "$A", id="not-ours"),
    ],
)
def test_references_in_values_are_expanded(text, expected):
    assert expand(text, {"A": "1", "B": "2"}) == expected


def test_field_that_does_not_exist_is_refused():
    pod = {"metadata": {"name": "one"}, "spec": {}}
    with pytest.raises(ConfigError, match=r"unsupported fieldPath: metadata\.nmae"):
        read_field(pod, "metadata.nmae", Place(node="node-0", host_ip="127.0.0.1"))


# --- names -----------------------------------------------------------------------------------------------

LOOK_UP = """
import socket, sys
for name in sys.argv[1:]:
    try:
        print(socket.getaddrinfo(name, 80, type=socket.SOCK_STREAM)[0][4][0], socket.gethostbyname(name))
    except socket.gaierror as error:
        print(error.errno, error.strerror)
"""


def look_up(cluster: Cluster, *names: str) -> list[str]:
    create_pod(cluster, "asks", "python", "-c", LOOK_UP, *names)
    wait_for_phase(cluster, "asks", "Succeeded")
    return cluster.log("asks").splitlines()


def test_pod_finds_another_by_each_form_of_its_name(cluster):
    create_pod(cluster, "leader", "sleep", "300", hostname="gang-node-0-0", subdomain="gang")
    address = wait_for_phase(cluster, "leader", "Running")["status"]["podIP"]
    short = "gang-node-0-0.gang"
    forms = [short + end for end in ("", ".default", ".default.svc", ".default.svc.cluster.local")]
    assert look_up(cluster, *forms) == [f"{address} {address}"] * 4


def test_name_of_a_pod_that_is_gone_is_unknown(cluster):
    create_pod(cluster, "leader", "true", hostname="gang-node-0-0", subdomain="gang")
    wait_for_phase(cluster, "leader", "Succeeded")
    assert look_up(cluster, "gang-node-0-0.gang") == ["-2 Name or service not known"]


def test_name_stays_unknown_for_the_delay():
    with Cluster(dns_delay_seconds=60.0) as cluster:
        create_pod(cluster, "leader", "sleep", "300", hostname="gang-node-0-0", subdomain="gang")
        wait_for_phase(cluster, "leader", "Running")
        assert look_up(cluster, "gang-node-0-0.gang") == ["-2 Name or service not known"]


# --- deletion --------------------------------------------------------------------------------------------


def test_deleted_pod_gets_sigterm_and_is_reported_before_it_goes(cluster):
    changes = cluster.storage.subscribe("pods")
    create_pod(cluster, "one", "bash", "-c", STOPPABLE)
    wait_until_printed(cluster, "one", "READY")
    cluster.api.delete("pods", "one", namespace=cluster.namespace)
    wait_until_gone(cluster, "one")
    seen = []
    while change := changes.get(timeout=0):
        seen.append(change)
    last = seen[-1][2]
    assert seen[-1][0] == "DELETED"
    assert (last["status"]["phase"], state_of(last, "terminated")["exitCode"]) == ("Failed", 143)


def test_everything_in_a_pod_ends_with_its_first_process(cluster):
    create_pod(cluster, "one", "bash", "-c", "setsid sleep 300 & sleep 300 & echo READY; wait")
    wait_until_printed(cluster, "one", "READY")
    cluster.kill("one")
    assert state_of(wait_for_phase(cluster, "one", "Failed"), "terminated")["exitCode"] == 137
    cluster.api.delete("pods", "one", namespace=cluster.namespace)
    cluster.assert_empty()


def test_process_without_a_handler_ignores_sigterm_like_pid_1(cluster):
    create_pod(cluster, "one", "sleep", "300", terminationGracePeriodSeconds=1)
    wait_for_phase(cluster, "one", "Running")
    changes = cluster.storage.subscribe("pods")
    began = time.monotonic()
    cluster.api.delete("pods", "one", namespace=cluster.namespace)
    wait_until_gone(cluster, "one")
    assert time.monotonic() - began > 0.9
    codes = []
    while change := changes.get(timeout=0):
        codes.append(state_of(change[2], "terminated").get("exitCode"))
    assert codes[-1] == 137


def test_second_deletion_shortens_the_grace_period(cluster):
    create_pod(cluster, "one", "sleep", "300", terminationGracePeriodSeconds=300)
    wait_for_phase(cluster, "one", "Running")
    cluster.api.delete("pods", "one", namespace=cluster.namespace)
    cluster.api.delete("pods", "one", namespace=cluster.namespace, grace_seconds=1)
    wait_until_gone(cluster, "one")


def test_pod_removed_by_force_loses_its_processes(cluster):
    create_pod(cluster, "one", "sleep", "300")
    wait_for_phase(cluster, "one", "Running")
    cluster.api.delete("pods", "one", namespace=cluster.namespace, grace_seconds=0)
    cluster.assert_empty()


# --- what can go wrong -----------------------------------------------------------------------------------


def test_pod_waits_for_an_image_that_is_missing_until_it_is_deleted(cluster):
    create_pod(cluster, "one", "true", image="missing:1")
    for reason in ("ErrImagePull", "ImagePullBackOff"):
        wait_for_reason(cluster, "one", reason)
    cluster.api.delete("pods", "one", namespace=cluster.namespace)
    wait_until_gone(cluster, "one")


def test_pod_runs_once_its_secret_is_there(cluster):
    env = [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "KEY"}}}]
    create_pod(cluster, "one", "true", env=env)
    cluster.wait_for(lambda: state_of(get_pod(cluster, "one"), "waiting").get("message"))
    waiting = state_of(get_pod(cluster, "one"), "waiting")
    assert waiting == {"reason": "CreateContainerConfigError", "message": 'secret "keys" not found'}
    secret = {"metadata": {"name": "keys"}, "data": {"KEY": "c2VjcmV0"}}
    cluster.api.create("secrets", secret, namespace=cluster.namespace)
    wait_for_phase(cluster, "one", "Succeeded")


def test_pod_that_fits_nowhere_waits_until_there_is_room(cluster):
    full = {"resources": {"requests": {"cpu": "2"}}}
    for name in ("one", "two", "three"):
        create_pod(cluster, name, "sleep", "300", **full)
    pod = cluster.wait_for(lambda: _unschedulable(cluster, "three"))
    assert condition_of(pod, "PodScheduled")["message"] == "0/2 nodes are available: 2 Insufficient cpu."
    wait_for_phase(cluster, "one", "Running")
    cluster.kill("one")
    wait_for_phase(cluster, "three", "Running")


def test_pod_runs_on_a_node_that_is_added(cluster):
    create_pod(cluster, "one", "sleep", "300", nodeSelector={"zone": "b"})
    pod = cluster.wait_for(lambda: _unschedulable(cluster, "one"))
    assert "2 node(s) didn't match Pod's node affinity/selector" in str(pod["status"])
    cluster.add_nodes(1, {"zone": "b"})
    assert wait_for_phase(cluster, "one", "Running")["spec"]["nodeName"] == "node-2"


def _unschedulable(cluster: Cluster, name: str) -> Obj | None:
    pod = get_pod(cluster, name)
    return pod if condition_of(pod, "PodScheduled").get("reason") == "Unschedulable" else None


def test_pod_killed_for_its_memory_says_so(cluster):
    create_pod(cluster, "one", "sleep", "300")
    wait_for_phase(cluster, "one", "Running")
    cluster.oom_kill("one")
    ended = state_of(wait_for_phase(cluster, "one", "Failed"), "terminated")
    assert (ended["exitCode"], ended["reason"]) == (137, "OOMKilled")


def test_pod_evicted_by_its_node_says_why(cluster):
    create_pod(cluster, "one", "sleep", "300")
    wait_for_phase(cluster, "one", "Running")
    cluster.evict("one", "ephemeral-storage")
    pod = wait_for_phase(cluster, "one", "Failed")
    assert pod["status"]["reason"] == "Evicted"
    assert pod["status"]["message"].startswith("The node was low on resource: ephemeral-storage.")
    assert condition_of(pod, "DisruptionTarget")["reason"] == "TerminationByKubelet"


def test_drained_pod_is_stopped_like_a_deleted_one(cluster):
    changes = cluster.storage.subscribe("pods")
    create_pod(cluster, "one", "bash", "-c", STOPPABLE)
    wait_until_printed(cluster, "one", "READY")
    cluster.drain("one")
    wait_until_gone(cluster, "one")
    last: Obj = {}
    while change := changes.get(timeout=0):
        last = change[2]
    assert condition_of(last, "DisruptionTarget")["reason"] == "EvictionByEvictionAPI"
    assert state_of(last, "terminated")["exitCode"] == 143


def test_pod_on_a_lost_node_seems_to_run_until_the_node_is_given_up(cluster):
    create_pod(cluster, "one", "sleep", "300")
    node = wait_for_phase(cluster, "one", "Running")["spec"]["nodeName"]
    cluster.lose_node(node, taint_after_seconds=0.2, remove_after_seconds=0.2)
    assert phase_of(cluster, "one") == "Running"
    cluster.wait_for(lambda: "deletionTimestamp" in (get_pod(cluster, "one") or {"metadata": {}})["metadata"])
    assert condition_of(get_pod(cluster, "one"), "DisruptionTarget")["reason"] == "DeletionByTaintManager"
    wait_until_gone(cluster, "one")
    assert cluster.api.get("nodes", node) is None


def test_kubelet_goes_on_when_its_connections_break(cluster):
    create_pod(cluster, "one", "sleep", "300")
    wait_for_phase(cluster, "one", "Running")
    cluster.backdoor.drop_connections()
    create_pod(cluster, "two", "true")
    wait_for_phase(cluster, "two", "Succeeded")
    assert phase_of(cluster, "one") == "Running"


# --- the end ---------------------------------------------------------------------------------------------


def test_cluster_leaves_no_process_and_no_thread_of_its_own(no_leftovers):
    before = set(threading.enumerate())
    with Cluster() as cluster:
        create_pod(cluster, "one", "bash", "-c", "setsid sleep 300 & echo READY; wait")
        wait_until_printed(cluster, "one", "READY")
        folder = cluster.kubeconfig.parent
    assert set(threading.enumerate()) <= before
    assert not folder.exists()


def test_objects_left_behind_are_named(cluster):
    create_pod(cluster, "one", "sleep", "300")
    wait_for_phase(cluster, "one", "Running")
    with pytest.raises(AssertionError, match=r"pods/one(.|\n)*process \d+: sleep 300"):
        cluster.assert_empty(timeout_seconds=0.0)


def test_kubelet_of_its_own_process_runs_pods_and_they_die_with_it(cluster):
    cluster.kubelet.close()
    command = [sys.executable, "-m", "tests.simulators.kubelet", "--kubeconfig", str(cluster.kubeconfig)]
    kubelet = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[1])
    try:
        create_pod(cluster, "one", "bash", "-c", "echo $BASHPID; exec sleep 300")
        pod = wait_for_phase(cluster, "one", "Running")
        log = Path(pod["metadata"]["annotations"]["simulator/log"])
        cluster.wait_for(lambda: log.read_text().strip())
        pid = int(log.read_text())
    finally:
        kubelet.kill()
        kubelet.wait()
    cluster.wait_for(lambda: not Path(f"/proc/{pid}").exists())


def test_container_dies_with_the_thread_that_started_it(tmp_path):
    made: list[ContainerProcess] = []

    def start() -> None:
        options = {"environment": {"PATH": os.environ["PATH"]}, "folder": tmp_path, "mark": "test"}
        made.append(ContainerProcess(["bash", "-c", "echo READY; sleep 300"], log=log, **options))
        while "READY" not in log.read_text():  # only then is the kernel asked
            time.sleep(0.01)

    log = tmp_path / "log"
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert made[0].wait() == 128 + signal.SIGKILL


# --- a whole cluster -------------------------------------------------------------------------------------

FIND_LEADER = """
import os, socket, sys, time
leader = "gang-node-0-0.gang"
if os.environ["JOB_COMPLETION_INDEX"] == "0":
    server = socket.create_server((os.environ["IP"], 29400))
    server.accept()[0].sendall(b"hello")
else:
    while True:
        try:
            print(socket.create_connection((leader, 29400)).recv(5).decode())
            break
        except OSError:
            time.sleep(0.02)
"""


def create_gang(cluster: Cluster, *command: str, nnodes: int = 2, **labels: str) -> None:
    address = {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    trainer = {"name": "trainer", "image": "example/trainer:1", "command": [*command], "env": [address]}
    trainer["resources"] = {"requests": {"cpu": "1", "memory": "1Gi"}}
    pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 20, "containers": [trainer]}
    job = {"completionMode": "Indexed", "parallelism": nnodes, "completions": nnodes, "backoffLimit": 0}
    node = {"name": "node", "replicas": 1, "template": {"spec": {**job, "template": {"spec": pod}}}}
    labels = {f"kueue.x-k8s.io/{name.replace('_', '-')}": value for name, value in labels.items()}
    body = {"metadata": {"name": "gang", "labels": labels}, "spec": {"replicatedJobs": [node]}}
    cluster.api.create("jobsets", body, namespace=cluster.namespace)


def wait_for_end(cluster: Cluster) -> str:
    return cluster.wait_for(lambda: (cluster.jobset("gang") or {}).get("status", {}).get("terminalState"))


def test_pods_of_a_gang_find_their_leader(cluster):
    create_gang(cluster, "python", "-c", FIND_LEADER)
    assert wait_for_end(cluster) == "Completed"
    [follower] = [pod["metadata"]["name"] for pod in cluster.pods("gang") if "-node-0-1-" in str(pod)]
    assert cluster.log(follower) == "hello\n"
    cluster.api.delete("jobsets", "gang", namespace=cluster.namespace, propagation="Foreground")
    cluster.assert_empty()


def test_gang_of_a_stopped_queue_is_evicted_and_comes_back(cluster):
    cluster.add_queue("lq")
    create_gang(cluster, "bash", "-c", STOPPABLE, queue_name="lq")
    cluster.wait_for(lambda: len(cluster.pods("gang", phase="Running")) == 2)
    first = {pod["metadata"]["uid"] for pod in cluster.pods("gang")}
    cluster.hold()
    cluster.wait_for(lambda: not cluster.pods("gang"))
    cluster.resume()
    cluster.wait_for(lambda: len(cluster.pods("gang", phase="Running")) == 2)
    assert first.isdisjoint(pod["metadata"]["uid"] for pod in cluster.pods("gang"))


def test_waiting_in_vain_shows_what_there_is(cluster):
    create_pod(cluster, "one", "true", image="missing:1")
    wait_for_reason(cluster, "one", "ErrImagePull")
    with pytest.raises(AssertionError, match="pods one: Pending PodScheduled=True"):
        cluster.wait_for(lambda: False, timeout_seconds=0.0)


# --- hollow pods -----------------------------------------------------------------------------------------


def test_hollow_pod_runs_without_a_process_until_it_is_told_to_end():
    with Cluster(hollow=True) as cluster:
        create_pod(cluster, "one", "no-such-program")
        wait_for_phase(cluster, "one", "Running")
        cluster.finish("one", 65)
        assert state_of(get_pod(cluster, "one"), "terminated")["exitCode"] == 65


def test_hollow_pod_goes_when_it_is_deleted():
    with Cluster(hollow=True) as cluster:
        create_pod(cluster, "one", "no-such-program")
        wait_for_phase(cluster, "one", "Running")
        cluster.api.delete("pods", "one", namespace=cluster.namespace)
        wait_until_gone(cluster, "one")
