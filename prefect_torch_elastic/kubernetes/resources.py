"""Which objects of the API we touch, and under which path each is found (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import quote

JOBSET_GROUP = "jobset.x-k8s.io"
KUEUE_GROUP = "kueue.x-k8s.io"
# Newest first; Kueue serves the older one as well until it is removed, and alone before 0.15.
KUEUE_VERSIONS = ("v1beta2", "v1beta1")
VISIBILITY_GROUP = "visibility.kueue.x-k8s.io"
PRODUCTS = {JOBSET_GROUP: "JobSet", KUEUE_GROUP: "Kueue"}


@dataclass(frozen=True, kw_only=True)
class Resource:
    """One kind of object, as the API addresses it.

    Attributes:
        group: API group; empty for the core of Kubernetes.
        version: Of that group.
        plural: Name in paths and in roles.
        kind: Name in objects.
        namespaced: Whether it lives in a namespace.
    """

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def qualified(self) -> str:
        """The name that `kubectl` and error messages use: `jobsets.jobset.x-k8s.io`, `pods`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def api_version(self) -> str:
        """The value of `apiVersion` in its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str, name: str = "", *, subresource: str = "") -> str:
        """Return the path of an object, or of all of them in a namespace."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"
        parts = ["namespaces", namespace, self.plural] if self.namespaced else [self.plural]
        return "/".join([root, *(quote(part, safe="") for part in (*parts, name, subresource) if part)])


class Kind(StrEnum):
    """The kinds of objects that gangs are made of."""

    JOBSET = "jobset"
    JOB = "job"
    POD = "pod"
    WORKLOAD = "workload"
    LOCAL_QUEUE = "local_queue"
    CLUSTER_QUEUE = "cluster_queue"
    PRIORITY_CLASS = "priority_class"
    SECRET = "secret"
    EVENT = "event"


def _kueue(plural: str, kind: str, *, namespaced: bool = True) -> Resource:
    return Resource(
        group=KUEUE_GROUP, version=KUEUE_VERSIONS[0], plural=plural, kind=kind, namespaced=namespaced
    )


KINDS: dict[Kind, Resource] = {
    Kind.JOBSET: Resource(group=JOBSET_GROUP, version="v1alpha2", plural="jobsets", kind="JobSet"),
    Kind.JOB: Resource(group="batch", version="v1", plural="jobs", kind="Job"),
    Kind.POD: Resource(group="", version="v1", plural="pods", kind="Pod"),
    Kind.WORKLOAD: _kueue("workloads", "Workload"),
    Kind.LOCAL_QUEUE: _kueue("localqueues", "LocalQueue"),
    Kind.CLUSTER_QUEUE: _kueue("clusterqueues", "ClusterQueue", namespaced=False),
    Kind.PRIORITY_CLASS: _kueue("workloadpriorityclasses", "WorkloadPriorityClass", namespaced=False),
    Kind.SECRET: Resource(group="", version="v1", plural="secrets", kind="Secret"),
    Kind.EVENT: Resource(group="", version="v1", plural="events", kind="Event"),
}
