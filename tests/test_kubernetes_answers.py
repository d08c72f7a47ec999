"""What errors of the Kubernetes API mean.

Their texts were captured from Kubernetes 1.36.2, JobSet 0.12.0 and Kueue 0.19.2.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from prefect_torch_elastic.kubernetes.answers import ClusterError, read_answer, read_silence
from prefect_torch_elastic.kubernetes.resources import KINDS, Kind

JOBSETS = KINDS[Kind.JOBSET]
DENIED = (
    'jobsets.jobset.x-k8s.io is forbidden: User "system:serviceaccount:ml:prefect" cannot create resource '
    '"jobsets" in API group "jobset.x-k8s.io" in the namespace "ml"'
)
TOO_LONG = (
    'admission webhook "vjobset.kb.io" denied the request: JobSet.jobset.x-k8s.io "x" is invalid: '
    'spec.replicatedJobs[0].name: Invalid value: "x-w-0": JobSet name is too long, pod names generated for '
    "this JobSet will exceed 63 characters"
)
IMMUTABLE = (
    'admission webhook "vjobset.kb.io" denied the request: metadata.labels[kueue.x-k8s.io/queue-name]: '
    'Invalid value: "other": field is immutable'
)
QUOTA = (
    'jobsets.jobset.x-k8s.io "x" is forbidden: exceeded quota: few, requested: count/jobsets=1, '
    "used: count/jobsets=2, limited: count/jobsets=2"
)
STRICT = (
    'JobSet in version "v1alpha2" cannot be handled as a JobSet: strict decoding error: '
    'unknown field "spec.failurePolicy.rules[0].onJobFailureMessagePatterns"'
)


def read(code: int, reason: str, message: str, *, verb: str = "create", **details: Any) -> ClusterError:
    body = {"kind": "Status", "message": message, "reason": reason, "details": details, "code": code}
    return read_answer(code, json.dumps(body), verb=verb, resource=JOBSETS, namespace="ml", name="x")


def test_read_answer_names_verb_resource_namespace_and_account_when_no_role_allows_it_c047():
    error = read(403, "Forbidden", DENIED, group="jobset.x-k8s.io", kind="jobsets")
    text = str(error)
    assert "cannot create jobsets.jobset.x-k8s.io in 'ml' as system:serviceaccount:ml:prefect" in text
    assert "docs/kubernetes/rbac.yaml" in text
    assert "\n" not in text
    assert error.forbidden
    assert not error.may_pass


def test_read_answer_says_that_jobset_is_not_installed_when_the_group_is_missing_c047():
    error = read_answer(404, b"404 page not found\n", verb="create", resource=JOBSETS, namespace="ml")
    assert str(error).startswith("JobSet is not installed in this cluster")
    assert "https://jobset.sigs.k8s.io" in str(error)
    assert error.not_installed
    assert not error.may_pass


def test_read_answer_says_that_kueue_is_not_installed_when_its_group_is_missing():
    error = read_answer(404, b"404 page not found\n", verb="list", resource=KINDS[Kind.WORKLOAD])
    assert str(error).startswith("Kueue is not installed in this cluster")


def test_read_answer_asks_for_a_kubernetes_api_when_a_core_kind_is_missing():
    error = read_answer(404, "<html>nothing here</html>", verb="list", resource=KINDS[Kind.POD])
    assert "the API has no `v1`" in str(error)


def test_read_answer_names_the_namespace_when_that_is_missing():
    error = read(404, "NotFound", 'namespaces "ml" not found', kind="namespaces", name="ml")
    assert 'namespaces "ml" not found' in str(error)
    assert "kubectl create namespace ml" in str(error)
    assert not error.not_installed


@pytest.mark.parametrize(
    ("code", "reason", "message", "says"),
    [
        pytest.param(422, "Invalid", TOO_LONG, "JobSet name is too long", id="jobset"),
        pytest.param(403, "Forbidden", IMMUTABLE, "field is immutable", id="kueue"),
    ],
)
def test_read_answer_repeats_a_webhook_without_its_name(code: int, reason: str, message: str, says: str):
    error = read(code, reason, message)
    assert says in str(error)
    assert "admission webhook" not in str(error)
    assert not error.may_pass
    assert not error.forbidden


def test_read_answer_explains_a_quota():
    error = read(403, "Forbidden", QUOTA)
    assert "exceeded quota: few" in str(error)
    assert "ResourceQuota" in error.cure
    assert not error.may_pass


def test_read_answer_asks_for_a_newer_jobset_when_a_field_is_unknown():
    error = read(400, "BadRequest", STRICT)
    assert "`spec.failurePolicy.rules[0].onJobFailureMessagePatterns`" in error.cure
    assert "0.10" in error.cure


def test_read_answer_knows_that_an_object_exists_already():
    error = read(409, "AlreadyExists", 'jobsets.jobset.x-k8s.io "x" already exists', name="x")
    assert error.exists
    assert not error.may_pass


@pytest.mark.parametrize(
    ("code", "reason", "message"),
    [
        (409, "Conflict", "Operation cannot be fulfilled on resourcequotas: the object has been modified"),
        (429, "TooManyRequests", "too many requests"),
        (500, "InternalError", 'failed calling webhook "vjobset.kb.io": no endpoints available'),
        (503, "ServiceUnavailable", "the server is shutting down"),
        (504, "Timeout", "request did not complete within the allotted timeout"),
    ],
)
def test_read_answer_calls_it_worth_another_try(code: int, reason: str, message: str):
    assert read(code, reason, message).may_pass


@pytest.mark.parametrize("code", [400, 401, 403, 404, 405, 410, 422, 501])
def test_read_answer_calls_it_final(code: int):
    assert not read(code, "", "no", name="x").may_pass


def test_read_answer_takes_the_time_to_wait_from_header_or_body():
    header = read_answer(429, b"slow down", verb="list", resource=JOBSETS, retry_after="3")
    body = read(429, "TooManyRequests", "slow down", retryAfterSeconds=5)
    assert (header.retry_after, body.retry_after) == (3.0, 5)


def test_read_answer_shortens_what_is_no_answer_of_the_api():
    error = read_answer(502, b"<html>" + b"x" * 9000, verb="list", resource=JOBSETS)
    assert len(str(error)) < 800


def test_read_silence_is_worth_another_try():
    error = read_silence(TimeoutError("timed out"), verb="create", resource=JOBSETS, namespace="ml")
    assert error.may_pass
    assert "the Kubernetes API did not answer (TimeoutError: timed out)" in str(error)
