"""What an administrator sets up in Kueue: queues with a quota, priorities, and a queue that is stopped."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tests.simulators.kubernetes.objects import Obj
from tests.simulators.kubernetes.restclient import RestClient, RestError

FLAVOR = "default-flavor"

_POLL_SECONDS = 0.1


class QueueAdministration:
    """A cluster's queues.

    Attributes:
        api, namespace: Where they belong.
        suffix: What names without a namespace end with; priority classes keep theirs, which gangs spell out.
        labels: Of what has no namespace.
        answers_seconds: How long Kueue may take to open a queue; 0 where it needs no time.
    """

    api: RestClient
    namespace: str
    suffix: str = ""
    labels: Mapping[str, str] = {}
    answers_seconds: float = 0.0

    def __init__(self) -> None:
        self._made: list[tuple[str, str]] = []

    def add_queue(
        self,
        name: str,
        cluster_queue: str = "cq",
        *,
        cpu: int | str = 64,
        memory: str = "256Gi",
        gpu: int | str = 16,
        preempts: bool = True,
    ) -> None:
        """Create a LocalQueue, and its ClusterQueue with a quota if it is not there."""
        quota = {"cpu": str(cpu), "memory": memory, "nvidia.com/gpu": str(gpu)}
        resources = [{"name": resource, "nominalQuota": value} for resource, value in quota.items()]
        flavor = FLAVOR + self.suffix
        group = {"coveredResources": list(quota), "flavors": [{"name": flavor, "resources": resources}]}
        spec = {
            "namespaceSelector": {},
            "queueingStrategy": "BestEffortFIFO",
            "preemption": {"withinClusterQueue": "LowerPriority" if preempts else "Never"},
            "resourceGroups": [group],
        }
        self._add_global("resourceflavors", {"metadata": {"name": flavor}, "spec": {}})
        self._add_global("clusterqueues", {"metadata": {"name": cluster_queue + self.suffix}, "spec": spec})
        local = {"metadata": {"name": name}, "spec": {"clusterQueue": cluster_queue + self.suffix}}
        self.api.create("localqueues", local, namespace=self.namespace)
        self._wait_until_open(name)

    def add_priority_class(self, name: str, value: int) -> None:
        """Create a WorkloadPriorityClass.

        Raises:
            ValueError: If there is one of that name, but of another value.
        """
        self._add_global("workloadpriorityclasses", {"metadata": {"name": name}, "value": value})
        found = self.api.get("workloadpriorityclasses", name) or {}
        if found.get("value") != value:
            raise ValueError(
                f"The WorkloadPriorityClass `{name}` of this cluster has the value {found.get('value')}, not "
                f"{value}, and is not the tests' own: delete it, or take another control plane."
            )

    def hold(self, cluster_queue: str = "cq", *, drain: bool = True) -> None:
        """Stop a ClusterQueue: it admits nothing, and evicts what it has admitted (unless `drain` is off)."""
        self._set_stop_policy(cluster_queue, "HoldAndDrain" if drain else "Hold")

    def resume(self, cluster_queue: str = "cq") -> None:
        """Let a stopped ClusterQueue go on."""
        self._set_stop_policy(cluster_queue, "None")

    def remove_queues(self) -> None:
        """Delete what was created and belongs to no namespace."""
        for plural, name in self._made:
            self.api.delete(plural, name)

    def _wait_until_open(self, local_queue: str) -> None:
        """Wait until Kueue has taken note of a queue: gangs that come before may wait for a long back-off."""
        deadline, conditions = time.monotonic() + self.answers_seconds, list[Obj]()
        while time.monotonic() < deadline:
            queue = self.api.get("localqueues", local_queue, namespace=self.namespace) or {}
            conditions = queue.get("status", {}).get("conditions") or []
            if ("Active", "True") in [(condition["type"], condition["status"]) for condition in conditions]:
                return
            time.sleep(_POLL_SECONDS)
        if self.answers_seconds:
            raise AssertionError(f"Kueue does not open the queue `{local_queue}`: {conditions}")

    def _add_global(self, plural: str, body: Obj) -> None:
        body = {**body, "metadata": {**body["metadata"], "labels": {**self.labels}}}
        try:
            self.api.create(plural, body)
        except RestError as error:
            if error.status != 409:
                raise
        else:
            self._made.insert(0, (plural, body["metadata"]["name"]))

    def _set_stop_policy(self, cluster_queue: str, policy: str) -> None:
        self.api.patch("clusterqueues", cluster_queue + self.suffix, {"spec": {"stopPolicy": policy}})
