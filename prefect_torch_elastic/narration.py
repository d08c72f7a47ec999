"""What a gang says, as lines of its task run's log: ranks' lines, state changes, progress now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect_torch_elastic.artifacts.tables import render_duration
from prefect_torch_elastic.spec import Spec, render_worst_case_wait
from prefect_torch_elastic.wire import LogLines, Message, Notice, Progress, RanksStarted

PROGRESS_SECONDS = 10.0
LINE_CHARACTERS = 95  # the UI wraps longer ones
BAR_CELLS = 10


class Narrator:
    """Takes a gang's messages in and writes them to `log`, a logger of the task run."""

    def __init__(
        self, log: Any, spec: Spec, *, folder: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log, self._spec, self._folder, self._clock = log, spec, folder, clock
        self._said_where = False
        self._progress_at, self._last = 0.0, (0.0, 0)

    def __call__(self, message: Message) -> None:
        match message:
            case LogLines():
                for level, text in message.lines:
                    self._log.log(level, "[rank %s] %s", message.rank, text)
            case Notice():
                self._log.log(message.level, "%s", message.text)
            case RanksStarted():
                self._say_started(message)
            case Progress():
                self._say_progress(message)
            case _:
                pass

    def _say_started(self, message: RanksStarted) -> None:
        self._last = (0.0, self._last[1])  # after a restart steps are done again: no speed over it
        if message.note:
            self._log.warning("%s", message.note)
        how = "warm" if message.warm else "cold"
        self._log.info(
            "Node %s: %s of %s ranks started (%s). Pids %s.",
            message.ranks[0].node_rank,
            len(message.ranks),
            message.world_size,
            how,
            ", ".join(str(rank.pid) for rank in message.ranks),
        )
        if self._said_where:
            return
        self._said_where = True
        self._log.info("The full logs of all ranks are in %s", self._folder)
        if _uses_nccl(self._spec):
            self._log.info(render_worst_case_wait(self._spec))

    def _say_progress(self, message: Progress) -> None:
        now = self._clock()
        if message.step == self._last[1]:
            return
        finished = message.total_steps is not None and message.step >= message.total_steps
        if now - self._progress_at < PROGRESS_SECONDS and not finished:
            return
        before_at, before_step = self._last
        speed = (message.step - before_step) / (now - before_at) if before_at else 0.0
        self._progress_at, self._last = now, (now, message.step)
        self._log.info("%s", _render_progress(message, speed))


def _render_progress(message: Progress, speed: float) -> str:
    """Return one line; of many metrics those that fit on it."""
    step, total = message.step, message.total_steps
    first = [_render_bar(step / total), f"step {step}/{total}"] if total else [f"step {step}"]
    last = [f"{speed:.3g} steps/s"] if speed > 0 else []
    if speed > 0 and total and step < total:
        last.append(f"ETA {render_duration((total - step) / speed)}")
    last += [message.phase] if message.phase else []
    room = LINE_CHARACTERS - len(" · ".join([*first, *last]))
    metrics: list[str] = []
    for name, value in message.metrics.items():
        part = f"{name} {_short(value)}"
        room -= 3 + len(part)
        if metrics and room < 0:
            break
        metrics.append(part)
    return " · ".join([*first, *metrics, *last])


def _render_bar(share: float) -> str:
    share = min(1.0, max(0.0, share))
    full = int(share * BAR_CELLS)
    return f"{'█' * full}{'░' * (BAR_CELLS - full)} {share:.0%}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _uses_nccl(spec: Spec) -> bool:
    settings = (
        spec.nccl_collective_timeout_seconds,
        spec.nccl_heartbeat_timeout_seconds,
        spec.nccl_async_error_handling,
        spec.nccl_enable_monitoring,
    )
    return Path("/dev/nvidiactl").exists() or any(value is not None for value in settings)
