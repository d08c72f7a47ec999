"""The small process next to a host: it shows the driver that the host lives, and tidies up after it.

It imports neither Prefect nor torch. Its orders come as lines of JSON; what it has to say goes back so too.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from prefect_torch_elastic.dispatch.verdicts import GONE
from prefect_torch_elastic.errors import ElasticError
from prefect_torch_elastic.hosting import leftovers
from prefect_torch_elastic.store import Store, open_store

BYE = "bye"
REQUEST_SECONDS = 10.0  # a sign that comes late is as good as none
_TICK_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Duty:
    """What a companion has to do.

    Attributes:
        url: Of the store.
        credentials: For the store; empty takes them from the environment.
        key: The object that is the sign of life.
        seconds: Between two signs.
        run_id: The flow run whose processes are killed with the host; empty kills none.
        host: Pid of the host, our parent.
        born: Its start, as `leftovers.start_tick` says.
    """

    url: str
    credentials: dict[str, Any] = field(repr=False)
    key: str
    seconds: float
    run_id: str
    host: int
    born: int

    def render(self) -> str:
        """Return the line that a companion reads first."""
        return json.dumps(asdict(self))


def main() -> None:
    """Serve the host that started this process, until it says goodbye or is gone."""
    with open(0, "rb", buffering=0, closefd=False) as orders:  # a buffer would keep the goodbye from `select`
        duty = Duty(**json.loads(orders.readline()))
    signs = _Signs(duty)
    threading.Thread(target=signs.serve, daemon=True).start()  # a dead disk may hold it for ever
    if not _stays_until_goodbye(duty.host):
        if duty.run_id:
            run, until = duty.run_id, leftovers.now_tick()
            left = leftovers.kill_started(run, since=duty.born, until=until, gangs=False)
            leftovers.wait_for_gangs(run, since=duty.born, until=until)
            left += leftovers.kill_started(run, since=duty.born, until=until)
            _note(f"The host of flow run `{duty.run_id}` is gone; killed after it: {left or 'nothing'}.")
        signs.give_last()
    os._exit(0)


def _stays_until_goodbye(host: int) -> bool:
    """Wait, and return False when the host has died."""
    orders = [0]
    while os.getppid() == host:
        if select.select(orders, [], [], _TICK_SECONDS)[0]:
            line = os.read(0, 1024)
            if BYE.encode() in line:
                return True
            if not line:  # the body closed what it did not open; the host itself goes on
                orders = []
    return False


class _Signs:
    """Writes the sign of life, one after the other, and a last one."""

    def __init__(self, duty: Duty) -> None:
        self._duty = duty
        self._store: Store | None = None
        self._count = 0
        self._away_since: float | None = None
        self._writing = threading.Lock()  # nothing comes after the last one

    def serve(self) -> None:
        """Write again and again, and tell the host when that fails and when it works again."""
        while True:
            began = time.monotonic()
            self._count += 1
            try:
                with self._writing:
                    # another companion of this host never repeats what this one wrote
                    self._put(f"{os.getpid()}.{self._count}")
            except Exception as error:  # noqa: BLE001  (whatever it is, the next one may get through)
                self._store = None  # opened anew, with the credentials of that moment
                self._miss(error, began)
            else:
                self._recover(began)
            time.sleep(max(0.0, began + self._duty.seconds - time.monotonic()))

    def give_last(self) -> None:
        """Say that the host is gone, if that can be said in some seconds."""
        if self._writing.acquire(timeout=2 * REQUEST_SECONDS):
            try:
                self._put(GONE)
            except (ElasticError, OSError) as error:
                _note(f"The driver has to find out by itself that the host is gone: {error}")

    def _put(self, text: str) -> None:
        duty = self._duty
        self._store = self._store or open_store(
            duty.url, duty.credentials or None, request_timeout_seconds=REQUEST_SECONDS, retry_seconds=0.0
        )
        self._store.put(duty.key, text.encode())

    def _miss(self, error: Exception, now: float) -> None:
        if self._away_since is None:
            self._away_since = now
            _tell(
                f"The driver cannot be shown that this run is alive: {error} "
                "It is tried again; a driver that sees no sign for minutes takes the run for lost."
            )

    def _recover(self, now: float) -> None:
        if self._away_since is not None:
            _tell(
                f"The driver can be shown again that this run is alive, after {now - self._away_since:.0f} s."
            )
            self._away_since = None


def _tell(sentence: str) -> None:
    """Send a sentence to the host, for the log of the run."""
    with suppress(OSError):  # the host is gone, and with it whoever reads this
        sys.stdout.write(json.dumps(sentence) + "\n")
        sys.stdout.flush()


def _note(sentence: str) -> None:
    """Write a sentence to where the host's errors went."""
    with suppress(OSError):
        sys.stderr.write(sentence + "\n")
        sys.stderr.flush()
