"""The clusters that a worker works in: one connection and one observer each, and who hears of which gang."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

import anyio
from anyio import to_thread

from prefect_torch_elastic.kubernetes.client import Cluster
from prefect_torch_elastic.kubernetes.naming import select_pool
from prefect_torch_elastic.kubernetes.observer import Observer, Sighting

Hear = Callable[[Sighting], None]


class ClusterView:
    """One cluster as a worker sees it.

    Attributes:
        cluster: The connection; call it in threads only.
        namespaces: Those that gangs of the work pool may be in.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.namespaces: set[str] = set()
        self._observer: Observer | None = None
        self._followers: dict[str, Hear] = {}
        self._loop = asyncio.get_running_loop()

    async def watch(
        self, namespace: str, *, labels: str, warn: Callable[[str], None], observe: Callable[..., Observer]
    ) -> None:
        """Begin to look into a namespace, unless that is so already."""
        if namespace in self.namespaces:
            return
        if self._observer is None:
            observer = observe(
                self.cluster, namespaces=[namespace], labels=labels, listen=self._listen, warn=warn
            )
            await to_thread.run_sync(observer.start)
            self._observer = observer
        else:
            await to_thread.run_sync(self._observer.add_namespace, namespace)
        self.namespaces.add(namespace)

    def follow(self, uid: str, hear: Hear) -> None:
        """Call `hear` in this loop with what the gang does now, and whenever that changes."""
        self._followers[uid] = hear
        if self._observer and (sighting := self._observer.sighting(uid)):
            hear(sighting)

    def unfollow(self, uid: str) -> None:
        """Call it no more."""
        self._followers.pop(uid, None)

    async def close(self) -> None:
        """End the observer's threads and the connection."""
        if self._observer:
            await to_thread.run_sync(self._observer.close)
        await to_thread.run_sync(self.cluster.close)

    def _listen(self, sighting: Sighting) -> None:
        """Pass a sighting on; runs in the observer's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, sighting)

    def _deliver(self, sighting: Sighting) -> None:
        if hear := self._followers.get(sighting.uid):
            hear(sighting)


class Clusters:
    """Opens each cluster once, when the first gang needs it.

    Args:
        pool_id: Of the work pool.
        warn: Takes a sentence about something that cannot be seen; called in any thread.
    """

    def __init__(
        self,
        *,
        pool_id: str,
        warn: Callable[[str], None],
        connect: Callable[[Any], Cluster] | None = None,
        observe: Callable[..., Observer] = Observer,
    ) -> None:
        self._labels, self._warn = select_pool(pool_id), warn
        self._connect, self._observe = connect or connect_cluster, observe
        self._views: dict[str, ClusterView] = {}
        self._opening = anyio.Lock()

    @property
    def labels(self) -> str:
        """Selects the objects of the work pool."""
        return self._labels

    @property
    def views(self) -> list[ClusterView]:
        """The clusters that are open."""
        return list(self._views.values())

    async def open(self, cluster_config: Any, namespace: str) -> ClusterView:
        """Return the cluster that a work pool's variable means, and look into the namespace from now on.

        Args:
            cluster_config: None, a kubeconfig's path, or the fields of a `KubernetesClusterConfig` block.
            namespace: Where gangs are.

        Raises:
            MissingExtraError: If the client library is not installed.
            ElasticError: If there is no such cluster.
        """
        key = json.dumps(cluster_config, sort_keys=True, default=str)
        async with self._opening:
            view = self._views.get(key)
            if view is None:
                view = ClusterView(await to_thread.run_sync(self._connect, cluster_config))
                self._views[key] = view
            await view.watch(namespace, labels=self._labels, warn=self._warn, observe=self._observe)
        return view

    async def close(self) -> None:
        """Close all clusters; their gangs go on."""
        with anyio.CancelScope(shield=True):  # threads that are not ended keep the process alive
            for view in self._views.values():
                await view.close()
            self._views.clear()


def connect_cluster(cluster_config: Any) -> Cluster:
    """Return a connection to the cluster that a work pool's variable means."""
    if isinstance(cluster_config, Mapping):
        return Cluster.connect(credentials=cast("Mapping[str, Any]", cluster_config))
    return Cluster.connect(kubeconfig=str(cluster_config) if cluster_config else None)
