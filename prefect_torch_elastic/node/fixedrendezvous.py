"""How the nodes of a gang on several machines meet: each has its place from the start, and none is replaced.

Whoever starts the machines (an Indexed Job) has numbered them, so rank 0 is on node 0 and stays there. Losing
a node ends the gang, so there is nothing to watch for here: each round waits until every node has arrived.
All that a node says in a round can be said again: one whose store was away repeats the round, and stays in
step with the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.rendezvous.api import (
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from prefect_torch_elastic.node.rendezvous import StaticRendezvous, start_store
from prefect_torch_elastic.ranks import parse_endpoint, render_endpoint

_PAUSE_SECONDS = (0.005, 0.25)


class FixedRendezvous(StaticRendezvous):
    """The handler of one node.

    Args:
        store: The store that the nodes share, hosted by the leader's launcher.
        run_id: Name of the gang.
        node: This node's number.
        nnodes: All of them.
        address: This machine's address; node 0's is where the ranks meet.
        timeout_seconds: How long a round waits for the last node.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        *,
        node: int,
        nnodes: int,
        address: str,
        timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(run_id)
        self._store = PrefixStore(f"gang/{run_id}", store)
        self._node, self._nnodes = node, nnodes
        self._address, self._timeout, self._clock = address, timeout_seconds, clock
        self._formed: int = 0  # the last round that came about

    def next_rendezvous(self) -> RendezvousInfo:
        if self._formed == self.round:
            self._round_store = start_store(self._address) if self._node == 0 else None
            self.round += 1
        prefix = f"round/{self.round}"
        self._store.set(self._name_arrival(self._node), "1")
        if self._round_store is not None:
            self._wait_for(*(self._name_arrival(node) for node in range(self._nnodes)))
            self._store.set(f"{prefix}/ranks-meet-at", render_endpoint(self._address, self._round_store.port))
        self._wait_for(f"{prefix}/ranks-meet-at")
        host, port = parse_endpoint(self._store.get(f"{prefix}/ranks-meet-at").decode())
        agents = PrefixStore(f"{prefix}/agents", self._store)
        self._formed = self.round
        return RendezvousInfo(agents, self._node, self._nnodes, RendezvousStoreInfo(host, port))

    def _name_arrival(self, node: int) -> str:
        return f"round/{self.round}/arrived/{node}"

    def _wait_for(self, *keys: str) -> None:
        """Look again and again: a wait inside of the store would be deaf to signals."""
        pause, most = _PAUSE_SECONDS
        deadline = self._clock() + self._timeout
        while not self._store.check(list(keys)):
            if self._clock() > deadline:
                arrived = sum(self._store.check([self._name_arrival(node)]) for node in range(self._nnodes))
                raise RendezvousTimeoutError(f"{arrived} of {self._nnodes} nodes came")
            time.sleep(pause)
            pause = min(pause * 1.5, most)
