"""The host's sign of life in the store, given by a companion process that this room starts and minds.

It is a process, not a thread: a body may hold the interpreter's lock for as long as one call of a C library
takes, and would be taken for lost.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from prefect_torch_elastic.hosting import leftovers
from prefect_torch_elastic.hosting.companion import BYE, Duty
from prefect_torch_elastic.pod import NNODES_VARIABLE

SECONDS = 10.0
_GOODBYE_SECONDS = 2.0
_RESTART_SECONDS = 2.0
_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from prefect_torch_elastic.hosting.companion import main; main()"
)


class SignOfLife(AbstractContextManager["SignOfLife"]):
    """Puts a new text into one object, every ten seconds, as long as this process lives.

    When this process is killed, what the flow run started is killed too.

    Args:
        url: Of the store.
        credentials: For the store, as JSON; empty takes them from the environment.
        key: The object.
        warn: Called with a sentence when the store cannot be written and when it can again, in a thread.
        seconds: Between two writes.
    """

    def __init__(
        self,
        url: str,
        credentials: Mapping[str, Any],
        key: str,
        *,
        warn: Callable[[str], Any],
        seconds: float = SECONDS,
    ) -> None:
        self._duty = Duty(
            url=url,
            credentials=dict(credentials),
            key=key,
            seconds=seconds,
            # a pod ends as a whole with its PID 1: there is nothing to tidy up, and the run has other pods
            run_id="" if NNODES_VARIABLE in os.environ else os.environ.get(leftovers.RUN_VARIABLE, ""),
            host=os.getpid(),
            born=leftovers.start_tick(os.getpid()),
        )
        self._warn = warn
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._said = False
        self._companion: subprocess.Popen[str] | None = None
        self._minder = threading.Thread(target=self._mind, name="sign-of-life", daemon=True)

    def __enter__(self) -> SignOfLife:
        self._companion = self._try_to_start()
        self._minder.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        with self._lock:
            companion = self._companion
        if companion is None:
            return
        assert companion.stdin
        with suppress(OSError, subprocess.TimeoutExpired):
            companion.stdin.write(BYE + "\n")
            companion.stdin.flush()
            companion.wait(_GOODBYE_SECONDS)
        companion.kill()
        companion.wait()

    def _start(self) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if name != leftovers.RUN_VARIABLE}
        companion = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, str(Path(__file__).parents[2])],
            env=environment,  # whoever kills the processes of the run finds the companion last, by itself
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the host
        )
        assert companion.stdin
        with suppress(OSError):  # gone already: the minder sees that
            companion.stdin.write(self._duty.render() + "\n")
            companion.stdin.flush()
        return companion

    def _mind(self) -> None:
        """Pass on what the companion says, and start another one when it ends before its time."""
        while True:
            code = self._listen(self._companion) if self._companion else None
            if self._over.wait(_RESTART_SECONDS):
                return
            if code is not None:
                self._warn(
                    f"The process that says that this run is alive ended with {code}; it is started again."
                )
            with self._lock:
                self._companion = None if self._over.is_set() else self._try_to_start()

    def _listen(self, companion: subprocess.Popen[str]) -> int:
        """Pass on what a companion says until it has ended, and return its code."""
        assert companion.stdout
        for line in companion.stdout:
            try:
                sentence = json.loads(line)
            except ValueError:  # of the interpreter, or of a library that prints
                sentence = f"The process that says that this run is alive wrote: {line.strip()}"
            self._warn(sentence)
        return companion.wait()

    def _try_to_start(self) -> subprocess.Popen[str] | None:
        try:
            companion = self._start()
        except OSError as error:  # no memory, too many processes: that may pass
            if not self._said:
                self._warn(
                    f"The driver cannot be shown that this run is alive: {error}. "
                    "It is tried again; a driver that sees no sign for minutes takes the run for lost."
                )
            self._said = True
            return None
        self._said = False
        return companion
