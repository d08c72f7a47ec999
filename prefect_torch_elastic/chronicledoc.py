"""How the facts of a run are written down as JSON between two gangs, and what is taken back. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from prefect_torch_elastic.incidents import IncidentKind
from prefect_torch_elastic.jsonfields import (
    Check,
    check_fields,
    check_flag,
    check_list,
    check_mapping,
    check_number,
    check_one_of,
    check_optional,
    check_text,
    check_whole_number,
    short,
)
from prefect_torch_elastic.runfacts import (
    CheckpointFacts,
    Curve,
    GangEnd,
    GangFacts,
    IncidentFacts,
    PhaseFacts,
    RankFacts,
    RoundEnd,
    RoundFacts,
    RunFacts,
)

T = TypeVar("T")


def render_facts(facts: RunFacts) -> dict[str, Any]:
    """Return the facts as a mapping of plain values."""
    return json.loads(json.dumps(asdict(facts)))


def parse_facts(body: Mapping[str, Any]) -> RunFacts:
    """Return the facts that `render_facts` wrote down.

    Raises:
        ValueError: If a field is missing, unknown or not accepted; it says which.
    """
    return _check_run("chronicle", dict(body))


def _check_integer(name: str, value: object) -> int:
    if type(value) is not int:  # not `isinstance`: true is an int
        raise ValueError(f"`{name}` is {short(value)}, not a whole number")
    return value


def _check_point(name: str, value: object) -> tuple[int, float]:
    items = check_list(name, value)
    if len(items) != 2:
        raise ValueError(f"`{name}` is {short(value)}, not a step and a value")
    return _check_integer(f"{name}[0]", items[0]), check_number(f"{name}[1]", items[1])


def _check_metrics(name: str, value: object) -> dict[str, float | str]:
    items = check_mapping(name, value)
    return {
        metric: item if isinstance(item, str) else check_number(f"{name}.{metric}", item)
        for metric, item in items.items()
    }


def _check_all(check: Callable[[str, object], T]) -> Callable[[str, object], tuple[T, ...]]:
    def check_items(name: str, value: object) -> tuple[T, ...]:
        items = check_list(name, value)
        return tuple(check(f"{name}[{place}]", item) for place, item in enumerate(items))

    return check_items


def _check_as(kind: Callable[..., T], /, **checks: Check) -> Callable[[str, object], T]:
    return lambda name, value: kind(**check_fields(name, value, checks))


_opt_number, _opt_integer = check_optional(check_number), check_optional(_check_integer)

_check_round = _check_as(
    RoundFacts,
    number=check_whole_number,
    world_size=check_whole_number,
    nodes=check_whole_number,
    started_at=check_number,
    first_report_at=_opt_number,
    last_report_at=_opt_number,
    first_step=_opt_integer,
    last_step=_opt_integer,
    lost_before=_check_integer,
    step_seconds=check_number,
    save_seconds=check_number,
    phase_seconds=check_number,
    late_save_seconds=check_number,
    late_phase_seconds=check_number,
    detected_at=_opt_number,
    ended_at=_opt_number,
    end=check_optional(check_one_of(RoundEnd)),
    is_hang=check_flag,
    cause=check_text,
    category=check_text,
)
_check_gang = _check_as(
    GangFacts,
    attempt=check_whole_number,
    began_at=check_number,
    nodes=check_whole_number,
    places=_check_all(check_text),
    ended_at=_opt_number,
    end=check_optional(check_one_of(GangEnd)),
    reason=check_text,
    rounds=_check_all(_check_round),
)
_check_phase = _check_as(
    PhaseFacts, at=check_number, name=check_text, message=check_text, is_queue=check_flag
)
_check_rank = _check_as(
    RankFacts,
    rank=check_whole_number,
    node=check_whole_number,
    step=_opt_integer,
    steps=check_whole_number,
    step_seconds=check_number,
    step_p95_seconds=check_number,
    longest_seconds=check_number,
    delay=check_number,
    memory_bytes=check_whole_number,
    gpu_memory_bytes=check_whole_number,
)
_check_checkpoint = _check_as(
    CheckpointFacts,
    at=check_number,
    step=_check_integer,
    key=check_text,
    size_bytes=check_whole_number,
    seconds=check_number,
    stall_seconds=check_number,
)
_check_incident = _check_as(
    IncidentFacts,
    at=check_number,
    number=check_whole_number,
    kind=check_one_of(IncidentKind),
    category=check_text,
    sentence=check_text,
    rank=_opt_integer,
    node=_opt_integer,
    step=_opt_integer,
    url=check_text,
)
_check_curve = _check_as(Curve, name=check_text, points=_check_all(_check_point))
_check_run = _check_as(
    RunFacts,
    run_key=check_text,
    title=check_text,
    place=check_text,
    price_per_node_hour=_opt_number,
    began_at=check_number,
    seen_at=check_number,
    ended_at=_opt_number,
    gangs=_check_all(_check_gang),
    phases=_check_all(_check_phase),
    ranks=_check_all(_check_rank),
    checkpoints=_check_all(_check_checkpoint),
    checkpoint_count=check_whole_number,
    checkpoint_bytes=check_whole_number,
    checkpoint_stall_seconds=check_number,
    incidents=_check_all(_check_incident),
    incident_count=check_whole_number,
    step=_opt_integer,
    total_steps=_opt_integer,
    phase=check_text,
    metrics=_check_metrics,
    steps_per_second=check_number,
    curves=_check_all(_check_curve),
)
