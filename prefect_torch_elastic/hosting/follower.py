"""A pod that is not the leader: it finds the leader, takes part in the gang, and leaves with its verdict."""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from prefect.settings import get_current_settings

from prefect_torch_elastic.channel import Channel
from prefect_torch_elastic.dispatch.order import CallReference
from prefect_torch_elastic.errors import ElasticError
from prefect_torch_elastic.formation import write_order
from prefect_torch_elastic.hosting.arrival import Arrival, Source, open_source, receive
from prefect_torch_elastic.hosting.gangcalls import describe_call
from prefect_torch_elastic.hosting.leaving import TermSignal, hold, write_last_words
from prefect_torch_elastic.hosting.membership import Membership
from prefect_torch_elastic.hosting.ownrun import OwnRun
from prefect_torch_elastic.hosting.workspace import open_workspace
from prefect_torch_elastic.local import launcher_environment, mark_environment
from prefect_torch_elastic.node import processes
from prefect_torch_elastic.node.devices import GpuLease
from prefect_torch_elastic.node.handshake import HandshakeFailed, introduce, keep_alive
from prefect_torch_elastic.node.nodes import Nodes
from prefect_torch_elastic.node.placement import place_gang
from prefect_torch_elastic.pod import ExitCode, LastWords, Pod, Why
from prefect_torch_elastic.runfolder import AttemptFolder
from prefect_torch_elastic.runlog import CallStatus
from prefect_torch_elastic.spec import Spec, restore_spec
from prefect_torch_elastic.wire import JoinGang, RunGang

_CONNECT_SECONDS = 5.0
_PAUSE_SECONDS = (0.1, 2.0)
_SAY_SECONDS = 60.0
_LOOK_SECONDS = 10.0  # between two looks whether the call is over already


class Departure(Exception):  # noqa: N818  (an end, not a mistake)
    """This pod has nothing more to do; why, and the code to leave with."""

    def __init__(self, code: ExitCode, why: Why, message: str) -> None:
        super().__init__(message)
        self.code, self.why, self.message = code, why, message


def follow(reference: CallReference, pod: Pod) -> int:
    """Take part in the gang of a call and return the exit code of this pod.

    Raises:
        Exception: Whatever keeps it from that, unless it was asked to end.
    """
    signal, own = TermSignal(), OwnRun.from_environment()
    try:
        _follow(reference, pod, own, signal)
    except Departure as parting:
        departure = parting
    except Exception as error:
        own.logger.error("Node %s: %s", pod.node, error)
        if not signal.arrived:
            raise
        departure = Departure(ExitCode.STOPPED, Why.STOPPED, str(error))
    finally:
        own.flush()
    code = ExitCode.STOPPED if signal.arrived else departure.code
    words = LastWords(exit_code=code, why=departure.why, message=departure.message, node=pod.node)
    write_last_words(pod, words)
    return int(code)


def _follow(reference: CallReference, pod: Pod, own: OwnRun, signal: TermSignal) -> NoReturn:
    source = open_source(reference, own)
    _leave_if_over(source)
    with ExitStack() as stack:
        home = get_current_settings().home
        folder = stack.enter_context(open_workspace(home, f"{own.id}-node-{pod.node}"))
        arrival = receive(source, folder=folder)
        if arrival.order.fields["include_files"]:
            os.chdir(folder / "code")  # as on the leader
        spec = restore_spec(arrival.order.fields)
        connection = _reach_leader(source, spec, pod, own)
        signal.listen()  # until here SIGTERM ends this process, whatever it waits for
        lease = GpuLease()
        stack.callback(lease.release)
        processes.adopt_orphans()
        nodes = Nodes(None, str(folder / "agent.log"), environment=_agent_environment(spec))
        membership = Membership(
            pod.node,
            Channel(connection),
            nodes,
            lambda invitation: _localize(invitation, arrival, own, pod, lease),
            signal,
        )
        parting = membership.serve()
    if parting.exit_code is not None:
        raise Departure(ExitCode(parting.exit_code), Why.DISMISSED, "The gang is over; its leader says how.")
    hold(pod, lambda: signal.arrived)
    raise Departure(ExitCode.LOST, Why.LOST_NODE, "The leader is gone, and with it the gang.")


def _agent_environment(spec: Spec) -> dict[str, str]:
    environment = launcher_environment({**os.environ, **spec.env}, nproc_per_node=spec.nproc_per_node)
    return mark_environment(environment)[0]


def _localize(invitation: JoinGang, arrival: Arrival, own: OwnRun, pod: Pod, lease: GpuLease) -> RunGang:
    """Return the agent's order: what the leader decides, with what this machine has."""
    call = describe_call(arrival, own)
    folder = Path(call.place.local) / call.identity.folder / "attempts" / Path(invitation.folder).name
    folder.mkdir(parents=True, exist_ok=True)
    # the leader's parcel may lie in the same folder of a shared disk
    parcel = arrival.payload.path.with_name("call-of-ranks")
    order = write_order(call, AttemptFolder(number=invitation.attempt, path=folder), parcel=parcel)
    placement = place_gang(replace(call.spec, nnodes=1), order.environment, lease)
    if placement.nproc != invitation.nproc:
        raise ElasticError(
            f"this machine would run {placement.nproc} ranks and the leader's {invitation.nproc}: "
            "the machines of a gang must be equal. Set `nproc_per_node` to a number."
        )
    return replace(
        order,
        node=invitation.node,
        attempt=invitation.attempt,
        nproc=placement.nproc,
        environment=placement.environment,
        devices=placement.devices[0],
        endpoint=invitation.endpoint,
        address=pod.address,
        restart_count=invitation.restart_count,
        preemptions=invitation.preemptions,
    )


def _reach_leader(source: Source, spec: Spec, pod: Pod, own: OwnRun) -> socket.socket:
    """Return a connection to the leader, who may come up minutes later, and whose name later still."""
    key = source.record.key
    deadline, say_at = time.monotonic() + spec.rdzv_timeout_seconds, time.monotonic() + _SAY_SECONDS
    look_at = time.monotonic() + _LOOK_SECONDS
    pause, longest = _PAUSE_SECONDS
    where = f"{pod.leader_host}:{pod.leader_port}"
    while True:
        try:
            return _call_leader(pod, key)
        except HandshakeFailed as error:
            if error.final:
                raise ElasticError(f"node {pod.node} cannot join its gang: {error}.") from error
            problem = str(error)
        except OSError as error:  # the name does not resolve yet, or nobody listens yet
            problem = str(error)
        now = time.monotonic()
        if now >= deadline:
            raise Departure(
                ExitCode.LOST,
                Why.LEADER_UNREACHABLE,
                f"Node {pod.node} has not reached the leader `{where}` in {spec.rdzv_timeout_seconds:g} s: "
                f"{problem}. See the pod of node 0, and whether the cluster's DNS answers.",
            )
        if now >= say_at:
            say_at = now + _SAY_SECONDS
            own.logger.warning("Node %s waits for the leader `%s`: %s.", pod.node, where, problem)
        if now >= look_at:
            look_at = now + _LOOK_SECONDS
            _leave_if_over(source)
        time.sleep(pause)
        pause = min(pause * 1.5, longest)


def _call_leader(pod: Pod, key: bytes) -> socket.socket:
    connection = socket.create_connection((pod.leader_host, pod.leader_port), _CONNECT_SECONDS)
    try:
        introduce(connection, key=key, gang=pod.gang, node=pod.node, pod=pod.name)
        keep_alive(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _leave_if_over(source: Source) -> None:
    """Leave when the call has its value already: then no leader will come."""
    outcome = source.record.log.refresh().outcomes.get(source.record.call)
    if outcome is not None and outcome.status is CallStatus.SUCCEEDED:
        raise Departure(ExitCode.DONE, Why.DONE, "The call has been carried out already.")
