"""The entries of a run log, and the state of the run that they add up to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeAlias, assert_never

KEPT_PRUNED = 256  # tombstones: enough to finish the removal of data that a crash interrupted


class CallStatus(StrEnum):
    """How a call ended; `refused` takes back an outcome whose result this driver could not trust."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    TIMED_OUT = "timed out"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """An incarnation of the gang takes over: from here on only it may write."""

    epoch: int
    attempt: int
    by: str


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A checkpoint is whole: all that `uuid` names is in the store.

    Attributes:
        step: Completed optimizer steps; a step may be committed again after a fallback.
        uuid: Name of the save.
        epoch: The gang that saved it.
        manifest_crc32c: Checksum of the global manifest.
        size_bytes: All blocks together.
        world_size: Ranks that saved.
        metrics: Numbers that were given to `save`.
        seconds: From the call of `save` to the commit.
    """

    step: int
    uuid: str
    epoch: int
    manifest_crc32c: int
    size_bytes: int
    world_size: int
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Bad:
    """A commit that could not be loaded, and why; nobody tries it again."""

    uuid: str
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """A commit whose data is being removed; written first, so that nobody loads half of it."""

    uuid: str
    step: int


@dataclass(frozen=True, kw_only=True)
class StoredPart:
    """An object that another one names: its key below the run folder, and what it has to be."""

    key: str
    size: int
    crc32c: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a call ended."""

    call: str
    status: CallStatus
    attempt: int
    result: StoredPart | None = None


Entry: TypeAlias = Epoch | Commit | Bad | Pruned | Outcome


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What a log adds up to.

    Attributes:
        epoch: The newest; 0 when no gang has taken the run yet.
        by: Who took it.
        attempts: Highest number of an attempt that the log knows.
        all_commits: Newest first, by their place in the log, with bad ones and the last pruned ones.
        bad: Why a commit cannot be loaded, by uuid.
        pruned: Commits whose data is removed, by uuid.
        outcomes: The outcome that counts for each call.
    """

    epoch: int = 0
    by: str = ""
    attempts: int = 0
    all_commits: tuple[Commit, ...] = ()
    bad: Mapping[str, Bad] = field(default_factory=dict[str, Bad])
    pruned: Mapping[str, Pruned] = field(default_factory=dict[str, Pruned])
    outcomes: Mapping[str, Outcome] = field(default_factory=dict[str, Outcome])

    @property
    def commits(self) -> tuple[Commit, ...]:
        """Commits that can be loaded, newest first."""
        return tuple(
            one for one in self.all_commits if one.uuid not in self.bad and one.uuid not in self.pruned
        )


@dataclass(frozen=True, kw_only=True)
class LogRecord:
    """One object of the log.

    Attributes:
        entry: What happened.
        epoch: Of the gang that wrote it; None for a driver.
        nonce: Tells two writers' bytes apart.
        at: Unix time of the writer.
        snapshot: The state before this entry, so that a reader can start here.
    """

    entry: Entry
    epoch: int | None
    nonce: str
    at: float
    snapshot: RunState | None = None


def fold_entry(state: RunState, record: LogRecord) -> RunState:
    """Return the state after one more record."""
    entry = record.entry
    match entry:
        case Epoch():
            attempts = max(state.attempts, entry.attempt)
            return replace(state, epoch=max(state.epoch, entry.epoch), by=entry.by, attempts=attempts)
        case Commit():
            if entry.epoch != state.epoch:  # only a store that ignores put-if-absent lets one get here
                return state
            return replace(state, all_commits=(entry, *state.all_commits))
        case Bad():
            return replace(state, bad={**state.bad, entry.uuid: entry})
        case Pruned():
            return _forget_pruned(replace(state, pruned={**state.pruned, entry.uuid: entry}))
        case Outcome():
            state = replace(state, attempts=max(state.attempts, entry.attempt))
            before = state.outcomes.get(entry.call)
            takes_over = entry.status in (CallStatus.SUCCEEDED, CallStatus.REFUSED)
            if before is not None and before.status is CallStatus.SUCCEEDED and not takes_over:
                return state
            return replace(state, outcomes={**state.outcomes, entry.call: entry})
        case _:
            assert_never(entry)


def _forget_pruned(state: RunState) -> RunState:
    """Keep of the last pruned commits what their removal needs, and nothing of older ones."""
    old = set(list(state.pruned)[:-KEPT_PRUNED])
    stay = [one for one in state.all_commits if one.uuid not in old]
    return replace(
        state,
        all_commits=tuple(replace(one, metrics={}) if one.uuid in state.pruned else one for one in stay),
        bad={uuid: entry for uuid, entry in state.bad.items() if uuid not in old},
        pruned={uuid: entry for uuid, entry in state.pruned.items() if uuid not in old},
    )
