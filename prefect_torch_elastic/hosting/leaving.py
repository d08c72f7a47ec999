"""How a pod leaves: by a signal that it hears, with last words, and as a victim not before its turn."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from prefect_torch_elastic.errors import ElasticError, StoreError
from prefect_torch_elastic.pod import (
    INDEX_VARIABLE,
    TERMINATION_LOG_VARIABLE,
    ExitCode,
    LastWords,
    Pod,
    Why,
    render_last_words,
)

_TICK_SECONDS = 0.1
_FULL = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT)


class TermSignal:
    """SIGTERM as a fact that can be asked for and polled for, once it is listened to.

    Before that a pod has nothing to lose, and whoever started the program has it leave at once.
    """

    def __init__(self) -> None:
        self.arrived = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def listen(self) -> None:
        """Take note of signals from now on; only for the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def fileno(self) -> int:
        """Stays readable once the signal has come."""
        return self._bell

    def __bool__(self) -> bool:
        return self.arrived

    def _note(self, *_: object) -> None:
        self.arrived = True
        with suppress(OSError):
            os.eventfd_write(self._bell, 1)


def hold(pod: Pod, signalled: Callable[[], bool]) -> bool:
    """Wait for this pod's own SIGTERM: a victim that exits first would be taken for the culprit.

    Kubernetes ends the others of a gang within a second or two of the first death. Whether it came in time.
    """
    until = time.monotonic() + pod.hold_seconds
    while not signalled() and time.monotonic() < until:
        time.sleep(_TICK_SECONDS)
    return signalled()


def refuse(environment: Mapping[str, str], error: BaseException) -> int:
    """Leave last words about an error that has ended this pod's program, and return the exit code.

    Another attempt may find a store or an API that is away now, or a machine with room; anything else would
    only fail again.
    """
    code = ExitCode.LOST if _may_pass(error) else ExitCode.CONFIGURATION
    ours = isinstance(error, ElasticError | SystemExit)
    message = str(error) if ours else f"{type(error).__name__}: {error}"
    index = environment.get(INDEX_VARIABLE, "")
    words = LastWords(
        exit_code=code, why=Why.REFUSED, message=message, node=int(index) if index.isdecimal() else 0
    )
    _write(environment.get(TERMINATION_LOG_VARIABLE, ""), words)
    return int(code)


def _may_pass(error: BaseException) -> bool:
    match error:
        case StoreError() | ConnectionError() | TimeoutError():
            return True
        case ImportError():  # Prefect, which the question below needs, may be what is missing
            return False
        case OSError():
            return error.errno in _FULL
        case _:
            from prefect_torch_elastic.dispatch.polling import describe_outage

            return bool(describe_outage(error))


def write_last_words(pod: Pod, words: LastWords) -> None:
    """Leave them where the kubelet looks; without such a file they are in the log only."""
    _write(pod.termination_log, words)


def _write(path: str, words: LastWords) -> None:
    if path:
        with suppress(OSError), open(path, "w", encoding="utf-8") as file:
            file.write(render_last_words(words))
