"""The log of a run folder: who may write (epochs), what is saved (commits), and how calls ended (outcomes).

One entry is one object, `<folder>/log/000000000017.json`, made by put-if-absent on the next number and never
changed. Whoever writes a number has read all before it, so an entry says what was true when it was written:
a gang that lost its place loses the number too, reads on, meets the newer epoch and stops for good.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from prefect_torch_elastic.errors import StoreError, Superseded
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
    fold_entry,
)
from prefect_torch_elastic.logformat import encode_record, parse_record

if TYPE_CHECKING:
    from prefect_torch_elastic.store import Store, StoredObject

__all__ = [
    "Bad",
    "CallStatus",
    "Commit",
    "Entry",
    "Epoch",
    "Outcome",
    "Pruned",
    "RunLog",
    "RunState",
    "StoredPart",
    "fold_entry",
]

SNAPSHOT_EVERY = 64
MAX_ENTRY_BYTES = 16 << 20  # a snapshot of many thousand commits
_DIGITS = 12


class RunLog:
    """The log of one run, as one process reads and writes it; threads may share it.

    Args:
        store: Where the run folder is.
        folder: Name of the run folder.
        clock: Returns the unix time that entries carry.
    """

    def __init__(self, store: Store, folder: str, *, clock: Callable[[], float] = time.time) -> None:
        self._store, self._prefix, self._clock = store, f"{folder}/log", clock
        self._lock = threading.RLock()
        self._state = RunState()
        self._number = 0  # of the newest entry that was read
        self._is_read = False

    @property
    def state(self) -> RunState:
        """What the log said when it was read last; the first look reads it."""
        with self._lock:
            return self._state if self._is_read else self.refresh()

    def refresh(self) -> RunState:
        """Read the entries that came since, and return what the log says now.

        Raises:
            StoreError: If an entry is damaged, or the store cannot be read.
        """
        with self._lock:
            after = self._key(self._number) if self._number else ""
            objects = list(self._store.list(self._prefix, after=after))
            if not self._is_read:
                objects = objects[self._newest_snapshot(objects) :]
            for stored in objects:
                self._read(stored)
            self._is_read = True
            return self._state

    def take_epoch(self, *, attempt: int, by: str, call: str = "") -> int:
        """Take the run over: from now on only the holder of the returned epoch may append.

        Args:
            attempt: Number of the gang in the run; a restart of its ranks keeps it.
            by: Who takes it, for people who read the log.
            call: Digest of the call that the gang works on.

        Raises:
            Superseded: If the call has succeeded already, or a later attempt has begun.
            StoreError: If the log cannot be read or written.
        """
        with self._lock:
            state = self.refresh()
            while True:
                outcome = state.outcomes.get(call) if call else None
                if outcome is not None and outcome.status is CallStatus.SUCCEEDED:
                    raise Superseded(
                        f"the call `{call}` of this run has succeeded already, in attempt {outcome.attempt}: "
                        "this gang has nothing to do. The same call finds that result; "
                        "`refresh_cache=True` asks for a new one."
                    )
                if attempt < state.attempts:  # it slept before it began: there is another gang by now
                    raise Superseded(
                        f"attempt {state.attempts} of this run has begun, this gang is of attempt {attempt}: "
                        f"it may not take the run over.{_name_other(state)}"
                    )
                epoch = state.epoch + 1
                if self._create(Epoch(epoch=epoch, attempt=attempt, by=by), epoch=epoch):
                    return epoch
                state = self._read_on()

    def append(self, entry: Entry, *, epoch: int | None) -> RunState:
        """Add an entry and return what the log says with it.

        Args:
            entry: What happened.
            epoch: The writer's epoch; None for the driver, which may always write.

        Raises:
            Superseded: If a newer gang has taken the run over.
            StoreError: If the log cannot be read or written.
        """
        with self._lock:
            state = self.state
            if epoch is not None and state.epoch < epoch:  # it was taken through another `RunLog`
                state = self.refresh()
            while True:
                if epoch is not None and state.epoch != epoch:
                    raise Superseded(
                        f"a newer gang has taken this run over (epoch {state.epoch}, this one has {epoch}): "
                        f"nothing more is written by this one.{_name_other(state)}"
                    )
                if self._create(entry, epoch=epoch):
                    return self._state
                state = self._read_on()

    def _create(self, entry: Entry, *, epoch: int | None) -> bool:
        """Write the next number; the entry is ours only if nobody wrote since this process read."""
        number = self._number + 1
        record = LogRecord(
            entry=entry,
            epoch=epoch,
            nonce=secrets.token_hex(16),
            at=self._clock(),
            snapshot=self._state if number % SNAPSHOT_EVERY == 0 else None,
        )
        if not self._store.create(self._key(number), self._encode(record)):
            return False
        self._state = fold_entry(self._state, record)
        self._number = number
        return True

    def _encode(self, record: LogRecord) -> bytes:
        """Return the record's bytes, which every reader accepts: one that nobody reads would end the run."""
        data = encode_record(record)
        try:
            parse_record(data)
            if len(data) > MAX_ENTRY_BYTES:
                raise ValueError(f"it has {len(data)} bytes, at most {MAX_ENTRY_BYTES} are read")
        except ValueError as error:
            kind = type(record.entry).__name__.lower()
            raise StoreError(
                f"a `{kind}` cannot be written to `{self._prefix}` in `{self._store.url}`: {error}. "
                "Nothing was written. Correct the value; save fewer `metrics` if it is their size."
            ) from error
        return data

    def _read_on(self) -> RunState:
        """Read the entry that took the number that this writer wanted."""
        number = self._number
        state = self.refresh()
        if self._number == number:
            raise StoreError(
                f"`{self._key(number + 1)}` in `{self._store.url}` can be neither written nor read: it is "
                "there, and is not listed. Look whether it is a link, whether the credentials may list the "
                "bucket, and whether a cache answers for it."
            )
        return state

    def _newest_snapshot(self, objects: list[StoredObject]) -> int:
        numbers = [self._number_of(stored.key) for stored in objects]
        snapshots = [place for place, number in enumerate(numbers) if number % SNAPSHOT_EVERY == 0]
        return snapshots[-1] if snapshots else 0

    def _read(self, stored: StoredObject) -> None:
        number = self._number_of(stored.key)
        if stored.size > MAX_ENTRY_BYTES:
            raise self._damaged(stored.key, f"it has {stored.size} bytes, at most {MAX_ENTRY_BYTES} are read")
        try:
            record = parse_record(bytes(self._store.get(stored.key)))
        except (ValueError, RecursionError) as error:
            raise self._damaged(stored.key, str(error)) from error
        if number % SNAPSHOT_EVERY == 0 and record.snapshot is None:
            raise self._damaged(stored.key, "it has no `snapshot`")
        starts_here = not self._is_read and self._number == 0 and record.snapshot is not None
        if number != self._number + 1 and not starts_here:
            raise self._damaged(stored.key, f"entry {self._number + 1} is missing before it")
        before = record.snapshot if starts_here and record.snapshot is not None else self._state
        self._state = fold_entry(before, record)
        self._number = number

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number:0{_DIGITS}}.json"

    def _number_of(self, key: str) -> int:
        name = key.removeprefix(f"{self._prefix}/").removesuffix(".json")
        if len(name) != _DIGITS or not name.isascii() or not name.isdigit() or key != self._key(int(name)):
            raise self._damaged(key, "its name is no entry's")
        return int(name)

    def _damaged(self, key: str, why: str) -> StoreError:
        return StoreError(
            f"`{key}` in `{self._store.url}` is not an entry of a run log: {why}. Restore the object if your "
            "store keeps versions, or pass another `run_key` to start a new run."
        )


def _name_other(state: RunState) -> str:
    return (
        f" The other one is of `{state.by}`. Give each of two calls that are to train at once a `run_key` of "
        "its own; if one replaced the other, nothing is to be done."
    )
