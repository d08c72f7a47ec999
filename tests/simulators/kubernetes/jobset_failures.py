"""The failure policy of a JobSet: which rule a failed Job meets, and whether that is the end."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.simulators.kubernetes.conditions import find_condition
from tests.simulators.kubernetes.objects import Obj

RESTART = "RestartJobSet"
FAIL = "FailJobSet"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What happens to the JobSet, with reason and message of the condition that says so."""

    action: str
    reason: str
    message: str
    is_final: bool = False

    @property
    def counts(self) -> bool:
        """Whether the restart uses up one of `maxRestarts`."""
        return self.action == RESTART


def decide_failure(jobset: Obj, failed: Sequence[Obj], *, counted_restarts: int) -> Decision:
    """Return what the failure policy says about the failed Jobs of an attempt.

    Args:
        jobset: The JobSet.
        failed: Its failed Jobs, at least one.
        counted_restarts: How many restarts have counted so far.
    """
    failed = sorted(failed, key=lambda job: _read_failure(job)["lastTransitionTime"])
    policy = jobset["spec"].get("failurePolicy")
    if policy is None:
        message = f"jobset failed due to one or more job failures{_name_first(failed[0])}"
        return Decision(action=FAIL, reason="FailedJobs", message=message, is_final=True)
    rule, job = next(_match_rules(policy.get("rules") or (), failed), (None, failed[0]))
    action = rule["action"] if rule else RESTART
    message = f"applying {action} failure policy action{_name_first(job)}"
    if action == FAIL:
        return Decision(action=action, reason="FailJobSetFailurePolicyAction", message=message, is_final=True)
    if action == RESTART and counted_restarts >= policy.get("maxRestarts", 0):
        message = f"jobset failed due to reaching max number of restarts{_name_first(job)}"
        return Decision(action=action, reason="ReachedMaxRestarts", message=message, is_final=True)
    reason = f"FailurePolicy_{rule['name']}" if rule else "DefaultFailurePolicy"
    return Decision(action=action, reason=reason, message=message)


def _match_rules(rules: Sequence[Obj], failed: Sequence[Obj]) -> Iterator[tuple[Obj, Obj]]:
    for number, rule in enumerate(rules):
        for job in failed:
            if _matches(rule, job):
                yield {"name": f"failurePolicyRule{number}", **rule}, job


def _matches(rule: Obj, job: Obj) -> bool:
    failure = _read_failure(job)
    targets = rule.get("targetReplicatedJobs")
    if targets and job["metadata"]["labels"]["jobset.sigs.k8s.io/replicatedjob-name"] not in targets:
        return False
    if (reasons := rule.get("onJobFailureReasons")) and failure["reason"] not in reasons:
        return False
    patterns = rule.get("onJobFailureMessagePatterns")
    return not patterns or any(_finds(pattern, failure["message"]) for pattern in patterns)


def _finds(pattern: str, message: str) -> bool:
    try:
        return re.search(pattern, message) is not None
    except re.error:  # accepted at creation, and then never matches: the real one only logs it
        return False


def _read_failure(job: Obj) -> Obj:
    condition = find_condition(job, "Failed")
    assert condition is not None, "only failed Jobs come here"
    return condition


def _name_first(job: Obj) -> str:
    return f" (first failed job: {job['metadata']['name']})"
