"""The life of one pod on its node: what happens in which order, and how it is told to the API server."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.simulators.kubernetes.nodes import HOST_IP, Addresses
from tests.simulators.kubernetes.objects import Obj
from tests.simulators.kubernetes.podenv import (
    ConfigError,
    base_environment,
    build_command,
    build_environment,
    finish_environment,
    read_message,
)
from tests.simulators.kubernetes.podnames import PodNames
from tests.simulators.kubernetes.podprocesses import ContainerProcess, StartError
from tests.simulators.kubernetes.podstatus import (
    Ending,
    Place,
    Verdict,
    note_ended,
    note_init,
    note_never_run,
    note_running,
    note_waiting,
)
from tests.simulators.kubernetes.podverbs import LOG_ANNOTATION
from tests.simulators.kubernetes.restclient import RestClient, RestError

MISSING_IMAGE = "missing:"  # an image of this name cannot be pulled

_PULL_SECONDS = 0.5  # from the first failed pull to the back-off
_CONFIG_RETRY_SECONDS = 0.25


class _StoppedError(Exception):
    """The pod was deleted before it ran."""


@dataclass(frozen=True, kw_only=True)
class PodHost:
    """What all pods of a kubelet share."""

    api: RestClient
    addresses: Addresses
    names: PodNames
    folder: Path


class PodRun(threading.Thread):
    """One pod from its place on a node to its end.

    Args:
        pod: The object as last seen; it may be bound to its node already.
        number: Of the pod on this kubelet; short, since sockets below the pod's folder have short names.
        on_end: Called when nothing of it runs any more.
    """

    def __init__(
        self, pod: Obj, *, node: str, number: int, host: PodHost, on_end: Callable[[PodRun], None]
    ) -> None:
        super().__init__(name=f"pod {pod['metadata']['name']}", daemon=True)
        self.pod = pod
        self.uid: str = pod["metadata"]["uid"]
        self.place = Place(node=node, host_ip=HOST_IP)
        self.folder = host.folder / str(number)
        self.log = self.folder / "log"
        self.process: ContainerProcess | None = None
        self._host, self._on_end = host, on_end
        self._changed = threading.Condition()
        self._is_stopping = self._is_lost = self._is_deleted = False
        self._killer: threading.Timer | None = None
        self._kill_reason = ""
        self._verdict: Verdict | None = None
        self._initial: list[tuple[str, Ending]] = []

    # --- what others ask of it ---------------------------------------------------------------------------

    def stop(self, grace_seconds: float) -> None:
        """The pod was deleted: SIGTERM now, SIGKILL after the grace period; a second call may shorten it."""
        with self._changed:
            is_first, self._is_stopping, self._is_deleted = not self._is_stopping, True, True
            self._changed.notify_all()
            if self._killer is not None:
                self._killer.cancel()
            if self.process is None:
                return
            if is_first and grace_seconds > 0:
                self.process.terminate()
            self._killer = threading.Timer(grace_seconds, self.process.send, (9,))
            self._killer.daemon = True
            self._killer.start()

    def kill(self, number: int, *, reason: str = "", verdict: Verdict | None = None) -> None:
        """Send a signal to the first process; `reason` and `verdict` tell how its end is reported.

        Raises:
            ValueError: If the pod has no process.
        """
        with self._changed:
            if self.process is None:
                raise ValueError(f"`{self.pod['metadata']['name']}` has no process now.")
            self._kill_reason, self._verdict = reason, verdict
            self.process.send(number)

    def lose(self) -> None:
        """End without a word: the node is gone."""
        with self._changed:
            self._is_lost = self._is_stopping = True
            self._changed.notify_all()
            if self.process is not None:
                self.process.send(9)

    # --- its life ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Live, whatever happens on the way."""
        try:
            self._live()
        except Exception:  # noqa: BLE001 - whoever reads the test's output sees why the pod stands still
            if not self._is_lost:
                traceback.print_exc(file=sys.stderr)
        finally:
            if self._killer is not None:
                self._killer.cancel()
            if self.place.pod_ip:
                self._host.names.withdraw(self.pod, self.place.pod_ip)
                self._host.addresses.release(self.place.pod_ip)
            self._on_end(self)

    def _live(self) -> None:
        self._host.names.announce(self.pod)
        for folder in ("home", "tmp"):
            (self.folder / folder).mkdir(parents=True)
        try:
            if not self.pod["spec"].get("nodeName"):
                self._bind()
            self._report_waiting("ContainerCreating")
            self._pull()
            self.place = Place(node=self.place.node, host_ip=HOST_IP, pod_ip=self._host.addresses.take())
            ending = self._run_containers()
        except _StoppedError:
            self._report(lambda pod: note_never_run(pod, now=time.time()))
        else:
            self._host.names.withdraw(self.pod, self.place.pod_ip)
            self._report(lambda pod: note_ended(pod, self.place, ending, self._verdict, now=time.time()))
        self._remove()

    def _bind(self) -> None:
        where = {"name": self.pod["metadata"]["name"], "namespace": self.pod["metadata"]["namespace"]}
        note = {"metadata": {"annotations": {LOG_ANNOTATION: str(self.log)}}}
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": where["name"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": self.place.node},
        }
        try:
            self._host.api.patch("pods", body=note, **where)
            self._host.api.create("pods", binding, **where, subresource="binding")
        except RestError as error:
            if error.status not in (404, 409):
                raise
        pod = self._host.api.get("pods", **where)
        if pod is None or pod["metadata"]["uid"] != self.uid:
            raise _StoppedError
        # A scheduler may have been faster, with another of our nodes.
        self.place = Place(node=pod["spec"]["nodeName"], host_ip=HOST_IP)

    def _pull(self) -> None:
        """Stand still for an image that cannot be pulled."""
        image = self.pod["spec"]["containers"][0].get("image", "")
        if not image.startswith(MISSING_IMAGE):
            return
        text = f'failed to pull and unpack image "{image}": failed to resolve reference: not found'
        self._report_waiting("ErrImagePull", text)
        self._pause(_PULL_SECONDS)
        self._report_waiting("ImagePullBackOff", f'Back-off pulling image "{image}": ErrImagePull: {text}')
        self._pause(None)

    def _run_containers(self) -> Ending:
        """Run the init containers in order, and the main one if they all succeed; return the last ending."""
        for container in self.pod["spec"].get("initContainers") or ():
            ending = self._run_container(container, on_start=lambda: None)
            self._initial.append((container["name"], ending))
            if ending.exit_code:
                return ending
            self._report_waiting("PodInitializing")
        return self._run_container(self.pod["spec"]["containers"][0], on_start=self._report_running)

    def _run_container(self, container: Obj, *, on_start: Callable[[], None]) -> Ending:
        message = self.folder / f"termination-{container['name']}"
        message.touch()
        command, environment = self._configure(container, message)
        started_at = time.time()
        try:
            process = self._start(command, environment, container)
        except StartError as error:
            return Ending(
                exit_code=128,
                reason="StartError",
                message=str(error),
                started_at=started_at,
                finished_at=started_at,
            )
        on_start()
        code = process.wait()
        with self._changed:
            self.process = None
        process.kill_others()
        return Ending(
            exit_code=code,
            started_at=started_at,
            finished_at=time.time(),
            reason=self._kill_reason,
            message=read_message(container, message, self.log, code),
        )

    def _configure(self, container: Obj, message: Path) -> tuple[list[str], dict[str, str]]:
        """Return command and environment, as soon as all that they need is there."""
        base = base_environment(self.pod, folder=self.folder, names=self._host.names.file)
        while True:
            try:
                environment = build_environment(
                    self.pod, container, self.place, base=base, find_secret=self._find_secret
                )
                command = build_command(container, environment)
                return command, finish_environment(environment, container, message)
            except ConfigError as error:
                self._report_waiting("CreateContainerConfigError", str(error))
                self._pause(_CONFIG_RETRY_SECONDS)

    def _find_secret(self, name: str) -> Obj | None:
        return self._host.api.get("secrets", name, namespace=self.pod["metadata"]["namespace"])

    def _start(self, command: list[str], environment: dict[str, str], container: Obj) -> ContainerProcess:
        wanted = container.get("workingDir")
        folder = Path(wanted) if wanted and Path(wanted).is_dir() else self.folder / "home"
        with self._changed:
            if self._is_stopping:
                raise _StoppedError
            self.process = ContainerProcess(
                command, environment=environment, folder=folder, log=self.log, mark=self.uid
            )
            return self.process

    def _pause(self, seconds: float | None) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: self._is_stopping, seconds):
                raise _StoppedError

    # --- what it tells the API server --------------------------------------------------------------------

    def _report_waiting(self, reason: str, message: str = "") -> None:
        self._report(lambda pod: note_waiting(pod, self.place, reason, message, now=time.time()))

    def _report_running(self) -> None:
        now = time.time()
        self._host.names.publish(self.pod, self.place.pod_ip)
        self._report(lambda pod: note_running(pod, self.place, started_at=now, now=now))

    def _report(self, note: Callable[[Obj], None]) -> None:
        """Write a stage into the status."""
        if self._is_lost:
            return

        def change(pod: Obj) -> None:
            note(pod)
            if self._initial:
                note_init(pod, self._initial)

        self.pod = change_status(self._host.api, self.pod, change) or self.pod

    def _remove(self) -> None:
        """Let the object go, if it was deleted: nothing of the pod runs any more."""
        deleted = self._is_deleted or "deletionTimestamp" in self.pod["metadata"]
        if deleted and not self._is_lost:
            delete_pod(self._host.api, self.pod, grace_seconds=0)


def change_status(api: RestClient, pod: Obj, change: Callable[[Obj], None]) -> Obj | None:
    """Change the status of just this pod; return it, None when it is gone."""
    metadata = pod["metadata"]
    where = {"namespace": metadata["namespace"], "subresource": "status", "uid": metadata["uid"]}
    return api.change("pods", metadata["name"], change, **where)


def delete_pod(api: RestClient, pod: Obj, *, grace_seconds: int | None = None) -> None:
    """Delete just this pod, with its own grace period if no other is given."""
    metadata = pod["metadata"]
    where = {"namespace": metadata["namespace"], "uid": metadata["uid"]}
    api.delete("pods", metadata["name"], **where, grace_seconds=grace_seconds)
