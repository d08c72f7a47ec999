"""Which checkpoints stay, and that removing the others never costs one that somebody needs."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_elastic.checkpoint import retention
from prefect_torch_elastic.checkpoint.manifest import DamagedError, render_folder
from prefect_torch_elastic.checkpoint.reader import fetch_checkpoint
from prefect_torch_elastic.checkpoint.retention import choose_pruned, collect_garbage, pin, prune
from prefect_torch_elastic.checkpoint.verify import verify
from prefect_torch_elastic.errors import StoreError, Superseded
from prefect_torch_elastic.runlog import Bad, Commit, Pruned, RunLog
from prefect_torch_elastic.spec import CheckpointPolicy
from prefect_torch_elastic.store.directory import DirectoryStore

RUN = "run"
HOURS = 3600.0


def make_commit(step: int, *, uuid: str = "", **metrics: float) -> Commit:
    return Commit(
        step=step,
        uuid=uuid or f"000001-{step:016x}",
        epoch=1,
        manifest_crc32c=0,
        size_bytes=1,
        world_size=1,
        metrics=metrics,
    )


def steps(commits) -> list[int]:
    return [commit.step for commit in commits]


class Run:
    """A run whose saves are two small objects each."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.root = root
        self.store = DirectoryStore(root)
        self.log = RunLog(self.store, RUN)
        self.epoch = self.log.take_epoch(attempt=1, by="test")

    def write(self, step: int, *, epoch: int = 1, hours_ago: float = 0.0) -> str:
        """Write the data of a save, without a commit."""
        uuid = f"{epoch:06}-{step:016x}"
        for name in ("manifest.json", "r00000/000000"):
            key = f"{RUN}/{render_folder(step, uuid)}/{name}"
            self.store.put(key, b"data")
            when = time.time() - hours_ago * HOURS
            os.utime(self.root / key, (when, when))
        return uuid

    def save(self, step: int, *, hours_ago: float = 0.0, **metrics: float) -> Commit:
        commit = make_commit(step, uuid=self.write(step, hours_ago=hours_ago), **metrics)
        self.log.append(commit, epoch=self.epoch)
        return commit

    def steps_with_data(self) -> list[int]:
        return [int(name) for name in self.store.list_folders(f"{RUN}/checkpoints")]

    def prune(self, *, epoch: int | None = 1, collect: bool = False, **policy) -> list[int]:
        options = CheckpointPolicy(**policy)
        return steps(prune(self.store, RUN, self.log, policy=options, epoch=epoch, collect=collect))


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(tmp_path / "store")


# ---------------------------------------------------------------- deciding

values = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))
histories = st.lists(st.tuples(st.integers(0, 30), values), max_size=12).map(
    lambda items: [
        make_commit(step, uuid=f"{place}", **({} if loss is None else {"loss": loss}))
        for place, (step, loss) in enumerate(items)
    ]
)
policies = st.builds(
    CheckpointPolicy,
    keep_last=st.integers(0, 4),
    keep_best=st.integers(0, 4),
    metric=st.sampled_from([None, "loss"]),
    mode=st.sampled_from(["min", "max"]),
    keep_every_steps=st.one_of(st.none(), st.integers(1, 7)),
)


@given(commits=histories, policy=policies)
def test_newest_checkpoint_always_stays(commits, policy):
    pruned = choose_pruned(commits, policy)
    assert len(pruned) < max(1, len(commits))
    assert not commits or commits[0] not in pruned


@given(commits=histories, policy=policies)
def test_each_rule_keeps_what_it_says(commits, policy):
    pruned = choose_pruned(commits, policy)
    kept = [commit for commit in commits if commit not in pruned]
    assert all(commit in kept for commit in commits[: policy.keep_last])
    if policy.keep_every_steps:
        assert {c.step for c in commits if c.step % policy.keep_every_steps == 0} <= set(steps(kept))
    if policy.keep_best and policy.metric:
        known = [c.metrics["loss"] for c in commits if not math.isnan(c.metrics.get("loss", math.nan))]
        best = sorted(known, reverse=policy.mode == "max")[: policy.keep_best]
        held = [c.metrics["loss"] for c in kept if not math.isnan(c.metrics.get("loss", math.nan))]
        assert sorted(held, reverse=policy.mode == "max")[: policy.keep_best] == best


@given(commits=histories, policy=policies)
def test_pruning_twice_removes_nothing_more(commits, policy):
    pruned = choose_pruned(commits, policy)
    kept = [commit for commit in commits if commit not in pruned]
    assert choose_pruned(kept, policy) == []


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 1)])
def test_nan_is_worst(mode, best):
    commits = [
        make_commit(4),
        make_commit(3, loss=math.nan),
        make_commit(2, loss=0.5),
        make_commit(1, loss=0.9),
    ]
    policy = CheckpointPolicy(keep_last=1, keep_best=1, metric="loss", mode=mode)
    assert best not in steps(choose_pruned(commits, policy))
    assert 3 in steps(choose_pruned(commits, policy))


def test_best_checkpoint_and_the_newest_both_stay_report_19():
    commits = [make_commit(step, loss=1.0 / (9 - step)) for step in range(8, 0, -1)]
    policy = CheckpointPolicy(keep_last=1, keep_best=1, metric="loss")
    assert steps(choose_pruned(commits, policy)) == [2, 3, 4, 5, 6, 7]


# ---------------------------------------------------------------- removing


def test_log_says_pruned_before_data_goes(run, monkeypatch):
    for step in (1, 2):
        run.save(step)
    seen: list[tuple[bool, list[int]]] = []
    delete = DirectoryStore.delete

    def watch(self, keys):
        keys = list(keys)
        if any("/checkpoints/" in key for key in keys):
            seen.append((bool(RunLog(run.store, RUN).refresh().pruned), run.steps_with_data()))
        delete(self, keys)

    monkeypatch.setattr(DirectoryStore, "delete", watch)
    assert run.prune(keep_last=1) == [1]
    assert seen == [(True, [1, 2])]
    assert run.steps_with_data() == [2]


def test_prune_removes_nothing_when_the_gang_was_replaced(run):
    for step in (1, 2, 3):
        run.save(step)
    RunLog(run.store, RUN).take_epoch(attempt=2, by="another")
    with pytest.raises(Superseded):
        run.prune(keep_last=1)
    assert run.steps_with_data() == [1, 2, 3]


def test_pinned_checkpoint_keeps_its_data_until_the_pin_ends(run):
    first = run.save(1)
    run.save(2)
    with pin(run.store, RUN, first.uuid):
        assert run.prune(keep_last=1, collect=True) == [1]
        assert run.steps_with_data() == [1, 2]
        assert steps(RunLog(run.store, RUN).refresh().commits) == [2]
    run.prune(keep_last=1, collect=True)
    assert run.steps_with_data() == [2]


def test_pin_of_a_killed_reader_ends(run):
    first = run.save(1)
    run.save(2)
    key = f"{RUN}/pins/{first.uuid}/0"
    run.store.put(key, b"")
    old = time.time() - retention.PIN_SECONDS - 60
    os.utime(run.root / key, (old, old))
    run.prune(keep_last=1, collect=True)
    assert run.steps_with_data() == [2]
    assert not list(run.store.list(f"{RUN}/pins"))


def test_pin_is_renewed_while_it_is_held(run, monkeypatch):
    monkeypatch.setattr(retention, "PIN_SECONDS", 0.08)
    first = run.save(1)
    run.save(2)
    with pin(run.store, RUN, first.uuid):
        time.sleep(0.3)
        monkeypatch.setattr(retention, "PIN_SECONDS", 10.0)
        made = next(iter(run.store.list(f"{RUN}/pins"))).modified
        assert time.time() - made < 0.25
    assert not list(run.store.list(f"{RUN}/pins"))


def test_reader_that_may_not_write_reads_without_a_pin(run, monkeypatch, caplog):
    def refuse(self, key, data):
        raise StoreError("read only")

    monkeypatch.setattr(DirectoryStore, "put", refuse)
    with pin(run.store, RUN, "uuid"):
        pass
    assert "without a pin" in caplog.text


# ---------------------------------------------------------------- garbage


@pytest.mark.parametrize(
    ("epoch", "hours", "by_a_person", "goes"),
    [
        pytest.param(1, 2.0, False, True, id="dead-save-of-this-gang"),
        pytest.param(1, 0.5, False, False, id="young"),
        pytest.param(1, 2.0, True, False, id="its-gang-may-still-commit"),
        pytest.param(1, 25.0, True, True, id="abandoned"),
        pytest.param(0, 2.0, True, True, id="of-a-gang-that-was-replaced"),
        pytest.param(0, 0.5, True, False, id="ranks-of-a-replaced-gang-may-still-write"),
    ],
)
def test_save_without_a_commit_goes_by_age_and_epoch(run, epoch, hours, by_a_person, goes):
    run.save(9)
    run.write(5, epoch=epoch, hours_ago=hours)
    collect_garbage(run.store, RUN, run.log, epoch=None if by_a_person else 1)
    assert run.steps_with_data() == ([9] if goes else [5, 9])


@pytest.mark.parametrize(("epoch", "goes"), [(1, False), (0, True)], ids=["of this gang", "of one before"])
@pytest.mark.parametrize("collector", [1, None], ids=["its gang", "a person"])
def test_save_whose_first_block_is_being_written_is_no_garbage_of_a_live_gang(run, epoch, goes, collector):
    run.save(9)
    block = run.root / RUN / render_folder(5, f"{epoch:06}-{5:016x}") / "r00000" / "000000"
    block.parent.mkdir(parents=True)
    block.with_name(".tmp-000000").write_bytes(b"half of it")
    removed = collect_garbage(run.store, RUN, run.log, epoch=collector)
    assert bool(removed) is goes
    assert goes or block.with_name(".tmp-000000").exists()


def test_committed_checkpoint_is_no_garbage_however_old(run):
    run.save(1, hours_ago=1000.0)
    assert collect_garbage(run.store, RUN, run.log, epoch=1) == []
    assert run.steps_with_data() == [1]


def test_checkpoint_of_the_next_gang_is_no_garbage_of_a_sleeper(run):
    run.save(1)
    other = RunLog(run.store, RUN)
    epoch = other.take_epoch(attempt=2, by="another")
    commit = make_commit(7, uuid=run.write(7, epoch=epoch, hours_ago=5.0))
    other.append(Commit(**{**commit.__dict__, "epoch": epoch}), epoch=epoch)
    assert collect_garbage(run.store, RUN, run.log, epoch=run.epoch) == []
    assert collect_garbage(run.store, RUN, run.log, epoch=None) == []
    assert run.steps_with_data() == [1, 7]


def test_wrong_clock_of_this_machine_removes_nothing(run, monkeypatch):
    run.write(5)
    run.save(6)
    first = run.save(7)
    ahead = time.time() + 1000 * HOURS
    monkeypatch.setattr(time, "time", lambda: ahead)
    with pin(run.store, RUN, first.uuid):
        collect_garbage(run.store, RUN, run.log, epoch=1)
        assert list(run.store.list(f"{RUN}/pins"))
    assert run.steps_with_data() == [5, 6, 7]


def test_damaged_checkpoint_keeps_its_data_while_there_is_no_good_one(run):
    bad = run.save(1, hours_ago=5.0)
    run.log.append(Bad(uuid=bad.uuid, step=1, reason="a flipped bit"), epoch=1)
    collect_garbage(run.store, RUN, run.log, epoch=1)
    assert run.steps_with_data() == [1]
    run.save(2)
    collect_garbage(run.store, RUN, run.log, epoch=1)
    assert run.steps_with_data() == [2]


def test_removal_that_was_cut_off_is_finished(run):
    first = run.save(1)
    run.save(2)
    run.log.append(Pruned(uuid=first.uuid, step=1), epoch=1)
    assert run.steps_with_data() == [1, 2]
    run.prune(keep_last=3, collect=True)
    assert run.steps_with_data() == [2]


# ---------------------------------------------------------------- a reader beside a prune


def test_reader_never_takes_a_half_removed_checkpoint(tmp_path, monkeypatch):
    """After every object that a prune removes, whatever the log offers is whole."""
    torch = pytest.importorskip("torch")
    from prefect_torch_elastic.checkpoint.session import CheckpointSession

    (tmp_path / "store").mkdir()
    store = DirectoryStore(tmp_path / "store")
    session = CheckpointSession(store, RUN, policy=CheckpointPolicy(keep_last=9))
    for step in range(1, 4):
        session.save({"weights": torch.full((100,), float(step))}, step=step, wait=True)
    session.close()
    delete, looks = DirectoryStore.delete, []

    def one_by_one(self, keys):
        for key in list(keys):
            delete(self, [key])
            state = RunLog(store, RUN).refresh()
            looks.append(len(state.commits))
            for commit in state.commits:
                assert not verify(store, RUN, commit).damages
            for gone in state.pruned.values():
                with pytest.raises(DamagedError):  # refused by name, not half-loaded
                    fetch_checkpoint(store, f"{RUN}/{render_folder(gone.step, gone.uuid)}", checksum=0)

    monkeypatch.setattr(DirectoryStore, "delete", one_by_one)
    log = RunLog(store, RUN)
    log.refresh()
    prune(store, RUN, log, policy=CheckpointPolicy(keep_last=1), epoch=None)
    assert len(looks) >= 6
    assert looks[-1] == 1
