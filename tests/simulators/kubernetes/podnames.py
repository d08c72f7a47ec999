"""When a pod's host name can be looked up: the file that `tests/simulators/dns/sitecustomize.py` reads."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from tests.simulators.kubernetes.objects import Obj


class PodNames:
    """Names and addresses of pods with a subdomain, as the records of a headless Service.

    Args:
        file: Where to keep them.
        delay_seconds: How long a name stays unknown after its pod has an address.
    """

    def __init__(self, file: Path, *, delay_seconds: float = 0.0) -> None:
        self.file = file
        self.delay_seconds = delay_seconds
        self._lock = threading.Lock()
        self._zones: set[str] = set()
        self._names: dict[str, list[str]] = {}
        self._timers: set[threading.Timer] = set()
        self._write()

    def announce(self, pod: Obj) -> None:
        """From now on a name of the pod's subdomain that has no address is an unknown one."""
        if zone := _zone_of(pod):
            with self._lock:
                if zone not in self._zones:
                    self._zones.add(zone)
                    self._write()

    def publish(self, pod: Obj, address: str) -> None:
        """Give the pod's name its address, after the delay."""
        if not _name_of(pod):
            return
        if not self.delay_seconds:
            self._add(_name_of(pod), address)
            return
        timer = threading.Timer(self.delay_seconds, self._add, (_name_of(pod), address))
        timer.daemon = True
        self._timers.add(timer)
        timer.start()

    def withdraw(self, pod: Obj, address: str) -> None:
        """Take the pod's address from its name."""
        with self._lock:
            left = [other for other in self._names.pop(_name_of(pod), []) if other != address]
            if left:
                self._names[_name_of(pod)] = left
            self._write()

    def close(self) -> None:
        """Publish nothing any more."""
        for timer in self._timers:
            timer.cancel()
            if timer.ident is not None:
                timer.join()

    def _add(self, name: str, address: str) -> None:
        with self._lock:
            self._names.setdefault(name, []).append(address)
            self._write()

    def _write(self) -> None:
        new = self.file.with_suffix(".part")
        new.write_text(json.dumps({"names": self._names, "zones": sorted(self._zones)}))
        new.replace(self.file)


def _name_of(pod: Obj) -> str:
    zone = _zone_of(pod)
    return f"{pod['spec'].get('hostname') or pod['metadata']['name']}.{zone}" if zone else ""


def _zone_of(pod: Obj) -> str:
    subdomain = pod["spec"].get("subdomain")
    return f"{subdomain}.{pod['metadata']['namespace']}.svc.cluster.local" if subdomain else ""
