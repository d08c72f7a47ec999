"""The agents of this machine's nodes: started from a warm seed, watched, replaced, ended."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from prefect_torch_elastic.channel import Channel, ChannelClosed, is_readable
from prefect_torch_elastic.errors import ElasticError
from prefect_torch_elastic.node import processes
from prefect_torch_elastic.node.coldstart import exec_child
from prefect_torch_elastic.node.forkserver import Child, ForkServer, ServerLost
from prefect_torch_elastic.wire import Message, Quit

QUIT_SECONDS = 5.0


class Node:
    """One agent process of this machine and the channel to it.

    Attributes:
        index: Its place in the gang.
        is_gone: Whether it had died when it was listened to last; its last words were heard then.
    """

    def __init__(self, index: int, pid: int, channel: Channel) -> None:
        self.index, self.pid, self.channel = index, pid, channel
        self.pidfd = os.pidfd_open(pid)
        self.code: int | None = None
        self.is_gone = False
        self._clock = processes.StopClock()

    @property
    def fds(self) -> list[int]:
        """What becomes readable when there are news."""
        return [self.channel.fileno(), self.pidfd]

    def receive(self, folder: Path) -> Iterator[Message]:  # noqa: ARG002  (its files are in there already)
        """Yield what the agent has sent."""
        gone = is_readable(self.pidfd, 0.0)  # before the channel is read, so that nothing comes after it
        with suppress(ChannelClosed):
            yield from self.channel.receive(0.0)
        self.is_gone = gone

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def stopped_seconds(self) -> float:
        """How long the agent has been held by SIGSTOP or a debugger."""
        return self._clock.seconds(self.pid)

    def send(self, message: Message) -> None:
        with suppress(ChannelClosed):  # its death is noticed by pidfd
            self.channel.send(message)

    def interrupt(self) -> None:
        """Wake an agent that waits in a rendezvous, or that somebody has stopped."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> int:
        """Take the exit status of an agent that has ended, and close what belongs to it."""
        try:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            self.code = 255
        os.close(self.pidfd)
        self.channel.close()
        return self.code


class Nodes:
    """All agents of this machine that live now, by index; they stay between the gangs of a flow.

    Args:
        seed: Agents are forked from it; None starts each in a fresh interpreter.
        log: Where agents write to.
        environment: Of the agents; None is this process's.
    """

    def __init__(
        self, seed: ForkServer | None, log: str, *, environment: Mapping[str, str] | None = None
    ) -> None:
        self._seed, self._log = seed, log
        self._environment = dict(os.environ if environment is None else environment)
        self.living: dict[int, Node] = {}

    def provide(self, index: int) -> Node:
        """Return the agent of node `index`, a new one if there is none.

        Raises:
            ElasticError: If none can be started.
        """
        if (node := self.living.get(index)) is not None:
            if not is_readable(node.pidfd, 0.0):
                return node
            self.bury(node)  # it died between two gangs
        ours, theirs = socket.socketpair()
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        child = Child(
            target="agent",
            spec={},
            environment=self._environment,
            directory=os.getcwd(),
            fds=[theirs.fileno(), log],
        )
        try:
            pid = self._fork(child) or exec_child(child)
        except OSError as error:
            raise ElasticError(f"no agent can be started for node {index}: {error}") from error
        finally:
            theirs.close()
            os.close(log)
        self.living[index] = Node(index, pid, Channel(ours))
        return self.living[index]

    def _fork(self, child: Child) -> int | None:
        if self._seed is not None:
            try:
                return self._seed.fork([child])[0]
            except ServerLost:
                self._seed = None
        return None

    def bury(self, node: Node) -> int:
        """Reap an agent that has died and everything that it left; return its exit code."""
        code = node.reap()
        self.living.pop(node.index, None)
        seed = {self._seed.pid} if self._seed else set[int]()
        processes.kill_children(keep=seed | {other.pid for other in self.living.values()})
        return code

    def retire(self, *nodes: Node) -> None:
        """End agents that wait for a gang."""
        for node in nodes:
            node.send(Quit())
        deadline = time.monotonic() + QUIT_SECONDS
        for node in nodes:
            is_readable(node.pidfd, deadline - time.monotonic())
            node.signal(signal.SIGKILL)
            self.bury(node)

    def close(self) -> None:
        """End all agents and the seed."""
        self.retire(*self.living.values())
        if self._seed is not None:
            self._seed.close()
