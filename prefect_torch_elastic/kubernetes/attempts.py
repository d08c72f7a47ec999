"""What a JobSet does about a failed attempt, by the failure policy that it was created with (pure)."""

from __future__ import annotations

import re
from enum import StrEnum

from prefect_torch_elastic.kubernetes.conditions import (
    ABSENT,
    Condition,
    Object,
    mapping,
    number,
    objects,
    read_condition,
    text,
    texts,
)
from prefect_torch_elastic.kubernetes.naming import ATTEMPT_LABEL


class Response(StrEnum):
    """What follows a failed attempt."""

    RESTART = "restart"  # and it counts
    RESTART_FREE = "restart-free"
    FAIL = "fail"


def read_failure(jobset: Object | None, job: Object | None) -> Condition:
    """Return the condition of the Job by which the attempt of now has failed, `ABSENT` if it has not.

    It is there as soon as a pod has failed; that the Job has failed is said when all of its pods have ended.
    """
    if is_of_past_attempt(jobset, job):
        return ABSENT
    return read_failed(job)


def read_failed(job: Object | None) -> Condition:
    """Return the condition by which a Job has failed, or is about to; `ABSENT` if it has not."""
    failed = [read_condition(job, type) for type in ("Failed", "FailureTarget")]
    return next((condition for condition in failed if condition.is_true), ABSENT)


def is_of_past_attempt(jobset: Object | None, job: Object | None) -> bool:
    """Whether the Job belongs to an attempt that the JobSet has given up already."""
    attempt = text(job, "metadata", "labels", ATTEMPT_LABEL)
    return attempt.isascii() and attempt.isdigit() and int(attempt) < number(jobset, "status", "restarts")


def decide_response(jobset: Object, failure: Condition) -> Response:
    """Return what the JobSet will do about a failure of its Job."""
    policy = mapping(jobset, "spec", "failurePolicy")
    if not policy:
        return Response.FAIL
    rule = next((rule for rule in objects(policy, "rules") if _matches(rule, failure)), None)
    action = text(rule, "action") if rule else "RestartJobSet"
    if action == "FailJobSet":
        return Response.FAIL
    if action == "RestartJobSetAndIgnoreMaxRestarts":
        return Response.RESTART_FREE
    spent = number(jobset, "status", "restartsCountTowardsMax")
    return Response.RESTART if spent < number(policy, "maxRestarts") else Response.FAIL


def _matches(rule: Object, failure: Condition) -> bool:
    reasons, patterns = texts(rule, "onJobFailureReasons"), texts(rule, "onJobFailureMessagePatterns")
    if reasons and failure.reason not in reasons:
        return False
    return not patterns or any(_finds(pattern, failure.message) for pattern in patterns)


def _finds(pattern: str, message: str) -> bool:
    try:
        return re.search(pattern, message) is not None
    except re.error:  # JobSet takes such a pattern, and never finds it
        return False
