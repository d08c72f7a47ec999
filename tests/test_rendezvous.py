"""How a lone node meets: a store and a number for each round, also after another agent's rounds."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from prefect_torch_elastic.node.rendezvous import LOOPBACK, LoneRendezvous


@pytest.mark.parametrize("after_round", [0, 4])
def test_rounds_of_a_lone_node_go_on_after_those_of_the_agent_before(after_round):
    handler = LoneRendezvous("run", after_round=after_round)
    assert handler.round == after_round
    for number in (1, 2):
        info = handler.next_rendezvous()
        assert (info.rank, info.world_size, handler.round) == (0, 1, after_round + number)
    handler.shutdown()


def test_round_of_a_lone_node_has_a_store_of_its_own_on_loopback():
    handler = LoneRendezvous("run")
    first = handler.next_rendezvous()
    first.store.set("key", "of the first round")
    second = handler.next_rendezvous()
    assert second.bootstrap_store_info is not None
    assert second.bootstrap_store_info.master_addr == LOOPBACK
    assert not second.store.check(["key"])
    handler.shutdown()
