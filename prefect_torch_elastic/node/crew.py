"""The nodes that take part in one gang: what they were ordered, how they are reached, who is still there."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from prefect_torch_elastic.channel import Channel
from prefect_torch_elastic.explanations import render_exit
from prefect_torch_elastic.node.awaited import Awaited
from prefect_torch_elastic.node.devices import GpuLease
from prefect_torch_elastic.node.gate import Gate, RemoteNode
from prefect_torch_elastic.node.nodes import Node, Nodes
from prefect_torch_elastic.node.placement import place_gang
from prefect_torch_elastic.node.rendezvous import LOOPBACK, start_store
from prefect_torch_elastic.ranks import parse_endpoint, render_endpoint
from prefect_torch_elastic.spec import Spec
from prefect_torch_elastic.wire import JoinGang, Message, RunGang, TakeEvidence

STOPPED_SECONDS = 30.0  # an agent that is held by SIGSTOP or a debugger


class Crew:
    """The nodes of one gang, and what it holds for them: GPUs, and the store that they meet at.

    Args:
        order: The gang.
        spec: Its fields, read.
        nodes: Agents of this machine.
        gate: Where nodes of other machines come in; this machine is node 0 then. None runs all nodes here.

    Attributes:
        nnodes: Nodes that the gang starts with on this machine.
        folder: Of the attempt.
        awaited: What is known about nodes that have not come yet; None without a gate.

    Raises:
        ElasticError: If too few GPUs are free.
    """

    def __init__(self, order: RunGang, spec: Spec, nodes: Nodes, gate: Gate | None) -> None:
        self._spec, self._nodes, self._gate = spec, nodes, gate
        self._lease = GpuLease()
        here = spec if gate is None else replace(spec, nnodes=1)
        self._placement = placement = place_gang(here, order.environment, self._lease)
        address = parse_endpoint(order.meeting)[0] if gate else ""
        self._order = replace(
            order, nproc=placement.nproc, environment=placement.environment, address=address
        )
        self._store = start_store(address or LOOPBACK) if spec.max_nodes > 1 else None
        self._busy: dict[int, Node | RemoteNode] = {}
        self.nnodes, self.folder = placement.nnodes, Path(order.folder)
        self.awaited = Awaited(spec) if gate else None

    def close(self) -> None:
        """Give back what the gang held."""
        self._lease.release()
        self._store = None

    # ------------------------------------------------------------ who is there

    @property
    def is_gone(self) -> bool:
        """Whether no node takes part any more."""
        return not self._busy

    @property
    def indexes(self) -> list[int]:
        return list(self._busy)

    def has(self, node: Node | RemoteNode) -> bool:
        """Whether this very agent takes part, not another one in its place."""
        return self._busy.get(node.index) is node

    def others(self, indexes: Iterable[int]) -> list[Node | RemoteNode]:
        """Return the nodes that are none of these."""
        return [node for index, node in self._busy.items() if index not in set(indexes)]

    def lost(self) -> list[Node | RemoteNode]:
        """Return nodes that are gone without a farewell; ends agents that have been held for too long."""
        for node in self._busy.values():
            if node.stopped_seconds() > STOPPED_SECONDS:  # the others of a gang have gone on without it
                node.kill()
        return [node for node in self._busy.values() if node.is_gone]

    def can_shrink(self) -> bool:
        """Whether those that are left are enough, for a range such as `2:4`."""
        spec = self._spec
        enough = len(self._busy) >= spec.min_nodes
        return self._gate is None and enough and spec.min_nodes != spec.max_nodes

    # ------------------------------------------------------------ come and go

    def start(self, index: int, *, restart_count: int, after_round: int) -> None:
        """Order an agent of this machine to take part.

        Raises:
            ElasticError: If none can be started.
        """
        node = self._nodes.provide(index)
        self._busy[index] = node
        host = self._order.address or LOOPBACK
        endpoint = render_endpoint(host, self._store.port) if self._store else ""
        (self.folder / f"node-{index}").mkdir(parents=True, exist_ok=True)
        order = replace(self._order, node=index, devices=self._placement.devices[index], endpoint=endpoint)
        node.send(replace(order, restart_count=restart_count, after_round=after_round))

    def admit(self, node: RemoteNode, *, restart_count: int) -> None:
        """Let a node of another machine take part."""
        assert self.awaited
        assert self._store
        self.awaited.arrive(node.index)
        self._busy[node.index] = node
        node.send(
            JoinGang(
                node=node.index,
                attempt=self._order.attempt,
                folder=self.folder.name,
                nproc=self._order.nproc,
                endpoint=render_endpoint(self._order.address, self._store.port),
                restart_count=restart_count,
                preemptions=self._order.preemptions,
            )
        )

    def arrivals(self) -> list[RemoteNode]:
        """Return nodes of other machines that have come in."""
        return self._gate.take_arrivals() if self._gate else []

    def shut(self) -> None:
        """Let nobody in any more: who comes now belongs to the next incarnation of the gang."""
        if self._gate:
            self._gate.shut()

    def leave(self, node: Node | RemoteNode, *, is_warm: bool) -> None:
        """A node's part is over; an agent that cannot be used again is ended."""
        self._busy.pop(node.index, None)
        if not is_warm and not isinstance(node, RemoteNode):
            self._nodes.retire(node)

    def bury(self, node: Node | RemoteNode) -> str:
        """Take out a node that was lost, and return what became of it."""
        self._busy.pop(node.index, None)
        if isinstance(node, RemoteNode):
            return node.describe_end()
        return f"its agent died ({render_exit(self._nodes.bury(node))})"

    def retire_all(self) -> None:
        """End the agents of this machine: they have an order that will not be carried out."""
        self._nodes.retire(*(node for node in self._busy.values() if not isinstance(node, RemoteNode)))

    # ------------------------------------------------------------ words

    def send(self, message: Message, *, interrupt: bool = False) -> None:
        """Say something to all nodes; the interrupt wakes those that wait in a rendezvous."""
        for node in self._busy.values():
            node.send(message)
            if interrupt:
                node.interrupt()

    def ask(self, request: TakeEvidence, nodes: Sequence[int] | None) -> list[int]:
        """Ask all nodes, or these, for evidence; return whom."""
        asked = [index for index in self._busy if nodes is None or index in nodes]
        for index in asked:
            self._busy[index].send(request)
        return asked

    def kill(self) -> None:
        """End all nodes at once."""
        for node in self._busy.values():
            node.kill()

    def wait(
        self, driver: Channel | None, seconds: float, *, admit: Callable[[], None]
    ) -> list[Node | RemoteNode]:
        """Wait until somebody has something to say, and return which nodes have."""
        poll = select.poll()
        by_fd = {fd: node for node in self._busy.values() for fd in node.fds}
        for file in [*by_fd, *([self._gate] if self._gate else [])]:
            poll.register(file, select.POLLIN)
        channels = [node.channel for node in by_fd.values()] + ([driver] if driver else [])
        for channel in channels:  # again: some have something to send
            poll.register(channel, channel.events)
        ready = [fd for fd, _ in poll.poll(max(0.0, seconds) * 1000)]
        admit()
        return list({by_fd[fd].index: by_fd[fd] for fd in ready if fd in by_fd}.values())
