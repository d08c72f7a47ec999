"""A rank's page: what is on it after the rank was killed, torn or told to stop."""

from __future__ import annotations

import os
import signal
import time

import pytest

from prefect_torch_elastic import rankstate
from prefect_torch_elastic.rankstate import RankProgress, RankState, StopReason


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
    assert reader.stop_requested is StopReason.NONE


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


@pytest.mark.parametrize("reason", list(StopReason), ids=lambda reason: reason.name)
def test_stop_request_is_seen_by_the_rank_and_leaves_its_report(writer, reader, reason):
    writer.report({}, step=5, total_steps=None)
    reader.request_stop(reason)
    assert writer.stop_requested is reason
    assert reader.read().step == 5


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
    assert min(rounds) < 100e-6  # measured: 11 µs; a busy machine may lose single rounds


def test_page_belongs_to_no_folder(page):
    assert "memfd:pte-test" in os.readlink(f"/proc/self/fd/{page}")
