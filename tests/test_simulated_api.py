"""The simulated Kubernetes API, asked with the official client: it must answer as a real one does.

The texts are captured from Kubernetes 1.36.2, JobSet 0.12.0 and Kueue 0.19.2.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import urllib3

pytest.importorskip("kubernetes")

from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException

from tests.simulators.kubernetes.schemas import find_problems
from tests.simulators.kubernetes.server import ApiServer
from tests.simulators.kubernetes.storage import Storage

JOBSETS = ("jobset.x-k8s.io", "v1alpha2", "default", "jobsets")
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"


def make_jobset(name: str, *, labels: dict[str, str] | None = None, replicated: str = "w") -> dict[str, Any]:
    container = {"name": "main", "image": "example.invalid/train:1", "command": ["python", "-m", "train"]}
    pod = {"restartPolicy": "Never", "containers": [container]}
    job = {"parallelism": 2, "completions": 2, "backoffLimit": 0, "template": {"spec": pod}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {"replicatedJobs": [{"name": replicated, "template": {"spec": job}}]},
    }


def make_pod(name: str, *, labels: dict[str, str] | None = None) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {"containers": [{"name": "main", "image": "example/train:1"}]},
    }


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer(Storage(), bookmark_seconds=0.1) as server:
        yield server


@pytest.fixture
def api(server: ApiServer, tmp_path: Path) -> SimpleNamespace:
    """The official client's APIs, configured through a kubeconfig."""
    kubeconfig = server.write_kubeconfig(tmp_path / "kubeconfig")
    connected = config.new_client_from_config(config_file=str(kubeconfig))
    return SimpleNamespace(
        objects=client.CustomObjectsApi(connected),
        core=client.CoreV1Api(connected),
        batch=client.BatchV1Api(connected),
        access=client.AuthorizationV1Api(connected),
        client=connected,
    )


def create(api: SimpleNamespace, jobset: dict[str, Any], **options: str) -> dict[str, Any]:
    return api.objects.create_namespaced_custom_object(*JOBSETS, jobset, **options)


def read_refusal(caught: pytest.ExceptionInfo[ApiException]) -> tuple[int, str]:
    return int(caught.value.status or 0), json.loads(caught.value.body or "")["message"]


def test_api_creates_a_jobset_with_the_defaults_of_its_webhooks(api: SimpleNamespace) -> None:
    created = create(api, make_jobset("dup", labels={QUEUE: "lq"}))

    assert created["spec"]["suspend"] is True  # Kueue's webhook: it has a queue
    assert created["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    assert created["spec"]["replicatedJobs"][0]["groupName"] == "default"
    assert created["spec"]["replicatedJobs"][0]["template"]["spec"]["completionMode"] == "Indexed"
    assert created["metadata"]["generation"] == 1
    assert created["metadata"]["uid"]
    assert "status" not in created


def test_api_stores_nothing_in_a_dry_run(api: SimpleNamespace, server: ApiServer) -> None:
    created = create(api, make_jobset("dry"), dry_run="All")

    assert created["metadata"]["uid"]
    assert "resourceVersion" not in created["metadata"]
    assert server.storage.list("jobsets") == []


@pytest.mark.parametrize("length", [pytest.param(51, id="fits"), pytest.param(52, id="too-long")])
def test_api_holds_names_of_jobsets_to_their_budget_c043(api: SimpleNamespace, length: int) -> None:
    name = "a" * length
    if length == 51:
        assert create(api, make_jobset(name))["metadata"]["name"] == name
        return
    with pytest.raises(ApiException) as caught:
        create(api, make_jobset(name))

    assert read_refusal(caught) == (
        422,
        f'admission webhook "vjobset.kb.io" denied the request: JobSet.jobset.x-k8s.io "{name}" is invalid: '
        f'spec.replicatedJobs[0].name: Invalid value: "{name}-w-0": JobSet name is too long, pod names '
        "generated for this JobSet will exceed 63 characters",
    )


_LABEL_1035 = (
    "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic "
    "character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for "
    "validation is '[a-z]([-a-z0-9]*[a-z0-9])?')"
)
_SUBDOMAIN_1123 = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must "
    "start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    r"'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
_LABEL_VALUE = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must "
    "start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used "
    "for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)
_DENIED = 'admission webhook "vjobset.kb.io" denied the request: '
_LONG = "w" * 60
_REFUSED: list[Any] = [
    pytest.param(
        make_jobset("Bad_Name"),
        'JobSet.jobset.x-k8s.io "Bad_Name" is invalid: metadata.name: Invalid value: "Bad_Name": '
        + _SUBDOMAIN_1123,
        id="upper-case",
    ),
    pytest.param(
        make_jobset("x.y"),
        f'{_DENIED}JobSet.jobset.x-k8s.io "x.y" is invalid: spec.replicatedJobs[0].name: Invalid value: '
        f'"x.y-w-0": {_LABEL_1035}',
        id="dot",
    ),
    pytest.param(
        make_jobset("1abc"),
        f'{_DENIED}JobSet.jobset.x-k8s.io "1abc" is invalid: spec.replicatedJobs[0].name: Invalid value: '
        f'"1abc-w-0": {_LABEL_1035}',
        id="digit-first",
    ),
    pytest.param(
        make_jobset("okname", replicated=_LONG),
        f'{_DENIED}JobSet.jobset.x-k8s.io "okname" is invalid: [spec.replicatedJobs[0].name: Invalid value: '
        f'"okname-{_LONG}-0": JobSet name is too long, job names generated for this JobSet will exceed 63 '
        f'characters, spec.replicatedJobs[0].name: Invalid value: "okname-{_LONG}-0": JobSet name is too '
        "long, pod names generated for this JobSet will exceed 63 characters]",
        id="long-replicated-job",
    ),
    pytest.param(
        make_jobset("badq", labels={QUEUE: "Bad_Queue!"}),
        'JobSet.jobset.x-k8s.io "badq" is invalid: metadata.labels: Invalid value: "Bad_Queue!": '
        + _LABEL_VALUE,
        id="label",
    ),
]


@pytest.mark.parametrize(("jobset", "message"), _REFUSED)
def test_api_refuses_a_jobset_in_the_words_of_a_real_one_c047(
    api: SimpleNamespace, jobset: dict[str, Any], message: str
) -> None:
    with pytest.raises(ApiException) as caught:
        create(api, jobset)

    assert read_refusal(caught) == (422, message)


def test_api_refuses_two_replicated_jobs_of_one_name(api: SimpleNamespace) -> None:
    jobset = make_jobset("two")
    jobset["spec"]["replicatedJobs"] *= 2
    with pytest.raises(ApiException) as caught:
        create(api, jobset)

    assert read_refusal(caught) == (
        422,
        'JobSet.jobset.x-k8s.io "two" is invalid: spec.replicatedJobs[1]: Duplicate value: {"name":"w"}',
    )


def test_api_drops_unknown_fields_unless_it_is_to_be_strict(api: SimpleNamespace) -> None:
    jobset = make_jobset("unk")
    jobset["spec"]["nonsense"] = 1

    assert "nonsense" not in create(api, jobset)["spec"]
    with pytest.raises(ApiException) as caught:
        create(api, jobset, field_validation="Strict")
    assert read_refusal(caught) == (
        400,
        'JobSet in version "v1alpha2" cannot be handled as a JobSet: strict decoding error: unknown field '
        '"spec.nonsense"',
    )


def test_api_refuses_a_second_object_of_one_name(api: SimpleNamespace) -> None:
    create(api, make_jobset("dup"))
    with pytest.raises(ApiException) as caught:
        create(api, make_jobset("dup"))

    assert read_refusal(caught) == (409, 'jobsets.jobset.x-k8s.io "dup" already exists')


_CHANGES: list[Any] = [
    pytest.param(
        {"spec": {"replicatedJobs": []}},
        422,
        f'{_DENIED}JobSet.jobset.x-k8s.io "dup" is invalid: spec.replicatedJobs: Invalid value: null: field '
        "is immutable",
        id="replicated-jobs",
    ),
    pytest.param(
        {"metadata": {"labels": {QUEUE: "other"}}},
        403,
        f'{_DENIED}metadata.labels[{QUEUE}]: Invalid value: "other": field is immutable',
        id="queue",
    ),
    pytest.param(
        {"metadata": {"labels": {PRIORITY: "high"}}},
        403,
        f'{_DENIED}metadata.labels[{PRIORITY}]: Invalid value: "high": WorkloadPriorityClass cannot be added '
        "to a non-suspended workload",
        id="priority",
    ),
]


@pytest.mark.parametrize(("patch", "status", "message"), _CHANGES)
def test_api_refuses_changes_of_a_running_jobset(
    api: SimpleNamespace, server: ApiServer, patch: dict[str, Any], status: int, message: str
) -> None:
    create(api, make_jobset("dup", labels={QUEUE: "lq"}))
    server.storage.mutate("jobsets", "default", "dup", lambda jobset: jobset["spec"].update(suspend=False))
    with pytest.raises(ApiException) as caught:
        api.objects.patch_namespaced_custom_object(*JOBSETS, "dup", patch)

    assert read_refusal(caught) == (status, message)


def test_api_lets_a_suspended_jobset_change_what_kueue_changes(api: SimpleNamespace) -> None:
    jobset = create(api, make_jobset("kq", labels={QUEUE: "lq"}))
    template = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    template["metadata"]["labels"] = {"kueue.x-k8s.io/podset": "w"}
    template["spec"]["nodeSelector"] = {"pool": "a"}

    changed = api.objects.replace_namespaced_custom_object(*JOBSETS, "kq", jobset)

    assert changed["metadata"]["generation"] == 2


_WRONG_PODS: list[Any] = [
    pytest.param(
        {"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}}, "requests", id="request-over-limit"
    ),
    pytest.param({"volumeMounts": [{"name": "x", "mountPath": "/x"}]}, "volumeMounts[0].name", id="mount"),
    pytest.param({"image": ""}, "image: Required value", id="image"),
    pytest.param({"resources": {"limits": {"nvidia.com/gpu": "0.5"}}}, "must be an integer", id="half-a-gpu"),
]


@pytest.mark.parametrize(("wrong", "said"), _WRONG_PODS)
def test_api_sees_mistakes_of_a_pod_template_in_pod_and_job_but_not_in_a_jobset(
    api: SimpleNamespace, wrong: dict[str, Any], said: str
) -> None:
    jobset, pod = make_jobset("gang"), make_pod("one")
    template = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    template["completionMode"] = "Indexed"
    for container in (template["template"]["spec"]["containers"][0], pod["spec"]["containers"][0]):
        container.update(wrong)

    assert create(api, jobset, dry_run="All")
    for refused in (
        lambda: api.core.create_namespaced_pod("default", pod, dry_run="All"),
        lambda: api.batch.create_namespaced_job(
            "default",
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": template},
            dry_run="All",
        ),
    ):
        with pytest.raises(ApiException) as caught:
            refused()
        status, message = read_refusal(caught)
        assert status == 422
        assert said in message


def test_api_keeps_status_and_spec_apart(api: SimpleNamespace) -> None:
    jobset = create(api, make_jobset("st"))
    jobset["status"] = {"restarts": 1}
    replaced = api.objects.replace_namespaced_custom_object(*JOBSETS, "st", jobset)
    assert "status" not in replaced

    patch = {"spec": {"suspend": True}, "status": {"restarts": 1}}
    patched = api.objects.patch_namespaced_custom_object_status(*JOBSETS, "st", patch)

    assert patched["status"] == {"restarts": 1}
    assert "suspend" not in patched["spec"]


def test_api_refuses_a_put_of_an_old_version(api: SimpleNamespace) -> None:
    old = create(api, make_jobset("old"))
    api.objects.patch_namespaced_custom_object(*JOBSETS, "old", {"metadata": {"labels": {"a": "b"}}})
    with pytest.raises(ApiException) as caught:
        api.objects.replace_namespaced_custom_object(*JOBSETS, "old", old)

    status, message = read_refusal(caught)
    assert (status, "the object has been modified" in message) == (409, True)


def test_api_deletes_a_jobset_at_once_in_the_background(api: SimpleNamespace) -> None:
    uid = create(api, make_jobset("bg"))["metadata"]["uid"]

    said = api.objects.delete_namespaced_custom_object(*JOBSETS, "bg", propagation_policy="Background")

    assert said == {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
        "details": {"name": "bg", "group": "jobset.x-k8s.io", "kind": "jobsets", "uid": uid},
    }


def test_api_keeps_a_jobset_in_the_foreground_until_its_finalizer_goes(
    api: SimpleNamespace, server: ApiServer
) -> None:
    create(api, make_jobset("fg"))
    metadata = api.objects.delete_namespaced_custom_object(*JOBSETS, "fg", propagation_policy="Foreground")[
        "metadata"
    ]
    assert metadata["finalizers"] == ["foregroundDeletion"]
    assert (metadata["deletionGracePeriodSeconds"], metadata["generation"]) == (0, 2)

    server.storage.mutate("jobsets", "default", "fg", lambda jobset: jobset["metadata"].update(finalizers=[]))

    with pytest.raises(ApiException) as caught:
        api.objects.get_namespaced_custom_object(*JOBSETS, "fg")
    assert read_refusal(caught) == (404, 'jobsets.jobset.x-k8s.io "fg" not found')


def test_api_deletes_only_the_object_that_was_meant(api: SimpleNamespace) -> None:
    create(api, make_jobset("other"))
    options = {"preconditions": {"uid": "11111111-2222-3333-4444-555555555555"}}
    with pytest.raises(ApiException) as caught:
        api.objects.delete_namespaced_custom_object(*JOBSETS, "other", body=options)

    assert caught.value.status == 409
    assert "Precondition failed: UID in precondition" in read_refusal(caught)[1]


def test_api_keeps_a_deleted_pod_until_its_kubelet_is_done(api: SimpleNamespace, server: ApiServer) -> None:
    api.core.create_namespaced_pod("default", make_pod("p"))
    api.core.create_namespaced_pod_binding(
        "p", "default", {"target": {"kind": "Node", "name": "node-0"}}, _preload_content=False
    )

    api.core.delete_namespaced_pod("p", "default")

    metadata = api.core.read_namespaced_pod("p", "default").metadata
    assert metadata.deletion_grace_period_seconds == 30
    server.storage.finish_pod_deletion("default", "p")
    assert server.storage.get("pods", "default", "p") is None


def test_api_says_disruption_on_an_evicted_pod(api: SimpleNamespace, server: ApiServer) -> None:
    api.core.create_namespaced_pod("default", make_pod("p"))
    server.storage.mutate("pods", "default", "p", lambda pod: pod["spec"].update(nodeName="node-0"))

    api.core.create_namespaced_pod_eviction(
        "p", "default", {"metadata": {"name": "p"}}, _preload_content=False
    )

    pod = server.storage.get("pods", "default", "p")
    assert pod is not None
    assert pod["status"]["conditions"][0]["reason"] == "EvictionByEvictionAPI"
    assert "deletionTimestamp" in pod["metadata"]


_SELECTORS: list[Any] = [
    pytest.param("app=a", ["p0", "p2"], id="equal"),
    pytest.param("app!=a", ["p1", "p3"], id="unequal"),
    pytest.param("app in (a, b),tier", ["p1"], id="in-and-exists"),
    pytest.param("app notin (a),!tier", ["p3"], id="notin-and-absent"),
]


@pytest.mark.parametrize(("selector", "names"), _SELECTORS)
def test_api_lists_what_labels_select(api: SimpleNamespace, selector: str, names: list[str]) -> None:
    for index, labels in enumerate([{"app": "a"}, {"app": "b", "tier": "x"}, {"app": "a"}, {}]):
        api.core.create_namespaced_pod("default", make_pod(f"p{index}", labels=labels))

    found = api.core.list_namespaced_pod("default", label_selector=selector)

    assert [pod.metadata.name for pod in found.items] == names


def test_api_lists_in_pages(api: SimpleNamespace) -> None:
    for index in range(5):
        api.core.create_namespaced_pod("default", make_pod(f"p{index}"))

    first = api.core.list_namespaced_pod("default", limit=3)
    rest = api.core.list_namespaced_pod("default", limit=3, _continue=first.metadata._continue)

    assert first.metadata.remaining_item_count == 2
    assert [pod.metadata.name for pod in (*first.items, *rest.items)] == [f"p{i}" for i in range(5)]


def test_api_lists_built_in_kinds_without_their_kind(api: SimpleNamespace) -> None:
    create(api, make_jobset("one"))
    api.core.create_namespaced_pod("default", make_pod("p"))

    pods = json.loads(api.core.list_namespaced_pod("default", _preload_content=False).data)
    jobsets = api.objects.list_namespaced_custom_object(*JOBSETS)

    assert (pods["kind"], "kind" in pods["items"][0]) == ("PodList", False)
    assert jobsets["items"][0]["kind"] == "JobSet"


def follow(api: SimpleNamespace, **options: Any) -> list[tuple[str, str]]:
    """Return type and name of all events within a second, by the official client."""
    stream: Any = watch.Watch().stream(
        api.objects.list_namespaced_custom_object, *JOBSETS, timeout_seconds=1, **options
    )
    return [(event["type"], event["object"]["metadata"]["name"]) for event in stream]


def test_watch_tells_changes_from_the_version_of_a_list(api: SimpleNamespace, server: ApiServer) -> None:
    create(api, make_jobset("before"))
    version = api.objects.list_namespaced_custom_object(*JOBSETS)["metadata"]["resourceVersion"]
    create(api, make_jobset("js", labels={"a": "1"}))
    server.storage.mutate("jobsets", "default", "js", lambda js: js["metadata"].update(labels={"a": "2"}))
    server.storage.delete("jobsets", "default", "js")

    events = follow(api, resource_version=version)

    assert events == [("ADDED", "js"), ("MODIFIED", "js"), ("DELETED", "js")]


def test_watch_says_added_and_deleted_when_an_object_enters_and_leaves_its_selector(
    api: SimpleNamespace, server: ApiServer
) -> None:
    version = str(server.storage.version)
    create(api, make_jobset("js"))
    for value in ("in", "out"):
        server.storage.mutate(
            "jobsets", "default", "js", lambda js, v=value: js["metadata"].update(labels={"a": v})
        )

    events = follow(api, resource_version=version, label_selector="a=in")

    assert events == [("ADDED", "js"), ("DELETED", "js")]


def open_raw_watch(server: ApiServer, plural: str = "pods", **query: str) -> urllib3.BaseHTTPResponse:
    fields = {"watch": "true", "resourceVersion": str(server.storage.version), **query}
    path = "/api/v1/namespaces/default/" + plural
    return urllib3.PoolManager().request(
        "GET", server.url + path, fields=fields, preload_content=False, retries=False, timeout=5.0
    )


def read_events(response: urllib3.BaseHTTPResponse, count: int) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    left = b""
    for chunk in response.stream():
        *lines, left = (left + chunk).split(b"\n")
        events += map(json.loads, lines)
        if len(events) >= count:
            break
    response.close()
    return events


def test_watch_gives_bookmarks_with_the_version_it_has_come_to(server: ApiServer) -> None:
    response = open_raw_watch(server, allowWatchBookmarks="true", timeoutSeconds="5")
    server.storage.create("secrets", {"metadata": {"name": "unseen"}})  # another kind moves the version on

    event = read_events(response, 1)[0]

    assert event["type"] == "BOOKMARK"
    assert int(event["object"]["metadata"]["resourceVersion"]) == server.storage.version


def test_watch_ends_with_an_error_when_its_version_is_forgotten(
    api: SimpleNamespace, server: ApiServer
) -> None:
    server.storage.forget_history()
    server.storage.create("secrets", {"metadata": {"name": "later"}})

    event = read_events(open_raw_watch(server, resourceVersion="1"), 1)[0]

    assert (event["type"], event["object"]["code"], event["object"]["reason"]) == ("ERROR", 410, "Expired")


def wait_for_watch(server: ApiServer) -> None:
    deadline = time.monotonic() + 5
    while server.open_watches == 0 and time.monotonic() < deadline:
        time.sleep(0.005)


def test_watch_is_reset_when_a_fault_drops_it(server: ApiServer) -> None:
    response = open_raw_watch(server)
    wait_for_watch(server)
    server.faults.break_watches("pods", "drop")

    with pytest.raises(urllib3.exceptions.ProtocolError):
        read_events(response, 1)


def test_watch_goes_on_after_a_line_of_garbage(server: ApiServer) -> None:
    server.faults.break_watches("pods", "garbage")
    response = open_raw_watch(server)
    lines = response.stream()
    assert next(lines).startswith(b"<html>")

    server.storage.create("pods", make_pod("p"))

    assert json.loads(next(lines))["type"] == "ADDED"
    response.close()


def test_watch_says_nothing_more_when_a_fault_stalls_it(server: ApiServer) -> None:
    server.faults.break_watches("pods", "stall")
    response = open_raw_watch(server, timeoutSeconds="1", allowWatchBookmarks="true")
    server.storage.create("pods", make_pod("p"))

    assert list(response.stream()) == []


def test_watch_sends_thousands_of_events_within_a_second(server: ApiServer) -> None:
    response = open_raw_watch(server)
    wait_for_watch(server)
    writer = threading.Thread(
        target=lambda: [server.storage.create("pods", make_pod(f"p{i}")) for i in range(4000)]
    )
    started = time.monotonic()
    writer.start()

    events = read_events(response, 4000)

    writer.join()
    assert [event["object"]["metadata"]["name"] for event in events] == [f"p{i}" for i in range(4000)]
    assert time.monotonic() - started < 10  # a second on a quiet machine


def test_api_fails_as_often_as_it_is_told(api: SimpleNamespace, server: ApiServer) -> None:
    text = 'failed calling webhook "mjobset.kb.io": no endpoints available'
    server.faults.fail("create", "jobsets", status=500, text=text)
    with pytest.raises(ApiException) as caught:
        create(api, make_jobset("js"))
    assert read_refusal(caught) == (500, text)

    assert create(api, make_jobset("js"))


def test_api_does_what_was_asked_when_its_answer_is_lost(api: SimpleNamespace, server: ApiServer) -> None:
    server.faults.lose_answers("create", "jobsets")

    with pytest.raises(urllib3.exceptions.HTTPError):
        create(api, make_jobset("js"))

    assert server.storage.get("jobsets", "default", "js")


def test_api_reviews_and_refuses_what_is_denied(api: SimpleNamespace, server: ApiServer) -> None:
    server.faults.deny("create", "jobsets")

    def may(verb: str) -> bool:
        attributes = {
            "verb": verb,
            "group": "jobset.x-k8s.io",
            "resource": "jobsets",
            "namespace": "default",
        }
        body: Any = {"spec": {"resourceAttributes": attributes}}
        return api.access.create_self_subject_access_review(body).status.allowed

    assert (may("create"), may("get")) == (False, True)
    with pytest.raises(ApiException) as caught:
        create(api, make_jobset("js"))
    assert read_refusal(caught) == (
        403,
        'jobsets.jobset.x-k8s.io is forbidden: User "system:serviceaccount:default:simulated" cannot create '
        'resource "jobsets" in API group "jobset.x-k8s.io" in the namespace "default"',
    )


def test_api_knows_nothing_of_a_group_that_is_not_installed(api: SimpleNamespace, server: ApiServer) -> None:
    assert "jobset.x-k8s.io" in {group.name for group in client.ApisApi(api.client).get_api_versions().groups}
    server.absent_groups.add("jobset.x-k8s.io")

    with pytest.raises(ApiException) as caught:
        create(api, make_jobset("js"))

    assert (caught.value.status, str(caught.value.body).strip()) == (404, "404 page not found")


def test_api_refuses_a_namespace_that_is_not_there(api: SimpleNamespace) -> None:
    with pytest.raises(ApiException) as caught:
        api.core.create_namespaced_pod("nowhere", make_pod("p"))

    assert read_refusal(caught) == (404, 'namespaces "nowhere" not found')


def test_api_reads_the_end_of_a_log(api: SimpleNamespace, server: ApiServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    pod = make_pod("p")
    pod["metadata"]["annotations"] = {"simulator/log": str(log)}
    server.storage.create("pods", pod)
    with pytest.raises(ApiException) as caught:
        api.core.read_namespaced_pod_log("p", "default")
    assert read_refusal(caught) == (
        400,
        'container "main" in pod "p" is waiting to start: ContainerCreating',
    )

    log.write_text("one\ntwo\nthree\n")

    assert api.core.read_namespaced_pod_log("p", "default", tail_lines=2) == "two\nthree\n"


def test_api_ranks_workloads_that_wait_by_priority_and_age(api: SimpleNamespace, server: ApiServer) -> None:
    queue = {"metadata": {"name": "lq"}, "spec": {"clusterQueue": "cq"}}
    server.storage.create("localqueues", queue)
    for name, priority in (("old", 0), ("young", 0), ("high", 100)):
        spec = {"queueName": "lq", "priority": priority}
        server.storage.create("workloads", {"metadata": {"name": name}, "spec": spec})

    path = "/apis/visibility.kueue.x-k8s.io/v1beta2/namespaces/default/localqueues/lq/pendingworkloads"
    items = urllib3.PoolManager().request("GET", server.url + path).json()["items"]

    assert [item["metadata"]["name"] for item in items] == ["high", "old", "young"]
    assert [item["positionInLocalQueue"] for item in items] == [0, 1, 2]


def test_api_counts_requests(api: SimpleNamespace, server: ApiServer) -> None:
    create(api, make_jobset("js"))
    api.core.list_namespaced_pod("default")

    assert server.counts == {("create", "jobsets"): 1, ("list", "pods"): 1}


def test_schemas_name_every_problem_of_a_manifest() -> None:
    jobset = make_jobset("js")
    template = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    template["containers"][0]["env"] = [{"name": "N", "value": 4}]
    template["imagePullSecret"] = "x"

    where = "spec.replicatedJobs[0].template.spec.template.spec"
    assert find_problems(jobset) == [
        f'{where}.containers[0].env[0].value: Invalid value: "integer": '
        f'{where}.containers[0].env[0].value in body must be of type string: "integer"',
        f'unknown field "{where}.imagePullSecret"',
    ]
