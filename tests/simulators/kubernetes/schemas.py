"""The shape of every kind that strict reading knows: JobSet 0.12, batch/v1, Kueue v1beta2 and core kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.simulators.kubernetes.fields import Fields, Problem, fields, find_shape_problems
from tests.simulators.kubernetes.podshapes import (
    CLAIM_TEMPLATE,
    CONDITION,
    LABEL_SELECTOR,
    OBJECT_META,
    POD_SPEC,
    POD_TEMPLATE,
    TEMPLATE_META,
    TOLERATION,
)

Obj = dict[str, Any]


def _kind(words: str = "", **nested: Fields | list[Fields]) -> Fields:
    return fields(f"apiVersion kind {words}", metadata=OBJECT_META, **nested)


_JOB_SPEC = fields(
    "activeDeadlineSeconds# backoffLimit# backoffLimitPerIndex# completionMode completions# managedBy "
    "manualSelector? maxFailedIndexes# parallelism# podReplacementPolicy suspend? template! "
    "ttlSecondsAfterFinished#",
    podFailurePolicy=fields(
        "rules!",
        rules=[
            fields(
                "action!",
                onExitCodes=fields("containerName operator! values~!"),
                onPodConditions=[fields("type! status")],
            )
        ],
    ),
    successPolicy=fields("rules!", rules=[fields("succeededCount# succeededIndexes")]),
    selector=LABEL_SELECTOR,
    template=POD_TEMPLATE,
)
_JOB_STATUS = fields(
    "active# failed# succeeded# ready# terminating# completedIndexes failedIndexes startTime completionTime "
    "uncountedTerminatedPods~",
    conditions=[CONDITION],
)
_JOBSET_SPEC = fields(
    "managedBy suspend? ttlSecondsAfterFinished#",
    coordinator=fields("replicatedJob! jobIndex# podIndex#"),
    failurePolicy=fields(
        "maxRestarts# restartStrategy",
        rules=[
            fields("action! name onJobFailureMessagePatterns* onJobFailureReasons* targetReplicatedJobs*"),
        ],
    ),
    network=fields("enableDNSHostnames? publishNotReadyAddresses? subdomain"),
    replicatedJobs=[
        fields(
            "name! groupName replicas# template!",
            dependsOn=[fields("name! status!")],
            template=fields("", metadata=TEMPLATE_META, spec=_JOB_SPEC),
        )
    ],
    startupPolicy=fields("startupPolicyOrder!"),
    successPolicy=fields("operator! targetReplicatedJobs*"),
    volumeClaimPolicies=[fields("", retentionPolicy=fields("whenDeleted"), templates=[CLAIM_TEMPLATE])],
)
_WORKLOAD_SPEC = fields(
    "active? maximumExecutionTimeSeconds# preemptionGates~ priority# queueName",
    podSets=[fields("count# minCount# name template! topologyRequest~", template=POD_TEMPLATE)],
    priorityClassRef=fields("group! kind! name!"),
)
_CLUSTER_QUEUE_SPEC = fields(
    "admissionChecksStrategy~ admissionScope~ cohortName concurrentAdmissionPolicy~ fairSharing~ "
    "flavorFungibility~ queueingStrategy stopPolicy",
    namespaceSelector=LABEL_SELECTOR,
    preemption=fields("reclaimWithinCohort withinClusterQueue borrowWithinCohort~"),
    resourceGroups=[
        fields(
            "coveredResources*!",
            flavors=[
                fields("name!", resources=[fields("name! nominalQuota|! borrowingLimit| lendingLimit|")])
            ],
        )
    ],
)

SHAPES: Mapping[str, Fields] = {
    "Pod": _kind("status~", spec=POD_SPEC),
    "Job": _kind("", spec=_JOB_SPEC, status=_JOB_STATUS),
    "JobSet": _kind("status~", spec=_JOBSET_SPEC),
    "Workload": _kind("status~", spec=_WORKLOAD_SPEC),
    "LocalQueue": _kind("status~", spec=fields("clusterQueue stopPolicy fairSharing~")),
    "ClusterQueue": _kind("status~", spec=_CLUSTER_QUEUE_SPEC),
    "ResourceFlavor": _kind(
        "",
        spec=fields(
            "nodeLabels% topologyName",
            nodeTaints=[fields("effect! key! timeAdded value")],
            tolerations=[TOLERATION],
        ),
    ),
    "WorkloadPriorityClass": _kind("value#! description"),
    "PriorityClass": _kind("value#! description globalDefault? preemptionPolicy"),
    "Secret": _kind("type data% stringData% immutable?"),
    "ConfigMap": _kind("data% binaryData% immutable?"),
}
"""Kinds that are not here are taken as they come."""


def find_problems(obj: Obj) -> list[str]:
    """Return what a server would say of a manifest with `fieldValidation=Strict`: nothing, if all is well."""
    return [str(problem) for problem in read_object(obj, prune=False)]


def read_object(obj: Obj, *, prune: bool) -> list[Problem]:
    """Return the problems of an object's shape; with `prune`, its unknown fields are dropped in place."""
    shape = SHAPES.get(obj.get("kind", ""))
    return [] if shape is None else list(find_shape_problems(obj, shape, prune=prune))
