"""A rank's page: what is on it after the rank was killed, torn or told to stop."""

from __future__ import annotations

import os
import signal
import time

import pytest

from prefect_torch_elastic import rankstate
from prefect_torch_elastic.arrivals import KEPT, Arrivals
from prefect_torch_elastic.rankstate import Busy, RankProgress, RankReadings, RankState, StopReason


@pytest.fixture
def page():
    fd = RankState.create_file("test")
    yield fd
    os.close(fd)


@pytest.fixture
def writer(page):
    state = RankState(page)
    yield state
    state.close()


@pytest.fixture
def reader(page):
    state = RankState(page)
    yield state
    state.close()


def test_page_says_nothing_before_the_first_report(reader):
    assert reader.read() == RankProgress()
    assert reader.stop_request is None
    assert not reader.polls


def test_report_is_read_by_the_other_side(writer, reader):
    writer.report({"loss": 2.5, "note": "warm"}, step=3, total_steps=10)
    seen = reader.read()
    assert (seen.step, seen.total_steps, seen.metrics) == (3, 10, {"loss": 2.5, "note": "warm"})
    assert abs(seen.reported_at - time.monotonic()) < 5


def test_newer_report_replaces_the_older_one(writer, reader):
    writer.report({"loss": 1.0, "accuracy": 0.5}, step=1, total_steps=2)
    writer.report({"loss": 0.5}, step=2, total_steps=None)
    seen = reader.read()
    assert (seen.step, seen.total_steps, seen.metrics) == (2, None, {"loss": 0.5})


def test_phase_is_kept_next_to_the_steps(writer, reader):
    assert writer.enter_phase("compile") == ""
    assert (reader.read().step, reader.read().phase) == (None, "compile")
    writer.report({"loss": 1.0}, step=1, total_steps=None)
    assert writer.enter_phase("evaluate") == "compile"
    seen = reader.read()
    assert (seen.step, seen.phase, seen.metrics) == (1, "evaluate", {"loss": 1.0})


def test_report_survives_sigkill_of_the_rank(page, reader):
    pid = os.fork()
    if pid == 0:
        RankState(page).report({"loss": 0.25}, step=41, total_steps=100)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    seen = reader.read()
    assert (seen.step, seen.total_steps, seen.metrics) == (41, 100, {"loss": 0.25})


def test_report_of_a_rank_that_died_while_writing_is_read_as_numbers_only(page, writer, reader):
    writer.report({"loss": 1.0}, step=1, total_steps=9)
    writer._words[rankstate._SEQUENCE] += 1  # odd: the writer was in the middle of step 2
    writer._words[rankstate._STEP] = 2
    writer._page[rankstate._TEXT_AT : rankstate._TEXT_AT + 6] = b'["torn'
    seen = reader.read()
    assert (seen.step, seen.total_steps, seen.metrics, seen.phase) == (2, 9, {}, "")


def test_reader_never_sees_half_a_report(page, reader):
    pid = os.fork()
    if pid == 0:
        state = RankState(page)
        for step in range(1, 10**9):
            state.report({"step": step, "text": "x" * (step % 50)}, step=step, total_steps=step)
    try:
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline:
            seen = reader.read()
            if seen.metrics:
                assert seen.metrics == {"step": seen.step, "text": "x" * ((seen.step or 0) % 50)}
                assert seen.total_steps == seen.step
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


REASONS = [reason for reason in StopReason if reason is not StopReason.NONE]


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason.name)
def test_stop_request_is_seen_by_the_rank_and_leaves_its_report(writer, reader, reason):
    writer.report({}, step=5, total_steps=None)
    reader.request_stop(reason, seconds_left=60.0)
    request = writer.stop_request
    assert request.reason is reason
    assert 55.0 < request.seconds_left <= 60.0
    assert reader.read().step == 5


def test_time_of_a_stop_request_runs_down_and_ends_at_zero(writer, reader):
    reader.request_stop(StopReason.CANCELLED, seconds_left=0.02)
    time.sleep(0.03)
    assert writer.stop_request.seconds_left == 0.0


def test_later_stop_request_replaces_reason_and_time(writer, reader):
    reader.request_stop(StopReason.CANCELLED, seconds_left=60.0)
    reader.request_stop(StopReason.FAILED, seconds_left=5.0)
    request = writer.stop_request
    assert request.reason is StopReason.FAILED
    assert request.seconds_left <= 5.0


def test_rank_that_looks_for_a_stop_is_known_to_poll(writer, reader):
    assert writer.stop_request is None
    assert not reader.polls, "a look at the page alone, such as when the rank ends, is no poll"
    assert writer.poll_for_stop() is None
    assert reader.polls
    reader.request_stop(StopReason.PREEMPTED, seconds_left=1.0)
    assert writer.poll_for_stop().reason is StopReason.PREEMPTED


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason.name)
def test_ranks_save_together_unless_a_peer_is_gone(reason):
    assert reason.lets_ranks_save is (reason not in {StopReason.FAILED, StopReason.REGROUP})


def test_metrics_may_be_tensors_and_numpy_numbers(writer, reader):
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    metrics = {
        "scalar": torch.tensor(1.5),
        "one": torch.tensor([2.0]),
        "numpy": numpy.float32(0.5),
        "many": torch.ones(2),
        "set": {1},
    }
    writer.report(metrics, step=torch.tensor(3), total_steps=None)
    seen = reader.read()
    assert seen.step == 3
    assert seen.metrics == {
        "scalar": 1.5,
        "one": 2.0,
        "numpy": 0.5,
        "many": "tensor([1., 1.])",
        "set": "{1}",
    }


def test_metrics_that_do_not_fit_are_dropped_and_the_step_stays(writer, reader):
    writer.enter_phase("train")
    writer.report({f"metric-{index}": "x" * 100 for index in range(100)}, step=8, total_steps=9)
    seen = reader.read()
    assert (seen.step, seen.total_steps, seen.phase, seen.metrics) == (8, 9, "train", {})


def test_phase_that_does_not_fit_is_cut(writer, reader):
    writer.enter_phase("ß" * 10_000)
    assert reader.read().phase == "ß" * 100
    writer.report({"loss": 1.0}, step=1, total_steps=None)
    assert reader.read().step == 1


def test_report_costs_microseconds(writer):
    rounds: list[float] = []
    for _ in range(5):
        started = time.perf_counter()
        for step in range(200):
            writer.report({"loss": 1.0, "lr": 1e-3}, step=step, total_steps=200)
        rounds.append((time.perf_counter() - started) / 200)
    assert min(rounds) < 20e-6  # measured: 4 µs; a busy machine may lose single rounds


# ---------------------------------------------------------------- times


class Clock:
    """The clock of the page, in nanoseconds."""

    def __init__(self) -> None:
        self.now = 1_000_000_000_000

    def monotonic_ns(self) -> int:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += int(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(rankstate, "time", made)
    return made


def test_page_has_no_times_before_the_first_report(reader):
    assert reader.read_all() == RankReadings()


def test_first_report_begins_the_first_step_that_is_timed(writer, reader, clock):
    clock.advance(60.0)  # the first step compiles
    writer.report({}, step=1, total_steps=None)
    seen = reader.read_all()
    assert (seen.steps, seen.step_seconds, seen.longest_seconds) == (1, 0.0, 0.0)
    assert seen.marked_at == clock.now / 1e9


def test_times_between_reports_give_median_and_tail(writer, reader, clock):
    for step in range(41):
        clock.advance(2.0 if step in (20, 30, 40) else 0.1)
        writer.report({}, step=step, total_steps=None)
    seen = reader.read_all()
    assert seen.steps == 41
    assert seen.step_seconds == pytest.approx(0.1, rel=0.1)
    assert seen.step_p95_seconds == pytest.approx(2.0, rel=0.13)
    assert seen.longest_seconds == pytest.approx(2.0)


def test_phase_save_and_load_are_no_part_of_a_step_but_of_the_longest_gap(writer, reader, clock):
    for step in range(3):
        clock.advance(0.1)
        writer.report({}, step=step, total_steps=None)
        before = writer.enter_phase("evaluate")
        clock.advance(5.0)
        writer.enter_phase(before)
        for busy, seconds in ((Busy.SAVE, 3.0), (Busy.LOAD, 1.0)):
            with writer.busy(busy):
                clock.advance(seconds)
    clock.advance(0.1)
    writer.report({}, step=3, total_steps=None)
    seen = reader.read_all()
    assert seen.step_seconds == pytest.approx(0.1, rel=0.1)
    assert seen.longest_seconds == pytest.approx(9.1)
    assert (seen.phase_seconds, seen.save_seconds, seen.load_seconds) == (15.0, 9.0, 3.0)


def test_save_inside_of_a_phase_is_a_save_only(writer, reader, clock):
    writer.enter_phase("end of epoch")
    clock.advance(2.0)
    with writer.busy(Busy.SAVE):
        clock.advance(7.0)
    clock.advance(1.0)
    writer.enter_phase("")
    seen = reader.read_all()
    assert (seen.phase_seconds, seen.save_seconds) == (3.0, 7.0)


def test_what_goes_on_now_is_counted_and_named(writer, reader, clock):
    with writer.busy(Busy.LOAD):
        clock.advance(4.0)
        seen = reader.read_all()
        assert (seen.busy, seen.load_seconds) == (Busy.LOAD, 4.0)
    clock.advance(9.0)
    seen = reader.read_all()
    assert (seen.busy, seen.load_seconds) == (Busy.NONE, 4.0)


def test_end_of_a_phase_or_a_save_is_a_sign_of_life(writer, reader, clock):
    writer.report({}, step=1, total_steps=None)
    with writer.busy(Busy.SAVE):
        clock.advance(30.0)
    assert reader.read_all().marked_at == clock.now / 1e9
    assert reader.read().reported_at == clock.now / 1e9 - 30.0


def test_steps_inside_of_a_phase_are_steps(writer, reader, clock):
    writer.enter_phase("train")
    for step in range(5):
        clock.advance(0.5)
        writer.report({}, step=step, total_steps=None)
    clock.advance(0.2)
    writer.enter_phase("")
    seen = reader.read_all()
    assert seen.step_seconds == pytest.approx(0.5, rel=0.1)
    assert seen.phase_seconds == pytest.approx(0.2)


def test_save_that_raises_is_over(writer, reader, clock):
    def save() -> None:
        with writer.busy(Busy.SAVE):
            clock.advance(1.0)
            raise ValueError("the disk is full")

    with pytest.raises(ValueError, match="full"):
        save()
    assert (reader.read_all().busy, reader.read_all().save_seconds) == (Busy.NONE, 1.0)


def test_memory_of_the_gpu_is_on_the_page(writer, reader):
    writer.note_gpu_memory(5 << 30)
    writer.report({}, step=1, total_steps=None)
    assert reader.read_all().gpu_memory_bytes == 5 << 30


def test_page_belongs_to_no_folder(page):
    assert "memfd:pte-test" in os.readlink(f"/proc/self/fd/{page}")


def test_arrivals_are_read_as_they_were_noted(writer, reader):
    assert reader.read_all().arrivals is None
    whole = Arrivals(look=7, first=100, offsets_us=[-5 * place for place in range(KEPT)])
    for arrivals in (whole, Arrivals(look=8, first=3, offsets_us=[-2, -1])):
        writer.note_arrivals(arrivals)
        assert reader.read_all().arrivals == arrivals
    writer.report({"loss": 1.0}, step=1, total_steps=None)
    assert reader.read_all().arrivals == arrivals


def test_arrivals_that_are_being_written_are_not_read(writer, reader):
    writer.note_arrivals(Arrivals(look=7, first=1, offsets_us=[-1]))
    writer._words[rankstate._ARRIVALS_END] = 0
    assert reader.read_all().arrivals is None


def test_phases_and_saves_before_the_first_step_are_of_the_start(writer, reader):
    writer.enter_phase("compile")
    with writer.busy(Busy.SAVE):
        time.sleep(0.05)
    writer.enter_phase("")
    assert reader.read_all().save_seconds >= 0.05
    writer.report({}, step=1, total_steps=None)
    seen = reader.read_all()
    assert (seen.phase_seconds, seen.save_seconds, seen.load_seconds) == (0.0, 0.0, 0.0)
    with writer.busy(Busy.SAVE):
        time.sleep(0.05)
    assert 0.05 <= reader.read_all().save_seconds < 0.1
