"""The client against an API that answers as it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_elastic.errors import MissingExtraError
from prefect_torch_elastic.kubernetes import client
from prefect_torch_elastic.kubernetes.client import Cluster, ClusterError, Kind
from prefect_torch_elastic.kubernetes.connection import Connection, load_configuration
from tests.simulators.scriptedapi import (
    LOST,
    Answer,
    ScriptedApi,
    events,
    make_kubeconfig,
    ok,
    status,
    write_kubeconfig,
)

JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/ml/jobsets"
PODS = "/api/v1/namespaces/ml/pods"
WORKLOADS = "/apis/kueue.x-k8s.io/v1beta2/namespaces/ml/workloads"
OLD_WORKLOADS = "/apis/kueue.x-k8s.io/v1beta1/namespaces/ml/workloads"
BODY = {"metadata": {"name": "a", "labels": {"prefect-torch-elastic.io/flow-run": "1"}}, "spec": {}}
BUSY = status(503, "ServiceUnavailable", "busy")


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    api = ScriptedApi()
    yield api
    api.close()


@pytest.fixture
def slept() -> list[float]:
    return []


@pytest.fixture
def cluster(api: ScriptedApi, tmp_path: Path, slept: list[float]) -> Iterator[Cluster]:
    path = str(write_kubeconfig(tmp_path, api.url, token="t0"))
    cluster = Cluster(Connection(lambda: load_configuration(path, None, None)), sleep=slept.append)
    yield cluster
    cluster.close()


# --- create


def test_create_asks_for_strict_fields_and_returns_the_object(api: ScriptedApi, cluster: Cluster):
    api.on(f"POST {JOBSETS}", ok(BODY | {"kind": "JobSet"}, 201))
    assert cluster.create(Kind.JOBSET, "ml", BODY)["kind"] == "JobSet"
    (seen,) = api.seen
    assert seen.query == {"fieldValidation": "Strict"}
    assert seen.body == BODY
    assert seen.headers["Authorization"] == "Bearer t0"


def test_create_creates_nothing_when_it_is_a_dry_run(api: ScriptedApi, cluster: Cluster):
    api.on(f"POST {JOBSETS}", ok(BODY, 201))
    cluster.create(Kind.JOBSET, "ml", BODY, dry_run=True)
    assert api.seen[0].query == {"fieldValidation": "Strict", "dryRun": "All"}


@pytest.mark.parametrize("code", [400, 403, 404, 409, 422])
def test_create_asks_once_when_it_is_refused_c047(
    api: ScriptedApi, cluster: Cluster, slept: list[float], code: int
):
    api.on(f"POST {JOBSETS}", status(code, "AlreadyExists" if code == 409 else "", "no", name="a"))
    with pytest.raises(ClusterError) as caught:
        cluster.create(Kind.JOBSET, "ml", BODY)
    assert (caught.value.status, caught.value.exists, len(api.seen), slept) == (code, code == 409, 1, [])


def test_create_asks_again_after_a_webhook_that_was_away_once_c047(
    api: ScriptedApi, cluster: Cluster, slept: list[float]
):
    away = status(500, "InternalError", 'failed calling webhook "vjobset.kb.io": connection refused')
    api.on(f"POST {JOBSETS}", away, ok(BODY, 201))
    assert cluster.create(Kind.JOBSET, "ml", BODY) == BODY
    assert len(slept) == 1


def test_create_gives_up_after_a_few_tries_with_growing_delays(
    api: ScriptedApi, cluster: Cluster, slept: list[float]
):
    api.on(f"POST {JOBSETS}", BUSY)
    with pytest.raises(ClusterError, match="busy"):
        cluster.create(Kind.JOBSET, "ml", BODY)
    assert len(slept) == 4
    assert sum(slept) < 10
    assert slept[0] < slept[-1]


def test_create_waits_as_long_as_the_api_asks_but_not_for_ever(
    api: ScriptedApi, cluster: Cluster, slept: list[float]
):
    slow = Answer(status=429, body=b"slow down", headers={"Retry-After": "3"})
    slower = Answer(status=429, body=b"slow down", headers={"Retry-After": "3600"})
    api.on(f"POST {JOBSETS}", slow, slower, ok(BODY, 201))
    cluster.create(Kind.JOBSET, "ml", BODY)
    assert slept == [3.0, 10.0]


def test_create_returns_the_object_when_only_the_answer_was_lost(api: ScriptedApi, cluster: Cluster):
    api.on(f"POST {JOBSETS}", LOST)
    api.on(f"GET {JOBSETS}/a", ok(BODY))
    assert cluster.create(Kind.JOBSET, "ml", BODY) == BODY
    assert len(api.asked("POST")) == 1


def test_create_asks_again_when_the_request_was_lost(api: ScriptedApi, cluster: Cluster):
    api.on(f"POST {JOBSETS}", LOST, ok(BODY, 201))
    api.on(f"GET {JOBSETS}/a", status(404, "NotFound", "not found", name="a"))
    assert cluster.create(Kind.JOBSET, "ml", BODY) == BODY


def test_create_takes_no_object_of_somebody_else_for_its_own(api: ScriptedApi, cluster: Cluster):
    api.on(f"POST {JOBSETS}", LOST, status(409, "AlreadyExists", "already exists", name="a"))
    api.on(f"GET {JOBSETS}/a", ok({"metadata": {"name": "a", "labels": {}}}))
    with pytest.raises(ClusterError) as caught:
        cluster.create(Kind.JOBSET, "ml", BODY)
    assert caught.value.exists


# --- get, list, delete, patch


def test_get_returns_none_when_there_is_no_such_object(api: ScriptedApi, cluster: Cluster):
    api.on(f"GET {JOBSETS}/a", status(404, "NotFound", 'jobsets "a" not found', name="a"))
    assert cluster.get(Kind.JOBSET, "ml", "a") is None


def test_get_says_that_jobset_is_not_installed_c047(cluster: Cluster):
    with pytest.raises(ClusterError, match="JobSet is not installed in this cluster"):
        cluster.get(Kind.JOBSET, "ml", "a")


def test_list_returns_whole_objects_and_where_a_watch_goes_on(api: ScriptedApi, cluster: Cluster):
    api.on(f"GET {PODS}", ok({"metadata": {"resourceVersion": "7"}, "items": [{"metadata": {"name": "p"}}]}))
    found = cluster.list(Kind.POD, "ml", labels="a=b", fields="status.phase=Failed", limit=5)
    assert found.resource_version == "7"
    assert found.items == [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}}]
    assert api.seen[0].query == {"labelSelector": "a=b", "fieldSelector": "status.phase=Failed", "limit": "5"}


def test_list_asks_an_older_kueue_in_its_own_version(api: ScriptedApi, cluster: Cluster):
    api.on("GET /apis/kueue.x-k8s.io", ok({"versions": [{"version": "v1beta1"}]}))
    api.on(f"GET {OLD_WORKLOADS}", ok({"metadata": {}, "items": None}))
    assert cluster.list(Kind.WORKLOAD, "ml").items == []
    cluster.list(Kind.WORKLOAD, "ml")
    paths = [seen.path for seen in api.seen]
    assert paths == [WORKLOADS, "/apis/kueue.x-k8s.io", OLD_WORKLOADS, OLD_WORKLOADS]


def test_list_says_that_kueue_is_not_installed(cluster: Cluster):
    with pytest.raises(ClusterError, match="Kueue is not installed in this cluster"):
        cluster.list(Kind.WORKLOAD, "ml")


def test_list_asks_again_when_the_answer_breaks_off(api: ScriptedApi, cluster: Cluster):
    whole = ok({"metadata": {}, "items": []})
    api.on(f"GET {PODS}", Answer(chunks=[b'{"metadata": {}, "it'], then="drop"), whole)
    assert cluster.list(Kind.POD, "ml").items == []


def test_delete_deletes_this_very_object_and_all_that_it_owns(api: ScriptedApi, cluster: Cluster):
    api.on(f"DELETE {JOBSETS}/a", ok({}))
    assert cluster.delete(Kind.JOBSET, "ml", "a", uid="u")
    assert api.seen[0].body["propagationPolicy"] == "Foreground"
    assert api.seen[0].body["preconditions"] == {"uid": "u"}


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(status(404, "NotFound", "not found", name="a"), id="gone"),
        pytest.param(
            status(409, "Conflict", "Precondition failed: UID in precondition: u, UID in object meta: w"),
            id="another-of-that-name",
        ),
        pytest.param(Answer(status=404, body=b"404 page not found\n"), id="no-such-kind"),
    ],
)
def test_delete_says_that_there_was_none(api: ScriptedApi, cluster: Cluster, answer: Answer):
    api.on(f"DELETE {JOBSETS}/a", answer)
    assert not cluster.delete(Kind.JOBSET, "ml", "a", uid="u")
    assert len(api.seen) == 1


def test_patch_sends_a_merge_patch(api: ScriptedApi, cluster: Cluster):
    api.on(f"PATCH {JOBSETS}/a", ok(BODY))
    cluster.patch(Kind.JOBSET, "ml", "a", {"metadata": {"annotations": {"w": "1"}}})
    assert api.seen[0].headers["Content-Type"] == "application/merge-patch+json"


# --- watch


def follow(cluster: Cluster, timeout_seconds: float = 5.0) -> Any:
    return cluster.watch(
        Kind.JOBSET, "ml", labels="a=b", resource_version="7", timeout_seconds=timeout_seconds
    )


def test_watch_yields_events_and_bookmarks_until_the_api_ends_it(api: ScriptedApi, cluster: Cluster):
    api.on(f"GET {JOBSETS}", events(("ADDED", {"n": 1}), ("BOOKMARK", {"n": 2}), ("DELETED", {"n": 3})))
    assert list(follow(cluster)) == [("ADDED", {"n": 1}), ("BOOKMARK", {"n": 2}), ("DELETED", {"n": 3})]
    query = api.seen[0].query
    assert (query["resourceVersion"], query["timeoutSeconds"], query["watch"]) == ("7", "5", "true")
    assert query["allowWatchBookmarks"] == "true"


def test_watch_joins_an_event_that_comes_in_pieces(api: ScriptedApi, cluster: Cluster):
    line = json.dumps({"type": "ADDED", "object": {"text": "ü"}}, ensure_ascii=False).encode() + b"\n"
    at = line.index(b"\xc3") + 1
    api.on(f"GET {JOBSETS}", Answer(chunks=[line[:at], line[at:] + line[:3], line[3:]]))
    assert list(follow(cluster)) == [("ADDED", {"text": "ü"})] * 2


@pytest.mark.parametrize("is_event", [False, True], ids=["status", "event"])
def test_watch_says_that_the_listing_is_too_old(api: ScriptedApi, cluster: Cluster, is_event: bool):
    gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version: 7 (9)"}
    api.on(f"GET {JOBSETS}", events(("ERROR", gone)) if is_event else ok(gone, 410))
    with pytest.raises(ClusterError) as caught:
        list(follow(cluster))
    assert caught.value.expired
    assert "cannot watch jobsets.jobset.x-k8s.io in 'ml'" in str(caught.value)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(events(("ADDED", {}), then="drop"), id="dropped"),
        pytest.param(Answer(chunks=[b"<html>\n"]), id="no-json"),
        pytest.param(Answer(chunks=[b'"text"\n']), id="no-object"),
        pytest.param(Answer(chunks=[b'{"type": "ADDED"}\n']), id="no-event"),
        pytest.param(Answer(chunks=[b'{"type": "ERROR", "object": {}}\n']), id="no-status"),
        pytest.param(Answer(chunks=[b'{"type": "ADDED", "obj']), id="cut-short"),
        pytest.param(BUSY, id="busy"),
    ],
)
def test_watch_raises_what_may_pass_when_it_breaks(api: ScriptedApi, cluster: Cluster, answer: Answer):
    api.on(f"GET {JOBSETS}", answer)
    with pytest.raises(ClusterError) as caught:
        list(follow(cluster))
    assert caught.value.may_pass
    assert len(api.seen) == 1


def test_watch_raises_when_the_api_is_silent(
    api: ScriptedApi, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(client, "_WATCH_SLACK_SECONDS", 0.0)
    api.on(f"GET {JOBSETS}", events(("ADDED", {}), then="stall"))
    watch = follow(cluster, timeout_seconds=0.2)
    assert next(watch) == ("ADDED", {})
    with pytest.raises(ClusterError, match="timed out"):
        next(watch)


@pytest.mark.parametrize("how", ["watch", "cluster"])
def test_watch_ends_at_once_when_another_thread_closes_it(api: ScriptedApi, cluster: Cluster, how: str):
    api.on(f"GET {JOBSETS}", events(("ADDED", {}), then="stall"))
    watch = follow(cluster, timeout_seconds=60.0)
    assert next(watch) == ("ADDED", {})
    rest: list[Any] = []
    reader = threading.Thread(target=lambda: rest.extend(watch))
    reader.start()
    (watch if how == "watch" else cluster).close()
    reader.join(5.0)
    assert not reader.is_alive()
    assert rest == []


def test_watch_ends_at_once_when_the_cluster_was_closed_meanwhile(api: ScriptedApi, cluster: Cluster):
    api.on(f"GET {JOBSETS}", events(("ADDED", {}), then="stall"))
    cluster.close()
    assert [kind for kind, _ in follow(cluster, timeout_seconds=60.0)] in ([], ["ADDED"])


# --- questions about the cluster


def test_can_asks_about_verb_kind_and_subresource(api: ScriptedApi, cluster: Cluster):
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    api.on(f"POST {path}", ok({"status": {"allowed": True}}, 201), ok({"status": {"allowed": False}}, 201))
    assert cluster.can("get", Kind.POD, "ml", subresource="log")
    assert not cluster.can("get", Kind.PRIORITY_CLASS, "ml")
    first, second = (seen.body["spec"]["resourceAttributes"] for seen in api.seen)
    core = {"verb": "get", "group": "", "resource": "pods", "subresource": "log", "namespace": "ml"}
    everywhere = {"group": "kueue.x-k8s.io", "resource": "workloadpriorityclasses", "namespace": ""}
    assert first == core
    assert second == {"verb": "get", "subresource": ""} | everywhere


def test_whoami_names_the_account(api: ScriptedApi, cluster: Cluster):
    path = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
    api.on(f"POST {path}", ok({"status": {"userInfo": {"username": "system:serviceaccount:ml:p"}}}, 201))
    assert cluster.whoami() == "system:serviceaccount:ml:p"


def test_versions_are_empty_for_what_is_not_installed(api: ScriptedApi, cluster: Cluster):
    api.on("GET /apis/jobset.x-k8s.io", ok({"versions": [{"version": "v1alpha2"}]}))
    assert cluster.versions() == {"jobset.x-k8s.io": ["v1alpha2"], "kueue.x-k8s.io": []}


PENDING = "/apis/visibility.kueue.x-k8s.io/{}/namespaces/ml/localqueues/lq/pendingworkloads"


def test_pending_position_counts_from_one_in_both_queues(api: ScriptedApi, cluster: Cluster):
    waiting = [
        {"metadata": {"name": "w0"}},
        {"metadata": {"name": "w1"}, "positionInLocalQueue": 1, "positionInClusterQueue": 4},
    ]
    api.on(f"GET {PENDING.format('v1beta1')}", ok({"items": waiting}))
    assert cluster.pending_position("ml", "lq", "w1") == (2, 5)
    assert cluster.pending_position("ml", "lq", "w7") is None


def test_pending_position_is_asked_for_no_more_when_the_cluster_does_not_tell(
    api: ScriptedApi, cluster: Cluster
):
    for _ in range(3):
        assert cluster.pending_position("ml", "lq", "w") is None
    assert [seen.path for seen in api.seen] == [PENDING.format("v1beta2"), PENDING.format("v1beta1")]


def test_pending_position_is_still_asked_for_in_namespaces_that_tell(api: ScriptedApi, cluster: Cluster):
    api.on(f"GET {PENDING.format('v1beta2')}", ok({"items": [{"metadata": {"name": "w"}}]}))
    assert cluster.pending_position("other", "lq", "w") is None
    assert cluster.pending_position("ml", "lq", "w") == (1, 1)


# --- connecting


def test_connection_loads_its_token_again_when_it_is_refused(api: ScriptedApi):
    tokens = iter(["old", "new"])
    cluster = Cluster(
        Connection(
            lambda: load_configuration(
                None, None, {"config": make_kubeconfig(api.url, token=next(tokens)), "context_name": "test"}
            )
        )
    )
    expired = status(401, "Unauthorized", "Unauthorized")
    api.on(f"POST {JOBSETS}", expired, ok(BODY, 201))
    assert cluster.create(Kind.JOBSET, "ml", BODY) == BODY
    assert [seen.headers["Authorization"] for seen in api.seen] == ["Bearer old", "Bearer new"]


def test_connection_gives_up_when_the_new_token_is_refused_too(api: ScriptedApi, cluster: Cluster):
    api.on(f"GET {PODS}", status(401, "Unauthorized", "Unauthorized"))
    with pytest.raises(ClusterError, match="the API does not accept our credentials"):
        cluster.list(Kind.POD, "ml")
    assert len(api.seen) == 2


@pytest.mark.parametrize("form", ["path", "text", "yaml", "block", "variable"])
def test_cluster_connects_by(form: str, api: ScriptedApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_kubeconfig(tmp_path, api.url)
    given: dict[str, Any] = {
        "path": {"kubeconfig": str(path), "context": "test"},
        "text": {"kubeconfig": path.read_text()},
        "yaml": {"kubeconfig": "apiVersion: v1\n" + yaml_of(api.url)},
        "block": {"credentials": {"config": make_kubeconfig(api.url), "context_name": "test"}},
        "variable": {},
    }[form]
    monkeypatch.setenv("KUBECONFIG", str(path) if form == "variable" else "/nothing")
    api.on(f"GET {PODS}/p", ok({"metadata": {"name": "p"}}))
    assert Cluster.connect(**given).get(Kind.POD, "ml", "p") == {"metadata": {"name": "p"}}


def yaml_of(url: str) -> str:
    import yaml

    return yaml.safe_dump(make_kubeconfig(url))


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"kubeconfig": "/nothing/here"}, id="no-file"),
        pytest.param({"kubeconfig": "{]"}, id="no-yaml"),
        pytest.param({"context": "other"}, id="no-such-context"),
        pytest.param({"credentials": {"config": {}}}, id="empty-block"),
    ],
)
def test_cluster_says_that_none_is_configured(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path, "http://127.0.0.1:1")))
    with pytest.raises(ClusterError, match="no Kubernetes cluster is configured"):
        Cluster.connect(**given)


def test_cluster_says_how_to_install_the_client_when_it_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "kubernetes", None)
    with pytest.raises(MissingExtraError, match="prefect-torch-elastic\\[kubernetes\\]"):
        Cluster.connect()


def test_cluster_serves_several_threads(api: ScriptedApi, cluster: Cluster):
    api.on(f"GET {PODS}/p", ok({"metadata": {"name": "p"}}))
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(cluster.get(Kind.POD, "ml", "p"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert found == [{"metadata": {"name": "p"}}] * 8
