"""The part that a machine takes in a gang of several: messages pass between its agent and the leader.

The leader's words go to the agent, with the paths and secrets of this machine put in; what the agent says
goes back. Nothing is decided here, but who is gone is noticed on both sides.
"""

from __future__ import annotations

import base64
import logging
import select
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect_torch_elastic.channel import Channel, ChannelClosed
from prefect_torch_elastic.explanations import render_exit
from prefect_torch_elastic.hosting.leaving import TermSignal
from prefect_torch_elastic.node.nodes import Node, Nodes
from prefect_torch_elastic.wire import (
    Dismiss,
    JoinGang,
    Losable,
    Message,
    NodeDone,
    NodeLeaves,
    RankError,
    RanksFailed,
    RunGang,
    StopGang,
)

_LOOK_SECONDS = 1.0
_MOST_ERROR_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Parting:
    """How a membership ended.

    Attributes:
        exit_code: What the leader said; None if it was lost.
    """

    exit_code: int | None


class Membership:
    """This machine's node, from the moment that the leader has let it in.

    Args:
        node: Its number.
        leader: The connection to the leader.
        nodes: Starts and ends the agent.
        localize: Turns the leader's invitation into an order for the agent.
        signal: Whether this pod was asked to end.
    """

    def __init__(
        self,
        node: int,
        leader: Channel,
        nodes: Nodes,
        localize: Callable[[JoinGang], RunGang],
        signal: TermSignal,
    ) -> None:
        self._node, self._leader, self._nodes = node, leader, nodes
        self._localize, self._signal = localize, signal
        self._folder = Path()
        self._said_leaving = False
        self._parting: Parting | None = None

    def serve(self) -> Parting:
        """Take part until the leader says goodbye or is gone; the agent and its ranks are gone then too."""
        try:
            while self._parting is None:
                self._turn()
            return self._parting
        finally:
            self._nodes.close()

    def _turn(self) -> None:
        agent = self._nodes.living.get(self._node)
        poll = select.poll()
        poll.register(self._leader, self._leader.events)
        for fd in agent.fds if agent else []:
            poll.register(fd, select.POLLIN)
        if agent:
            poll.register(agent.channel, agent.channel.events)
        if not self._said_leaving:
            poll.register(self._signal, select.POLLIN)
        poll.poll(_LOOK_SECONDS * 1000)
        if self._signal and not self._said_leaving:
            self._said_leaving = True
            self._tell(NodeLeaves(node=self._node))
        if agent:
            self._listen_to(agent)
        self._listen_to_leader()

    # ------------------------------------------------------------ downwards

    def _listen_to_leader(self) -> None:
        try:
            for message in self._leader.receive(0.0):
                self._pass_down(message)
        except ChannelClosed:
            self._parting = self._parting or Parting(exit_code=None)

    def _pass_down(self, message: Message) -> None:
        match message:
            case JoinGang():
                self._join(message)
            case Dismiss():
                self._parting = Parting(exit_code=message.exit_code)
            case _:
                agent = self._nodes.living.get(self._node)
                if agent is None:
                    return
                agent.send(message)
                if isinstance(message, StopGang):
                    agent.interrupt()

    def _join(self, invitation: JoinGang) -> None:
        try:
            order = self._localize(invitation)
        except Exception as error:
            logging.getLogger(__name__).exception("this node cannot take part in the gang")
            self._tell(NodeDone(node=self._node, problem=f"{type(error).__name__}: {error}"))
            return
        self._folder = Path(order.folder) / f"node-{self._node}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._nodes.provide(self._node).send(order)

    # ------------------------------------------------------------ upwards

    def _listen_to(self, agent: Node) -> None:
        for message in agent.receive(self._folder):
            if isinstance(message, RanksFailed):
                self._send_errors(message.ranks)
            self._tell(message)
        if agent.is_gone:
            how = render_exit(self._nodes.bury(agent))
            self._tell(NodeDone(node=self._node, problem=f"its agent died ({how})"))

    def _send_errors(self, ranks: list[dict[str, Any]]) -> None:
        """Send the exceptions of failed ranks along: the leader cannot read this machine's files."""
        for rank in ranks:
            if not (name := rank.get("error")):
                continue
            with suppress(OSError):  # its text is in the evidence
                data = Path(name).read_bytes()
                if len(data) <= _MOST_ERROR_BYTES:
                    self._tell(RankError(rank=rank["rank"], data=base64.b64encode(data).decode()))

    def _tell(self, message: Message) -> None:
        with suppress(ChannelClosed):  # the next read notices it
            if isinstance(message, Losable):
                self._leader.offer(message)
            else:
                self._leader.send(message)
