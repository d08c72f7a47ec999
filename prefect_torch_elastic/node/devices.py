"""The GPUs of this machine: how many are visible, and which gang holds which.

Gangs that run at the same time, also of different flows, never share a GPU by accident: each device is held
by a file lock that ends with the launcher's process, whatever ends it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path

from prefect_torch_elastic.ranks import assign_gpus

_LOCKS = Path("/tmp")  # not TMPDIR, which differs between flows


def list_visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the ids of the GPUs that a process with this environment may use, without a CUDA context.

    `CUDA_VISIBLE_DEVICES` decides when it is set; else torch counts with NVML, which makes no context.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    count = _count_gpus()
    if visible is None:
        return [str(index) for index in range(count)]
    if not count:
        return []
    return [device.strip() for device in visible.split(",") if device.strip() not in {"", "-1"}]


class GpuLease:
    """GPUs that are held for one gang."""

    def __init__(self) -> None:
        self._locks: dict[str, int] = {}

    def acquire(self, visible: list[str], count: int) -> list[str]:
        """Hold `count` of the visible GPUs that no other gang on this machine holds.

        Raises:
            SpecError: If fewer are free; nothing is held then.
        """
        free = [device for device in visible if self._lock(device)]
        try:
            chosen = list(assign_gpus(visible, taken=set(visible) - set(free), wanted=count))
        except BaseException:
            self.release()
            raise
        for device in free:
            if device not in chosen:
                os.close(self._locks.pop(device))
        return chosen

    def release(self) -> None:
        """Give all of them back."""
        for fd in self._locks.values():
            os.close(fd)
        self._locks.clear()

    def _lock(self, device: str) -> bool:
        # One folder per user: nobody can open another one's lock.
        folder = _LOCKS / f"prefect-torch-elastic-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        name = "".join(letter if letter.isalnum() else "-" for letter in device)
        fd = os.open(folder / f"gpu-{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return False
        self._locks[device] = fd
        return True


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.version.cuda or torch.version.hip else 0
