"""What a running stack says of itself in `<home>/stack.json`, and whether that is still true."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prefect_torch_elastic.dev.plan import StackError, StackPlan, render_addresses


@dataclass(kw_only=True)
class StackState:
    """A stack as others may find it.

    Attributes:
        home: Folder of the stack.
        token: Value of the mark that its processes carry.
        port: Port of the server on 127.0.0.1.
        pools: Name and type of each pool.
        pids: Process of each part, keeper and supervisor included.
        ready: Whether all parts have answered once.
        ended: How a part ended that should be running.
    """

    home: str
    token: str
    port: int
    pools: dict[str, str]
    pids: dict[str, int]
    ready: bool = False
    ended: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def plan(self) -> StackPlan:
        """The plan that this stack was started with."""
        return StackPlan(home=Path(self.home), pools=self.pools, port=self.port)

    @property
    def keeper(self) -> int:
        """The process to ask when the stack is to end, and the last one of it to end."""
        return self.pids["keeper"]

    def as_dict(self) -> dict[str, Any]:
        """Return what programs read: this, and the addresses."""
        api_url, ui_url = render_addresses(self.port)
        return {**asdict(self), "api_url": api_url, "ui_url": ui_url, "store": self.plan.store_url}

    def write(self) -> None:
        """Write the file whole or not at all."""
        path = self.plan.state_file
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(self), indent=2) + "\n")
        draft.replace(path)


def read_state(home: Path) -> StackState | None:
    """Return what the file says, whether or not that stack still runs."""
    try:
        return StackState(**json.loads((home / "stack.json").read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):  # of a version of ours that wrote other fields
        return None


def find_state(home: Path) -> StackState | None:
    """Return the stack that runs in `home`; None if there is none."""
    if not (home / "stack.json").exists():
        return None
    lock = StackLock(home)
    if lock.take():
        lock.release()
        return None
    return read_state(home)


class StackLock:
    """Held by a stack's supervisor as long as it lives: the kernel knows, a file with a pid may lie."""

    def __init__(self, home: Path) -> None:
        self._path = home / "stack.lock"
        self._fd = -1

    def take(self) -> bool:
        """Take the lock; False if somebody has it."""
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # of the process, not of the open file: what it forks does not hold it after its death
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            self.release()
            return False
        except OSError as error:
            self.release()
            raise StackError(
                f"`{self._path}` cannot be locked: {error}. Put the home on a local disk."
            ) from error
        return True

    def release(self) -> None:
        """Give the lock back."""
        os.close(self._fd)
        self._fd = -1
