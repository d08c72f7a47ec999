"""The one process that we start per node: it serves gang after gang until its launcher ends it or is gone."""

from __future__ import annotations

import logging
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

from prefect_torch_elastic import parcel
from prefect_torch_elastic.channel import Channel, ChannelClosed
from prefect_torch_elastic.node import coldstart, processes
from prefect_torch_elastic.node.fixedrendezvous import FixedRendezvous
from prefect_torch_elastic.node.forkserver import ForkServer
from prefect_torch_elastic.node.nodeagent import NodeAgent, Rendezvous
from prefect_torch_elastic.node.rendezvous import LoneRendezvous, connect_store, join_rendezvous
from prefect_torch_elastic.ranks import parse_endpoint
from prefect_torch_elastic.spec import Spec, restore_spec
from prefect_torch_elastic.wire import (
    NodeDone,
    RunGang,
    StopGang,
    TakeEvidence,
    Verdict,
)

FIRST_CALL_SECONDS = 10.0  # for the nodes of a range that are not there yet; they all start together
LAST_CALL_SECONDS = 1.0


def _run_gang(order: RunGang, server: ForkServer | None, channel: Channel) -> ForkServer | None:
    """Take part in one gang and say how it ended; return the fork server if it can still be used."""
    spec = restore_spec(order.fields)
    node_agent: NodeAgent | None = None
    handler: Rendezvous | None = None
    problem = ""
    try:
        parcel.verify_parcel(Path(order.call), key=bytes.fromhex(order.secret))
        handler = _build_handler(order, spec)
        node_agent = NodeAgent(order, spec, handler, server, channel)
        node_agent.take_signals()
        cast("Any", node_agent).run()
    except SignalException:
        pass
    except RendezvousTimeoutError:
        problem = f"fewer than {spec.min_nodes} nodes joined within {spec.rdzv_timeout_seconds:g} s"
    except Exception as error:  # whatever it was, the launcher must hear of it
        logging.getLogger(__name__).exception("the gang could not be run")
        problem = f"{type(error).__name__}: {error}"
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # between gangs the channel says what to do
        if handler is not None:
            handler.shutdown()  # ends its keep-alive thread
    killed, server = (node_agent.ranks.killed, node_agent.server) if node_agent else ([], server)
    with suppress(ChannelClosed):
        channel.send(NodeDone(node=order.node, problem=problem, killed=killed, warm=server is not None))
    return server


def _build_handler(order: RunGang, spec: Spec) -> Rendezvous:
    run_id = f"{order.task_run_id or order.run_key}-{order.attempt}"
    if not order.endpoint:
        return LoneRendezvous(run_id, after_round=order.after_round)
    if order.address:
        return FixedRendezvous(
            connect_store(order.endpoint),
            run_id,
            node=order.node,
            nnodes=spec.max_nodes,
            address=order.address,
            timeout_seconds=spec.rdzv_timeout_seconds,
        )
    host, _ = parse_endpoint(order.endpoint)
    configured = spec.rdzv_configs.get("last_call_timeout")
    return join_rendezvous(
        connect_store(order.endpoint),
        run_id,
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        address=host,
        timeout_seconds=spec.rdzv_timeout_seconds,
        first_call_seconds=float(configured or FIRST_CALL_SECONDS),
        last_call_seconds=float(configured or LAST_CALL_SECONDS),
    )


def run_agent(_spec: dict[str, Any], fds: list[int]) -> int:
    """Run one node's agent: gang after gang until the launcher says quit or is gone."""
    connection, log = fds
    processes.redirect_output(log)
    processes.adopt_orphans()
    server = ForkServer.fork_if_safe()  # before anything here starts a thread
    # all nodes have as many ranks: one wait less in a round
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    os.environ.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)  # ranks use the store that the agent starts
    channel = Channel(socket.socket(fileno=connection))
    with suppress(ChannelClosed):
        while True:
            for message in channel.receive(60.0):
                match message:
                    case RunGang():
                        server = _run_gang(message, server, channel)
                    case StopGang() | Verdict() | TakeEvidence():
                        pass  # of a gang that has ended meanwhile
                    case _:
                        raise ChannelClosed
    if server is not None:
        server.close()
    processes.kill_children(keep=set())
    os._exit(0)


if __name__ == "__main__":
    coldstart.run_as_child(run_agent)
