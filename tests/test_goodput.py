"""What a run's wall time went into: the parts add up, and each moment is where a person would put it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_torch_elastic.chronicle import Chronicle
from prefect_torch_elastic.goodput import Part, count_goodput
from prefect_torch_elastic.incidents import IncidentKind
from prefect_torch_elastic.runfacts import GangEnd
from prefect_torch_elastic.wire import GangStatus, VerdictAction
from tests.run_stories import BEGIN, Story, tell_troubled_run

ACTIONS = (
    "begin",
    "start",
    "train",
    "again",
    "save",
    "phase",
    "suspect",
    "hang",
    "fail",
    "preempt",
    "restart",
    "finish",
    "stop",
    "lose",
    "queue",
    "provision",
    "reload",
    "end",
)


def act(story: Story, action: str, number: int) -> None:
    """Let something happen, sensible at that moment or not."""
    match action:
        case "begin":
            story.begin(attempt=number)
        case "start":
            story.start(number)
        case "train":
            story.train(story.steps + 1, story.steps + 4, round=number, seconds=0.37)
        case "again":
            story.train(1, 3, round=number, seconds=1.25)
        case "save":
            story.save(story.steps, stall=1.5).sample(story.steps, round=number, idle_seconds=1.5)
        case "phase":
            story.sample(story.steps, round=number, phase="eval", phase_seconds=7.0 * number)
        case "suspect":
            story.incident(IncidentKind.SUSPICION)
        case "hang":
            story.incident(IncidentKind.HANG, category="Hang")
        case "fail":
            story.incident(IncidentKind.FAILURE, category="Killed")
        case "preempt":
            story.incident(IncidentKind.PREEMPTION)
        case "restart":
            story.end_round(VerdictAction.RESTART, round=number)
        case "finish":
            story.end_round(VerdictAction.FINISH, round=number)
        case "stop":
            story.end_gang(GangStatus.STOPPED)
        case "lose":
            story.chronicle.end_incarnation(GangEnd.LOST, at=story.now)
        case "queue" | "provision":
            story.chronicle.note_phase(action, "", story.now, is_queue=action == "queue")
        case "reload":
            story.chronicle = Chronicle.from_json(story.chronicle.to_json())
        case _:
            story.end()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(ACTIONS),
            st.integers(0, 2),
            st.floats(-20, 300, allow_nan=False),  # clocks of two machines may disagree
        ),
        max_size=40,
    )
)
def test_parts_add_up_to_the_wall_time_exactly(events: list[tuple[str, int, float]]):
    story = Story()
    for action, number, seconds in events:
        story.wait(seconds)
        act(story, action, number)

    goodput = story.goodput
    assert sum(goodput.parts_ms.values()) == goodput.wall_ms
    assert all(part >= 0 for part in goodput.parts_ms.values())
    assert sum(span.end_ms - span.begin_ms for span in goodput.spans) == goodput.wall_ms
    assert all(before.end_ms == after.begin_ms for before, after in pairwise(goodput.spans))
    assert not goodput.wall_ms or goodput.spans[0].begin_ms == round(BEGIN * 1000)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from(["kill", "preempt", "hang"]), max_size=6),
    st.integers(2, 30),
    st.floats(0.01, 30, allow_nan=False),
)
def test_parts_add_up_over_kills_hangs_and_preemptions(troubles: list[str], steps: int, seconds: float):
    story, first = Story().wait(11).begin().wait(3).start(), 1
    for number, trouble in enumerate(troubles):
        story.wait(2).train(first, first + steps, round=number, seconds=seconds)
        first += steps // 2
        if trouble == "preempt":
            story.incident(IncidentKind.PREEMPTION).wait(1).end_gang(GangStatus.STOPPED).wait(
                40
            ).begin().wait(2)
        else:
            kind = IncidentKind.HANG if trouble == "hang" else IncidentKind.FAILURE
            story.wait(5).incident(kind).wait(1).end_round(VerdictAction.RESTART, round=number).wait(2)
        story.start(number + 1)
    story.train(first, first + steps, round=len(troubles), seconds=seconds).end_gang(
        GangStatus.SUCCEEDED
    ).end()

    goodput = story.goodput
    assert sum(goodput.parts_ms.values()) == goodput.wall_ms == round((story.now - BEGIN) * 1000)
    assert (goodput.parts_ms[Part.HANG] > 0) == ("hang" in troubles)
    assert goodput.seconds(Part.QUEUE) == pytest.approx(11 + 40 * troubles.count("preempt"), abs=0.01)
    assert goodput.share(Part.PRODUCTIVE) <= 1


def test_troubled_run_is_split_as_it_was_told():
    goodput = tell_troubled_run().goodput

    told = {
        Part.QUEUE: 20 + 20,
        # to the first report of each round; the first step is part of it
        Part.STARTUP: (5 + 3 + 1) + (2 + 2 + 1) + (2 + 2 + 1) + (4 + 2 + 1),
        # 9 of 10 and 19 of 20 steps again after the first one, and the half one that the kill undid
        Part.REPEATED: 9 + 19 + 0.5,
        Part.CHECKPOINT: 2,
        Part.HANG: 30,
        Part.TEARDOWN: 0.5 + 1 + (2 + 1) + 1,
        Part.PRODUCTIVE: 29 + 10 + 20 + 39,
        Part.OTHER: 0,
    }
    assert {part: goodput.seconds(part) for part in Part} == pytest.approx(told)


def test_time_is_queue_until_a_gang_begins():
    assert Story().wait(42).goodput.seconds(Part.QUEUE) == 42


def test_phases_of_a_cluster_tell_its_queue_from_its_start():
    story = Story()
    story.chronicle.note_phase("Queued", "", story.now, is_queue=True)
    story.wait(30).chronicle.note_phase("Starting", "", story.now, is_queue=False)
    story.wait(12).begin()

    assert (story.goodput.seconds(Part.QUEUE), story.goodput.seconds(Part.STARTUP)) == (30, 12)


def test_a_step_that_runs_counts_as_productive():
    story = Story().begin().start().train(1, 5).wait(2)

    assert story.goodput.seconds(Part.PRODUCTIVE) == pytest.approx(4 + 2)


def test_a_suspicion_counts_as_hang_until_a_step_comes():
    story = Story().begin().start().train(1, 5).wait(20).incident(IncidentKind.SUSPICION).wait(5)
    assert story.goodput.seconds(Part.HANG) == pytest.approx(25)

    assert story.train(6, 6).goodput.seconds(Part.HANG) == 0


def test_phase_blocks_are_not_productive():
    story = Story().begin().start().train(1, 5)
    story.wait(30).train(6, 6, phase_seconds=30.0)

    assert story.goodput.seconds(Part.OTHER) == pytest.approx(30)
    assert story.goodput.seconds(Part.PRODUCTIVE) == pytest.approx(5)


def test_a_run_that_never_reports_is_not_called_a_start():
    story = Story().begin().wait(3).start().wait(60).end_round(VerdictAction.FINISH)
    story.end_gang(GangStatus.SUCCEEDED).end()

    assert (story.goodput.seconds(Part.STARTUP), story.goodput.seconds(Part.OTHER)) == (3, 60)


def test_a_round_that_fails_before_its_first_step_is_a_start():
    story = Story().begin().start().wait(5).end_round(VerdictAction.RESTART).start(1).train(1, 3, round=1)

    assert story.goodput.seconds(Part.STARTUP) == pytest.approx(5 + 1)


def test_the_last_save_of_a_run_that_is_taken_away_is_a_checkpoint():
    story = Story().begin().start().train(1, 5).incident(IncidentKind.PREEMPTION).save(5, stall=3.0)
    story.sample(5, idle_seconds=3.0).wait(1).end_gang(GangStatus.STOPPED)

    assert story.goodput.seconds(Part.CHECKPOINT) == pytest.approx(3)
    assert story.goodput.seconds(Part.TEARDOWN) == pytest.approx(1)


def test_goodput_of_nothing_is_zero():
    goodput = count_goodput(Story().facts)

    assert (goodput.wall_ms, goodput.share(Part.PRODUCTIVE), goodput.spans) == (0, 0.0, ())
