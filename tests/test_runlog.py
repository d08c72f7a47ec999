"""The run's log: one writer at a time, whatever sleeps, races or lies."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_torch_elastic.errors import StoreError, Superseded
from prefect_torch_elastic.logentries import KEPT_PRUNED
from prefect_torch_elastic.runlog import (
    MAX_ENTRY_BYTES,
    SNAPSHOT_EVERY,
    Bad,
    CallStatus,
    Commit,
    Outcome,
    Pruned,
    RunLog,
    RunState,
    StoredPart,
)
from tests import checkpoint_stores

LOG = "run/log"
CALL = "c0ffee"


class MemoryStore(checkpoint_stores.MemoryStore):
    """`before_create` runs between a writer's read and its write; `reads` has the keys that were read."""

    def __init__(self) -> None:
        super().__init__()
        self.before_create: Callable[[], None] = lambda: None
        self.reads: list[str] = []

    def create(self, key: str, data: bytes) -> bool:
        self.before_create()
        return super().create(key, data)

    def get(self, key: str) -> memoryview:
        self.reads.append(key)
        return super().get(key)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def open_log(store: MemoryStore) -> RunLog:
    return RunLog(store, "run", clock=lambda: 1_700_000_000.0)


def take(log: RunLog, attempt: int = 1, call: str = "") -> int:
    return log.take_epoch(attempt=attempt, by="test", call=call)


def commit(step: int, epoch: int, uuid: str = "") -> Commit:
    return Commit(
        step=step,
        uuid=uuid or f"u{step}",
        epoch=epoch,
        manifest_crc32c=7,
        size_bytes=10,
        world_size=2,
        metrics={"loss": 0.5},
        seconds=0.1,
    )


def outcome(status: CallStatus, attempt: int = 1, key: str = "calls/c0ffee/result-1") -> Outcome:
    result = StoredPart(key=key, size=3, crc32c=5) if status is CallStatus.SUCCEEDED else None
    return Outcome(call=CALL, status=status, attempt=attempt, result=result)


def steps(state: RunState) -> list[int]:
    return [one.step for one in state.commits]


# ---------------------------------------------------------------- what it adds up to


def test_log_that_nobody_wrote_says_nothing(store):
    state = open_log(store).state
    assert (state.epoch, state.attempts, state.commits, state.all_commits) == (0, 0, (), ())
    assert not state.bad
    assert not state.outcomes
    assert not store.objects


def test_commits_come_newest_first_by_their_place_in_the_log(store):
    log = open_log(store)
    epoch = take(log)
    for step, uuid in [(10, "a"), (20, "b"), (10, "c")]:  # step 20 was bad, and the gang went on from 0
        log.append(commit(step, epoch, uuid), epoch=epoch)
    assert [one.uuid for one in open_log(store).state.commits] == ["c", "b", "a"]


def test_bad_and_pruned_commits_are_not_offered(store):
    log = open_log(store)
    epoch = take(log)
    for step in (10, 20, 30):
        log.append(commit(step, epoch), epoch=epoch)
    log.append(Bad(uuid="u30", step=30, reason="rank 1: block 3 is missing"), epoch=epoch)
    log.append(Pruned(uuid="u10", step=10), epoch=epoch)
    state = open_log(store).state
    assert steps(state) == [20]
    assert [one.step for one in state.all_commits] == [30, 20, 10]
    assert state.bad["u30"].reason == "rank 1: block 3 is missing"


def test_attempts_are_the_highest_number_that_the_log_knows(store):
    log = open_log(store)
    take(log, attempt=2)
    take(log, attempt=4)
    assert open_log(store).state.attempts == 4
    log.append(outcome(CallStatus.FAILED, attempt=6), epoch=None)
    assert open_log(store).state.attempts == 6


def test_gang_of_an_earlier_attempt_does_not_take_the_run_over(store):
    take(open_log(store), attempt=2)
    with pytest.raises(Superseded, match="attempt 2 of this run has begun, this gang is of attempt 1"):
        take(open_log(store), attempt=1)
    assert take(open_log(store), attempt=2) == 2  # its ranks were started again


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5, 3.0])
def test_metrics_come_back_as_they_were(store, value):
    log = open_log(store)
    epoch = take(log)
    log.append(replace(commit(1, epoch), metrics={"loss": value}), epoch=epoch)
    assert repr(open_log(store).state.commits[0].metrics) == repr({"loss": value})


def test_entries_are_one_json_object_each_with_writer_time_and_nonce(store):
    log = open_log(store)
    epoch = take(log, attempt=3)
    log.append(commit(5, epoch), epoch=epoch)
    assert sorted(store.objects) == [f"{LOG}/000000000001.json", f"{LOG}/000000000002.json"]
    first, second = (json.loads(store.objects[key]) for key in sorted(store.objects))
    assert first["entry"] == {"epoch": 1, "attempt": 3, "by": "test"}
    assert (first["kind"], second["kind"], second["epoch"]) == ("epoch", "commit", 1)
    assert second["at"] == 1_700_000_000.0
    assert first["nonce"] != second["nonce"]


def test_refresh_reads_new_entries_only(store):
    writer, reader = open_log(store), open_log(store)
    epoch = take(writer)
    reader.refresh()
    writer.append(commit(1, epoch), epoch=epoch)
    store.reads.clear()
    assert steps(reader.refresh()) == [1]
    assert store.reads == [f"{LOG}/000000000002.json"]


# ---------------------------------------------------------------- snapshots


def test_reader_starts_at_the_newest_snapshot(store):
    log = open_log(store)
    epoch = take(log)
    for step in range(3 * SNAPSHOT_EVERY):
        log.append(commit(step, epoch), epoch=epoch)
    store.reads.clear()
    reader = open_log(store)
    assert reader.state == log.state
    assert len(store.reads) == 2  # the snapshot at 192, and one entry after it
    assert len(reader.state.commits) == 3 * SNAPSHOT_EVERY


def test_state_is_the_same_with_and_without_snapshots(store):
    log, early = open_log(store), open_log(store)
    early.refresh()
    epoch = take(log)
    for number in range(KEPT_PRUNED + 100):
        log.append(commit(number, epoch), epoch=epoch)
        if number % 3:
            log.append(Pruned(uuid=f"u{number}", step=number), epoch=epoch)
        if number % 50 == 7:
            log.append(Bad(uuid=f"u{number}", step=number, reason="damaged"), epoch=epoch)
            log.append(outcome(CallStatus.FAILED, attempt=number), epoch=None)
    assert open_log(store).state == early.refresh() == log.state


def test_pruned_commits_are_forgotten_in_the_end(store):
    log = open_log(store)
    epoch = take(log)
    for step in range(KEPT_PRUNED + 5):
        log.append(commit(step, epoch), epoch=epoch)
        log.append(Pruned(uuid=f"u{step}", step=step), epoch=epoch)
    assert log.state.commits == ()
    assert len(log.state.all_commits) == len(log.state.pruned) == KEPT_PRUNED


def test_snapshots_carry_no_metrics_of_pruned_commits(store):
    log = open_log(store)
    epoch = take(log)
    for step in range(SNAPSHOT_EVERY):
        log.append(replace(commit(step, epoch), metrics={"loss" * 1000: 0.5}), epoch=epoch)
        log.append(Pruned(uuid=f"u{step}", step=step), epoch=epoch)
    assert len(store.objects[f"{LOG}/{2 * SNAPSHOT_EVERY:012}.json"]) < 100_000
    assert open_log(store).state == log.state


# ---------------------------------------------------------------- what no reader would accept


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        pytest.param(commit(-3, 1), "`step` is -3", id="negative-step"),
        pytest.param(commit(3, 1, "a/b"), "`uuid` is 'a/b'", id="uuid"),
        pytest.param(
            replace(commit(3, 1), metrics={"x" * MAX_ENTRY_BYTES: 1.0}),
            f"at most {MAX_ENTRY_BYTES} are read",
            id="huge",
        ),
    ],
)
def test_entry_that_could_not_be_read_is_not_written(store, entry, why):
    log = open_log(store)
    epoch = take(log)
    before = dict(store.objects)
    with pytest.raises(StoreError, match="a `commit` cannot be written") as refused:
        log.append(entry, epoch=epoch)
    assert why in str(refused.value)
    assert store.objects == before
    log.append(commit(1, epoch), epoch=epoch)
    assert steps(open_log(store).state) == [1]


# ---------------------------------------------------------------- who may write


@pytest.mark.parametrize("write", [take, lambda log: log.append(outcome(CallStatus.FAILED), epoch=None)])
@pytest.mark.timeout(10)
def test_number_that_is_taken_and_not_listed_is_an_error_and_no_endless_loop(store, monkeypatch, write):
    """A link in a directory, a listing that a cache answers, or one that is not allowed."""
    write_entries(store, 2)
    monkeypatch.setattr(store, "list", lambda prefix, *, after="": iter(()))
    with pytest.raises(StoreError, match=r"`run/log/000000000001.json` .*neither written nor read"):
        write(open_log(store))


def test_superseded_names_the_other_gang_and_the_cure(store):
    first, second = open_log(store), open_log(store)
    epoch = take(first)
    second.take_epoch(attempt=2, by="task-run-7")
    for late in (lambda: first.append(commit(1, epoch), epoch=epoch), lambda: take(first)):
        with pytest.raises(Superseded, match=r"`task-run-7`.*`run_key` of its own"):
            late()


def test_gang_that_slept_through_its_replacement_commits_nothing(store):
    sleeper, other = open_log(store), open_log(store)
    old = take(sleeper)
    sleeper.append(commit(10, old), epoch=old)
    new = take(other, attempt=2)
    other.append(commit(20, new), epoch=new)
    before = dict(store.objects)
    for _ in range(2):
        with pytest.raises(Superseded, match=r"epoch 2, this one has 1"):
            sleeper.append(commit(30, old, "late"), epoch=old)
    assert store.objects == before
    assert steps(open_log(store).state) == [20, 10]


def test_gang_that_is_replaced_between_its_read_and_its_write_commits_nothing(store):
    sleeper, other = open_log(store), open_log(store)
    old = take(sleeper)

    def replace_it() -> None:
        store.before_create = lambda: None
        take(other, attempt=2)

    store.before_create = replace_it
    with pytest.raises(Superseded):
        sleeper.append(commit(10, old), epoch=old)
    assert open_log(store).state.commits == ()


def test_epoch_counts_for_every_log_of_its_gang(store):
    log, other = open_log(store), open_log(store)
    other.refresh()
    epoch = take(log)
    other.append(commit(1, epoch), epoch=epoch)
    assert steps(open_log(store).state) == [1]


def test_driver_that_writes_in_between_does_not_stop_the_gang(store):
    gang, driver = open_log(store), open_log(store)
    epoch = take(gang)
    driver.append(outcome(CallStatus.FAILED), epoch=None)
    gang.append(commit(1, epoch), epoch=epoch)
    assert steps(open_log(store).state) == [1]


def test_racing_gangs_get_epochs_of_their_own(store):
    with ThreadPoolExecutor(8) as threads:
        epochs = list(threads.map(lambda _: take(open_log(store)), range(40)))
    assert sorted(epochs) == list(range(1, 41))
    assert open_log(store).state.epoch == 40


def test_racing_writers_lose_no_entry(store):
    def write(number: int) -> None:
        entry = replace(outcome(CallStatus.FAILED), call=f"call-{number}")
        open_log(store).append(entry, epoch=None)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(100)))
    assert len(open_log(store).state.outcomes) == 100
    assert len(store.objects) == 100


def test_threads_may_share_a_log(store):
    log = open_log(store)
    epoch = take(log)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda step: log.append(commit(step, epoch), epoch=epoch), range(50)))
    assert sorted(steps(open_log(store).state)) == list(range(50))


Action = tuple[int, str]
actions = st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["take", "commit", "driver"])), max_size=25)


@settings(max_examples=150, deadline=None)
@given(outer=actions, inner=st.lists(st.lists(st.tuples(st.integers(0, 1), st.just("take")), max_size=2)))
def test_only_the_newest_gang_commits_whatever_the_interleaving(outer: list[Action], inner: list[Any]):
    store = MemoryStore()
    logs, epochs = [open_log(store), open_log(store)], [0, 0]
    said: list[str] = []
    counter = iter(range(10_000))

    def act(who: int, what: str, log: RunLog) -> None:
        if what == "take":
            epochs[who] = take(log)
        elif what == "driver":
            log.append(outcome(CallStatus.FAILED), epoch=None)
        elif epochs[who]:
            uuid, epoch = f"save-{next(counter)}", epochs[who]
            try:
                log.append(commit(1, epoch, uuid), epoch=epoch)
            except Superseded:
                assert open_log(store).state.epoch > epoch
            else:
                said.append(uuid)

    def interrupt() -> None:
        if not inner:
            return
        hook, store.before_create = store.before_create, lambda: None
        for who, what in inner.pop():
            act(who, what, open_log(store))
        store.before_create = hook

    store.before_create = interrupt
    for who, what in outer:
        act(who, what, logs[who])
    state = open_log(store).state
    assert [one.uuid for one in reversed(state.all_commits)] == said  # committed is there, refused is not
    newest = 0
    for key in sorted(store.objects):
        entry = json.loads(store.objects[key])
        if entry["kind"] == "epoch":
            assert entry["entry"]["epoch"] == newest + 1
            newest += 1
        if entry["kind"] == "commit":
            assert entry["entry"]["epoch"] == newest


# ---------------------------------------------------------------- outcomes


def test_gang_ends_at_once_when_its_call_has_succeeded(store):
    driver, gang = open_log(store), open_log(store)
    take(gang, call=CALL)
    driver.append(outcome(CallStatus.SUCCEEDED, attempt=1), epoch=None)
    with pytest.raises(Superseded, match="succeeded already, in attempt 1"):
        take(gang, attempt=2, call=CALL)
    assert take(gang, attempt=2, call="another") == 2


def test_failed_outcome_does_not_stop_a_retry(store):
    log = open_log(store)
    log.append(outcome(CallStatus.FAILED), epoch=None)
    assert take(log, attempt=2, call=CALL) == 1


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (["failed", "succeeded"], "succeeded"),
        (["succeeded", "failed"], "succeeded"),
        (["succeeded", "stopped", "timed out"], "succeeded"),
        (["succeeded", "refused"], "refused"),
        (["succeeded", "refused", "failed"], "failed"),
        (["succeeded", "refused", "succeeded"], "succeeded"),
    ],
    ids="-".join,
)
def test_success_stays_until_a_driver_refuses_its_result(store, statuses, expected):
    log = open_log(store)
    for status in statuses:
        log.append(outcome(CallStatus(status)), epoch=None)
    assert open_log(store).state.outcomes[CALL].status == expected


# ---------------------------------------------------------------- damage and malice


def write_entries(store: MemoryStore, count: int) -> RunLog:
    log = open_log(store)
    epoch = take(log)
    for step in range(count - 1):
        log.append(commit(step, epoch), epoch=epoch)
    return log


def edit(store: MemoryStore, number: int, change: Callable[[dict[str, Any]], Any]) -> None:
    key = f"{LOG}/{number:012}.json"
    fields = json.loads(store.objects[key])
    change(fields)
    store.objects[key] = json.dumps(fields).encode()


def test_commit_that_a_careless_store_let_through_does_not_count(store):
    """A store that ignores put-if-absent is refused by the probe; here is what would be left."""
    write_entries(store, 3)
    edit(store, 3, lambda fields: fields["entry"].update(epoch=9))
    assert steps(open_log(store).state) == [0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        pytest.param(lambda f: f.update(kind="gift"), "`kind` is 'gift'", id="kind"),
        pytest.param(lambda f: f.pop("entry"), "not an object", id="no-entry"),
        pytest.param(lambda f: f.update(entry=[]), "not an object", id="entry-a-list"),
        pytest.param(lambda f: f["entry"].pop("step"), "see `'step'`", id="field-missing"),
        pytest.param(lambda f: f["entry"].update(extra=1), "see `'extra'`", id="field-too-many"),
        pytest.param(lambda f: f["entry"].update(step=-1), "`step` is -1", id="negative"),
        pytest.param(lambda f: f["entry"].update(step=True), "`step` is True", id="bool"),
        pytest.param(lambda f: f["entry"].update(step=10**30), "`step` is 1000", id="too-large"),
        pytest.param(lambda f: f["entry"].update(step=1.5), "`step` is 1.5", id="fraction"),
        pytest.param(lambda f: f["entry"].update(uuid="../../etc"), "`uuid` is '../../etc'", id="path"),
        pytest.param(lambda f: f["entry"].update(uuid="u1\n"), "`uuid` is", id="newline"),
        pytest.param(lambda f: f["entry"].update(uuid=""), "`uuid` is ''", id="empty-uuid"),
        pytest.param(lambda f: f["entry"].update(metrics={"loss": "low"}), "`metrics.loss`", id="metric"),
        pytest.param(lambda f: f["entry"].update(seconds=None), "`seconds` is None", id="null"),
        pytest.param(lambda f: f.update(nonce=7), "`nonce` is 7", id="nonce"),
        pytest.param(lambda f: f.update(snapshot=7), "`snapshot` is 7", id="snapshot"),
    ],
)
def test_entry_with_a_wrong_schema_is_refused_by_name(store, change, why):
    write_entries(store, 3)
    edit(store, 2, change)
    with pytest.raises(StoreError) as refused:
        open_log(store).refresh()
    message = str(refused.value)
    assert f"`{LOG}/000000000002.json` in `memory://test` is not an entry of a run log" in message
    assert why in message
    assert "run_key" in message


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{", id="cut"),
        pytest.param(b"\x80\x04\x95", id="pickle"),
        pytest.param(b"[]", id="list"),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b'{"kind": NaN}', id="constant"),
        pytest.param(b'{"kind": ' + b"9" * 10_000 + b"}", id="long-number"),
    ],
)
def test_entry_that_is_no_json_is_refused_by_name(store, data):
    write_entries(store, 2)
    store.objects[f"{LOG}/000000000002.json"] = data
    with pytest.raises(StoreError, match=r"000000000002.json` in `memory://test` is not an entry"):
        open_log(store).refresh()


def test_huge_entry_is_refused_before_it_is_fetched(store):
    write_entries(store, 2)
    key = f"{LOG}/000000000002.json"
    store.objects[key] = b" " * (MAX_ENTRY_BYTES + 1)
    store.reads.clear()
    with pytest.raises(StoreError, match=f"{MAX_ENTRY_BYTES + 1} bytes"):
        open_log(store).refresh()
    assert key not in store.reads


@pytest.mark.parametrize("name", ["1.json", "00000000000a.json", "000000000003.txt", "x/000000000003.json"])
def test_object_that_is_no_entry_is_refused_by_name(store, name):
    write_entries(store, 2)
    store.objects[f"{LOG}/{name}"] = b"{}"
    with pytest.raises(StoreError, match="its name is no entry's"):
        open_log(store).refresh()


def test_missing_entry_is_said(store):
    write_entries(store, 4)
    del store.objects[f"{LOG}/000000000002.json"]
    with pytest.raises(StoreError, match="entry 2 is missing before it"):
        open_log(store).refresh()


@pytest.mark.parametrize(
    "key", ["calls/../secret", "/etc/passwd", "calls/c0ffee/../../x", "checkpoints/a", "calls/c0ffee/a/b", 7]
)
def test_outcome_whose_result_lies_elsewhere_is_refused(store, key):
    log = open_log(store)
    log.append(outcome(CallStatus.SUCCEEDED), epoch=None)
    edit(store, 1, lambda fields: fields["entry"]["result"].update(key=key))
    with pytest.raises(StoreError, match="`key` is"):
        open_log(store).refresh()


def test_snapshot_that_is_damaged_is_named(store):
    write_entries(store, SNAPSHOT_EVERY)
    edit(store, SNAPSHOT_EVERY, lambda fields: fields["snapshot"].pop("commits"))
    with pytest.raises(StoreError, match=r"000000000064.json.*`commits` is None"):
        open_log(store).refresh()
