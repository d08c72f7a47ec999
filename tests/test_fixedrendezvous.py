"""The rendezvous of machines that are numbered from the start: all come, or one is missed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousTimeoutError

from prefect_torch_elastic.node.fixedrendezvous import FixedRendezvous
from prefect_torch_elastic.node.rendezvous import connect_store, start_store

Make = Callable[..., FixedRendezvous]


@pytest.fixture
def make():
    """`make(node)` returns the handler of one of three nodes, each with an address of its own."""
    store = start_store()
    made: list[FixedRendezvous] = []

    def handler(node: int, *, nnodes: int = 3, seconds: float = 20.0) -> FixedRendezvous:
        made.append(
            FixedRendezvous(
                connect_store(f"127.0.0.1:{store.port}"),
                "run-1",
                node=node,
                nnodes=nnodes,
                address=f"127.0.0.{node + 1}",
                timeout_seconds=seconds,
            )
        )
        return made[-1]

    yield handler
    for one in made:
        one.shutdown()


def address_of(info: RendezvousInfo) -> tuple[str, int]:
    assert info.bootstrap_store_info
    return info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port


def meet(handlers: list[FixedRendezvous]) -> list[RendezvousInfo]:
    found: dict[int, RendezvousInfo] = {}

    def come(index: int) -> None:
        found[index] = handlers[index].next_rendezvous()

    threads = [threading.Thread(target=come, args=[index]) for index in range(len(handlers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[index] for index in range(len(handlers))]


def test_each_node_has_its_own_number_and_ranks_meet_at_node_0(make: Make):
    infos = meet([make(node) for node in range(3)])
    assert [(info.rank, info.world_size) for info in infos] == [(0, 3), (1, 3), (2, 3)]
    ((host, port),) = {address_of(info) for info in infos}
    assert host == "127.0.0.1"
    assert connect_store(f"{host}:{port}").set("a", "b") is None


def test_next_round_has_a_store_without_old_keys(make: Make):
    handlers = [make(node) for node in range(3)]
    host, port = address_of(meet(handlers)[0])
    connect_store(f"{host}:{port}").set("old", "1")
    host, port = address_of(meet(handlers)[0])
    assert handlers[0].round == 2
    assert not connect_store(f"{host}:{port}").check(["old"])


class FailingStore(Store):
    """A store whose answer to its first `get` is lost."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store, self.failures = store, 1

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def get(self, key: str) -> bytes:
        if self.failures:
            self.failures -= 1
            raise DistStoreError("the connection was reset")
        return self._store.get(key)


@pytest.mark.parametrize("node", [0, 2])
def test_node_whose_store_failed_repeats_the_round_of_the_others(make: Make, node: int):
    handlers = [make(index) for index in range(3)]
    handlers[node]._store = cast("Any", FailingStore(handlers[node]._store))
    with ThreadPoolExecutor(3) as threads:
        coming = [threads.submit(one.next_rendezvous) for one in handlers]
        with pytest.raises(DistStoreError):
            coming[node].result(30)
        coming[node] = threads.submit(handlers[node].next_rendezvous)
        found = [one.result(30) for one in coming]
    assert {one.round for one in handlers} == {1}
    assert len({address_of(info) for info in found}) == 1


def test_round_that_a_node_misses_says_how_many_came(make: Make):
    alone = make(0, nnodes=3, seconds=0.2)
    with pytest.raises(RendezvousTimeoutError, match="1 of 3 nodes came"):
        alone.next_rendezvous()
