"""How the nodes of a gang meet: alone on a loopback store, or through c10d with lost nodes noticed.

torch 2.13's c10d rendezvous needs help in three ways. It watches arrivals only: a lost node is purged from
the state and nobody is told. It compares wall clocks of different nodes. And it caches the address of a
round's store, so a newcomer can wait for a key that nobody publishes. Here a node is lost when its keep-alive
*value* has not changed for `LOST_SECONDS` of the observer's own clock, and the cache is reset each round.
"""

from __future__ import annotations

import pickle
import socket
import time
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from prefect_torch_elastic import compat
from prefect_torch_elastic.ranks import parse_endpoint

LOOPBACK = "127.0.0.1"
BEAT_SECONDS = 0.3
LOST_SECONDS = 2.0
STORE_SECONDS = 5.0
_NEVER = 10**6  # torch's own expiry by wall clock, in missed beats: off


def start_store(address: str = LOOPBACK) -> TCPStore:
    """Return a new store that listens on a free port of `address` only.

    Given a port, TCPStore listens on all interfaces; given a socket, on that socket. Binding it here also
    leaves no moment in which somebody else could take the port.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen(2048)
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        multi_tenant=False,
        master_listen_fd=listener.detach(),
    )


def connect_store(endpoint: str) -> TCPStore:
    """Return a client of the store at `host:port`.

    Its short timeout is for a leader that dies while a round is formed: the others wait in C++ for the
    address that it did not publish, deaf to signals, and must come back to try another round.
    """
    host, port = parse_endpoint(endpoint)
    timeout = timedelta(seconds=STORE_SECONDS)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


class StaticRendezvous(RendezvousHandler):
    """What handlers have in common whose nodes stay the same from the start.

    Attributes:
        round: The number of the round that this node takes part in.
    """

    def __init__(self, run_id: str, *, after_round: int = 0) -> None:
        self._run_id = run_id
        self._round_store: TCPStore | None = None  # where ranks meet: each round gets one, so no key is stale
        self.round: int = after_round

    def get_backend(self) -> str:
        return "static"

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._round_store = None
        return True


class LoneRendezvous(StaticRendezvous):
    """A gang of one node: nobody to wait for."""

    def next_rendezvous(self) -> RendezvousInfo:
        self.round += 1
        self._round_store = start_store()
        info = RendezvousStoreInfo(LOOPBACK, self._round_store.port)
        return RendezvousInfo(PrefixStore("agent", self._round_store), 0, 1, info)


class _WatchingBackend(C10dRendezvousBackend):
    """Purges nodes whose keep-alive value stands still, from each state that is read or written."""

    def __init__(self, store: Store, run_id: str, *, min_nodes: int, lost_seconds: float) -> None:
        super().__init__(store, run_id)
        self._min_nodes, self._lost_seconds = min_nodes, lost_seconds
        self._seen: dict[Any, tuple[Any, float]] = {}
        self._looked_at = time.monotonic()

    def get_state(self) -> Any:
        result = super().get_state()
        return result and (self._purge(result[0]), result[1])

    def set_state(self, state: bytes, token: Any = None) -> Any:
        result = super().set_state(state, token)
        return result and (self._purge(result[0]), result[1], result[2])

    def _purge(self, data: bytes) -> bytes:
        # The state comes from this gang's own store, which only its nodes can reach; torch unpickles it too.
        state, now = pickle.loads(data), time.monotonic()  # noqa: S301
        we_slept = now - self._looked_at > self._lost_seconds / 2  # then everybody gets a fresh period
        self._looked_at = now
        for node, beat in list(state.last_heartbeats.items()):
            before = self._seen.get(node)
            if before is None or before[0] != beat or we_slept:
                self._seen[node] = (beat, now)
            elif now - before[1] > self._lost_seconds:
                self._forget(state, node)
        return pickle.dumps(state)

    def _forget(self, state: Any, node: Any) -> None:
        state.last_heartbeats.pop(node, None)
        state.wait_list.discard(node)
        state.redundancy_list.discard(node)
        if state.participants.pop(node, None) is None:
            return
        if state.complete and not state.participants:
            state.complete, state.round = False, state.round + 1
        elif not state.complete and len(state.participants) < self._min_nodes:
            state.deadline = None


class WatchingRendezvous(DynamicRendezvousHandler):
    """torch's c10d rendezvous that also reports nodes which are gone."""

    first_call_seconds = last_call_seconds = 1.0
    _world_size = 0
    _joined_round = 0

    @property
    def round(self) -> int:
        """The number of the round that this node takes part in; newer rounds have higher numbers."""
        return self._joined_round + 1

    def next_rendezvous(self) -> RendezvousInfo:
        self._bootstrap_store_info = None
        self._shared_tcp_store_server = None
        self._state_holder.sync()
        state = self._state_holder.state
        is_first = state.round == 0 and not state.complete and not self._world_size
        compat.set_last_call(self, self.first_call_seconds if is_first else self.last_call_seconds)
        info = super().next_rendezvous()
        self._world_size, self._joined_round = info.world_size, self._state_holder.state.round
        return info

    def num_nodes_waiting(self) -> int:
        waiting = super().num_nodes_waiting()  # reads the newest state
        return waiting or int(self._gang_changed())

    def _gang_changed(self) -> bool:
        state = self._state_holder.state
        if state.closed or not self._world_size:
            return False
        return (
            state.round != self._joined_round  # the others went on without us while we slept
            or self._this_node not in state.participants
            or len(state.participants) < self._world_size
        )

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        return start_store(master_addr)


def join_rendezvous(
    store: Store,
    run_id: str,
    *,
    min_nodes: int,
    max_nodes: int,
    address: str,
    timeout_seconds: float,
    last_call_seconds: float,
    first_call_seconds: float | None = None,
) -> WatchingRendezvous:
    """Return the handler of one node.

    Args:
        store: The store that the nodes share, hosted outside of the agents.
        run_id: Name of the gang.
        min_nodes: Nodes that must be there.
        max_nodes: Nodes at which the round starts at once.
        address: This node's own address; no two nodes may be equal in address, pid and count.
        timeout_seconds: How long to wait for `min_nodes`.
        last_call_seconds: How long to wait for more than `min_nodes`.
        first_call_seconds: The same for the first round, where nobody is held up yet.
    """
    backend = _WatchingBackend(store, run_id, min_nodes=min_nodes, lost_seconds=LOST_SECONDS)
    handler = WatchingRendezvous.from_backend(
        run_id,
        store,
        backend,
        min_nodes,
        max_nodes,
        address,
        RendezvousTimeout(join=timedelta(seconds=timeout_seconds)),
        keep_alive_interval=BEAT_SECONDS,  # pyright: ignore[reportArgumentType]  (torch makes a timedelta of it)
        keep_alive_max_attempt=_NEVER,
    )
    handler.last_call_seconds = last_call_seconds
    handler.first_call_seconds = last_call_seconds if first_call_seconds is None else first_call_seconds
    compat.tune_rendezvous(handler)
    return handler
