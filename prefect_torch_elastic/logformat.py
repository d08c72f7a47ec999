"""The records of a run log as JSON.

Nothing is trusted that comes from a store: a record has exactly the fields that we write, each with its type.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, get_args

from prefect_torch_elastic.jsonfields import (
    Check,
    check_list,
    check_mapping,
    check_number,
    check_one_of,
    check_part_key,
    check_text,
    check_whole_number,
    check_word,
    refuse_constant,
    short,
)
from prefect_torch_elastic.logentries import (
    Bad,
    CallStatus,
    Commit,
    Entry,
    Epoch,
    LogRecord,
    Outcome,
    Pruned,
    RunState,
    StoredPart,
)


def encode_record(record: LogRecord) -> bytes:
    """Return a record as JSON that `parse_record` reads."""
    fields: dict[str, Any] = {
        "kind": type(record.entry).__name__.lower(),
        "entry": _plain(record.entry),
        "nonce": record.nonce,
        "at": record.at,
    }
    if record.epoch is not None:
        fields["epoch"] = record.epoch
    if record.snapshot is not None:
        state = record.snapshot
        fields["snapshot"] = {
            "epoch": state.epoch,
            "by": state.by,
            "attempts": state.attempts,
            "commits": [_plain(one) for one in state.all_commits],
            "bad": [_plain(one) for one in state.bad.values()],
            "pruned": [_plain(one) for one in state.pruned.values()],
            "outcomes": [_plain(one) for one in state.outcomes.values()],
        }
    return json.dumps(fields, allow_nan=False).encode()


def parse_record(data: bytes) -> LogRecord:
    """Return the record of one object.

    Raises:
        ValueError: If it is not exactly what `encode_record` writes; it says which part is not.
    """
    fields = check_mapping("entry", json.loads(data, parse_constant=refuse_constant))
    kind = _KINDS.get(str(fields.get("kind")))
    if kind is None:
        raise ValueError(f"`kind` is {short(fields.get('kind'))}, not one of {', '.join(_KINDS)}")
    snapshot = fields.get("snapshot")
    epoch = fields.get("epoch")
    return LogRecord(
        entry=_entry(kind, fields.get("entry")),
        epoch=None if epoch is None else check_whole_number("epoch", epoch),
        nonce=check_word("nonce", fields.get("nonce")),
        at=check_number("at", fields.get("at")),
        snapshot=None if snapshot is None else _state(check_mapping("snapshot", snapshot)),
    )


def _plain(entry: Entry) -> dict[str, Any]:
    fields = dataclasses.asdict(entry)
    if isinstance(entry, Commit):  # JSON has no NaN, and a loss may be one
        fields["metrics"] = {
            name: value if math.isfinite(value) else str(value) for name, value in entry.metrics.items()
        }
    return fields


def _state(fields: dict[str, Any]) -> RunState:
    def entries(name: str, kind: type[Any]) -> list[Any]:
        return [_entry(kind, item) for item in check_list(name, fields.get(name))]

    return RunState(
        epoch=check_whole_number("epoch", fields.get("epoch")),
        by=check_text("by", fields.get("by")),
        attempts=check_whole_number("attempts", fields.get("attempts")),
        all_commits=tuple(entries("commits", Commit)),
        bad={one.uuid: one for one in entries("bad", Bad)},
        pruned={one.uuid: one for one in entries("pruned", Pruned)},
        outcomes={one.call: one for one in entries("outcomes", Outcome)},
    )


def _entry(kind: type[Any], value: object) -> Any:
    fields = check_mapping(kind.__name__, value)
    checks = _FIELDS[kind]
    if fields.keys() != checks.keys():
        odd = sorted(fields.keys() ^ checks.keys())[0]
        raise ValueError(f"{kind.__name__} has a wrong set of fields, see `{short(odd)}`")
    return kind(**{name: check(name, fields[name]) for name, check in checks.items()})


def _metrics(name: str, value: object) -> dict[str, float]:
    return {key: _metric(f"{name}.{key}", item) for key, item in check_mapping(name, value).items()}


def _metric(name: str, value: object) -> float:
    return float(value) if value in ("nan", "inf", "-inf") else check_number(name, value)


def _result(name: str, value: object) -> StoredPart | None:
    return None if value is None else _entry(StoredPart, check_mapping(name, value))


_FIELDS: dict[type[Any], dict[str, Check]] = {
    Epoch: {"epoch": check_whole_number, "attempt": check_whole_number, "by": check_text},
    Commit: {
        "step": check_whole_number,
        "uuid": check_word,
        "epoch": check_whole_number,
        "manifest_crc32c": check_whole_number,
        "size_bytes": check_whole_number,
        "world_size": check_whole_number,
        "metrics": _metrics,
        "seconds": check_number,
    },
    Bad: {"uuid": check_word, "step": check_whole_number, "reason": check_text},
    Pruned: {"uuid": check_word, "step": check_whole_number},
    Outcome: {
        "call": check_word,
        "status": check_one_of(CallStatus),
        "attempt": check_whole_number,
        "result": _result,
    },
    StoredPart: {"key": check_part_key, "size": check_whole_number, "crc32c": check_whole_number},
}
_KINDS: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in get_args(Entry)}
