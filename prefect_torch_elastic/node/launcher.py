"""The head of the gangs of one driver: hosts the store, starts the nodes' agents, decides for all of them.

The driver starts one launcher and gives it gang after gang of a flow. It imports torch once; agents are
forked from it, and ranks from the agents' servers, so the second gang starts in hundredths of a second.
If the driver goes away, its launcher ends the gang and itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from prefect_torch_elastic.channel import Channel, ChannelClosed
from prefect_torch_elastic.diagnosis import diagnose_lost_launcher
from prefect_torch_elastic.errors import ElasticError
from prefect_torch_elastic.node import processes
from prefect_torch_elastic.node.ending import refuse_gang
from prefect_torch_elastic.node.forkserver import ForkServer
from prefect_torch_elastic.node.gang import Gang
from prefect_torch_elastic.node.gate import Gate
from prefect_torch_elastic.node.nodes import Nodes
from prefect_torch_elastic.observations import NodeSample
from prefect_torch_elastic.rankstate import StopReason
from prefect_torch_elastic.runfolder import AttemptFolder
from prefect_torch_elastic.spec import restore_spec
from prefect_torch_elastic.wire import (
    Dismiss,
    GangEnded,
    GangStatus,
    LogLines,
    Losable,
    Message,
    Notice,
    Quit,
    RunGang,
    StopGang,
)

_LOOK_SECONDS = 1.0
# What every process of a gang needs, imported once before the first fork.
_PRELOADED = (
    "cloudpickle",
    "torch.distributed",
    "prefect_torch_elastic.node.agent",
    "prefect_torch_elastic.node.rank",
)


def run_launcher(connection: socket.socket, log: str, parent: int) -> None:
    """Serve a driver until it says quit or is gone; nothing is left afterwards."""
    _redirect(log)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the driver gets them too, and says what to do
    for module in _PRELOADED:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    processes.adopt_orphans()
    nodes = Nodes(ForkServer.fork_if_safe(), log)  # before anything here starts a thread
    launcher = _Launcher(Channel(connection), nodes, parent)
    signal.signal(signal.SIGTERM, launcher.on_sigterm)
    try:
        launcher.serve()
    finally:
        launcher.close()
        nodes.close()
        processes.kill_children(keep=set())
        if mark := os.environ.get(processes.MARK):
            processes.kill_marked(mark)


class _Launcher:
    def __init__(self, driver: Channel, nodes: Nodes, parent: int) -> None:
        self._driver, self._nodes = driver, nodes
        self._parent = parent
        self._dropped = 0
        self._gone = False
        self._terminated = False
        self._gate: Gate | None = None  # it outlives its gang: nodes leave when the outcome is kept

    def close(self) -> None:
        """Close the door for nodes of other machines."""
        if self._gate is not None:
            self._gate.close()
            self._gate = None

    def on_sigterm(self, *_: object) -> None:
        self._terminated = True

    def serve(self) -> None:
        while not self._gone and not self._terminated:
            for message in self._read_driver(_LOOK_SECONDS):
                match message:
                    case RunGang():
                        self._run(message)  # it reads on from the next message
                    case Dismiss():
                        if self._gate is not None:
                            self._gate.dismiss(message.exit_code)
                    case Quit():
                        return
                    case _:
                        pass  # a stop for a gang that has ended meanwhile

    def _run(self, order: RunGang) -> None:
        try:
            gang = Gang(order, self._nodes, self._tell, gate=self._open_gate(order))
        except (ElasticError, OSError, RuntimeError) as error:
            self._tell(refuse_gang(error))
            return
        with contextlib.closing(gang):
            while gang.ended is None:
                for message in self._read_driver(0.0):  # before the wait: a stop may have come with the order
                    match message:
                        case StopGang():
                            gang.stop(message)
                        case Quit():
                            self._gone = True
                        case _:
                            pass
                if self._gone or self._terminated:
                    reason = StopReason.PREEMPTED if self._terminated else StopReason.CANCELLED
                    gang.stop(StopGang(reason=reason, grace_seconds=gang.grace_seconds))
                try:
                    gang.step(self._driver if not self._gone else None, _LOOK_SECONDS)
                except (ElasticError, OSError) as error:
                    gang.give_up(f"node lost, and no new one can be started: {error}")
            self._tell(_blame_signal(gang.ended) if self._terminated else gang.ended)
        if self._gone:  # nobody else removes what held the arguments
            AttemptFolder(number=order.attempt, path=Path(order.folder)).tidy()

    def _open_gate(self, order: RunGang) -> Gate | None:
        """Return where nodes of other machines come in; None for a gang that runs here as a whole."""
        self.close()
        nnodes = restore_spec(order.fields).max_nodes
        if order.meeting and nnodes > 1:
            key = bytes.fromhex(order.secret)
            self._gate = Gate(order.meeting, key=key, gang=order.gang, nnodes=nnodes)
        return self._gate

    def _read_driver(self, timeout_seconds: float) -> Iterator[object]:
        """Return the driver's messages.

        Its death shows as the end of the channel or, if a child of it holds that open, as a new parent.
        """
        if os.getppid() != self._parent:
            self._gone = True
        if self._gone:
            return
        try:
            yield from self._driver.receive(timeout_seconds)
        except ChannelClosed:
            self._gone = True

    def _tell(self, message: Message) -> None:
        """Pass a message on; what is for people is dropped, and counted, while the driver does not read."""
        with contextlib.suppress(ChannelClosed):
            if isinstance(message, GangEnded) and self._dropped:
                self._driver.send(self._count_dropped())
            if not isinstance(message, Losable):
                self._driver.send(message)
            elif self._driver.offer(message):
                if self._dropped:
                    self._driver.send(self._count_dropped())
            elif not isinstance(message, NodeSample):  # the next one says it all
                self._dropped += len(message.lines) if isinstance(message, LogLines) else 1

    def _count_dropped(self) -> Notice:
        count, self._dropped = self._dropped, 0
        text = f"{count} lines are missing here, but not in the files: the flow did not read."
        return Notice(level=logging.WARNING, text=text)


def _blame_signal(ended: GangEnded) -> GangEnded:
    """A gang that was stopped because somebody sent SIGTERM to its launcher did not stop as ordered."""
    if ended.status is not GangStatus.STOPPED:
        return ended
    return replace(ended, status=GangStatus.FAILED, diagnosis=asdict(diagnose_lost_launcher(-signal.SIGTERM)))


def _redirect(log: str) -> None:
    processes.redirect_output(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s | %(levelname)s | %(name)s - %(message)s")
    logging.captureWarnings(True)
