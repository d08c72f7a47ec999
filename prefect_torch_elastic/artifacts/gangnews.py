"""Which messages of a gang are worth an event, and how often: a checkpoint a minute, others each once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, assert_never

from prefect_torch_elastic.artifacts.assets import render_asset_key, render_materialization
from prefect_torch_elastic.artifacts.gangevents import EventName, EventSource, GangEvent, render_event
from prefect_torch_elastic.incidents import Incident
from prefect_torch_elastic.observations import CheckpointSaved
from prefect_torch_elastic.runfacts import GangEnd
from prefect_torch_elastic.wire import Message, Progress, RanksStarted

CHECKPOINT_SECONDS = 60.0


class GangNews:
    """Sends the events of a run.

    Args:
        source: The run.
        store_url: Where its checkpoints are.
        folder: Name of its run folder.
        send: Sends an event that happened at a time; returns at once and raises nothing.
    """

    def __init__(
        self, source: EventSource, *, store_url: str, folder: str, send: Callable[[GangEvent, float], object]
    ) -> None:
        self._source, self._store_url, self._folder, self._send = source, store_url, folder, send
        self._attempt = 1
        self._round: int | None = None
        self._not_finite: set[str] = set()
        self._newest: tuple[CheckpointSaved, float] | None = None  # that no event told of yet
        self._last: CheckpointSaved | None = None
        self._told_at = -math.inf

    def begin(self, attempt: int) -> None:
        """Note that a gang is being formed."""
        self._attempt, self._round = attempt, None

    def take(self, message: Message, *, at: float) -> None:
        """Send what a message is worth."""
        match message:
            case RanksStarted() if self._round is None or message.round > self._round:
                name = EventName.STARTED if self._round is None else EventName.RESTARTED
                self._round = message.round
                facts: dict[str, Any] = {"attempt": self._attempt, "world_size": message.world_size}
                self._tell(name, at, **facts, restarts=message.restart_count)
            case Progress():
                self._look_for_nan(message, at)
            case CheckpointSaved():
                self._newest, self._last = (message, at), message
                if at - self._told_at >= CHECKPOINT_SECONDS:
                    self._tell_checkpoint()
            case _:
                pass

    def tell_incident(self, incident: Incident, *, at: float, link: str) -> None:
        """Send the event of an incident whose page is at `link`, empty if it has none."""
        self._tell(
            EventName.INCIDENT,
            at,
            labels={"kind": str(incident.kind), "category": incident.category},
            sentence=incident.sentence,
            cure=incident.cure,
            rank=incident.rank,
            node=incident.node_rank,
            step=incident.step,
            link=link,
        )

    def end(self, end: GangEnd, *, at: float, reason: str) -> None:
        """Send how a gang ended, after its newest checkpoint."""
        self._tell_checkpoint()
        match end:
            case GangEnd.SUCCEEDED:
                name = EventName.SUCCEEDED
                self._tell_model(at)
            case GangEnd.FAILED | GangEnd.LOST | GangEnd.TIMED_OUT:
                name = EventName.FAILED
            case GangEnd.PREEMPTED:
                name = EventName.PREEMPTED
            case GangEnd.CANCELLED:
                name = EventName.CANCELLED
            case _:
                assert_never(end)
        self._tell(name, at, attempt=self._attempt, reason=reason)

    def _look_for_nan(self, message: Progress, at: float) -> None:
        for name, value in message.metrics.items():
            if isinstance(value, float) and not math.isfinite(value) and name not in self._not_finite:
                self._not_finite.add(name)
                labels = {"metric": name}
                self._tell(EventName.NOT_FINITE, at, labels=labels, step=message.step, value=str(value))

    def _tell_checkpoint(self) -> None:
        if self._newest is None:
            return
        (message, at), self._newest = self._newest, None
        self._told_at = at
        key = render_asset_key(self._store_url, self._folder, message.key)
        facts: dict[str, Any] = {
            "step": message.step,
            "size_bytes": message.size_bytes,
            "seconds": message.seconds,
        }
        self._tell(EventName.CHECKPOINT, at, **facts, checkpoint=key)
        if key:
            name = f"{self._source.title}, step {message.step}"
            self._send(render_materialization(key, self._source, name=name, **facts), at)

    def _tell_model(self, at: float) -> None:
        """Say that the run folder, whose key stays over the calls of a run, has a model that is done."""
        key = render_asset_key(self._store_url, self._folder)
        if self._last is not None and key:
            name = f"{self._source.title}, its newest model"
            checkpoint = render_asset_key(self._store_url, self._folder, self._last.key)
            model = render_materialization(
                key, self._source, name=name, step=self._last.step, checkpoint=checkpoint
            )
            self._send(model, at)

    def _tell(
        self, name: EventName, at: float, *, labels: Mapping[str, str] | None = None, **payload: Any
    ) -> None:
        self._send(render_event(name, self._source, labels=labels, **payload), at)
