"""What is kept of a run's messages, over its gangs, and how that goes to the store and back."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_elastic.arrivals import Arrivals
from prefect_torch_elastic.chronicle import MAX_CHECKPOINTS, MAX_CURVES, MAX_METRICS, Chronicle
from prefect_torch_elastic.chronicledoc import parse_facts, render_facts
from prefect_torch_elastic.curves import MAX_POINTS, CurveBuilder
from prefect_torch_elastic.incidents import IncidentKind
from prefect_torch_elastic.runfacts import (
    Curve,
    GangEnd,
    RankFacts,
    RoundEnd,
    RunFacts,
    describe_slowness,
    find_slow_ranks,
)
from prefect_torch_elastic.wire import GangStatus, Notice, Progress, VerdictAction
from tests.run_stories import BEGIN, Story, tell_troubled_run


def test_chronicle_counts_gangs_rounds_and_preemptions():
    facts = tell_troubled_run().facts

    assert (len(facts.gangs), facts.restarts, facts.preemptions, facts.end) == (2, 2, 1, GangEnd.SUCCEEDED)
    assert [gang.end for gang in facts.gangs] == [GangEnd.PREEMPTED, GangEnd.SUCCEEDED]
    assert [r.end for r in facts.gangs[0].rounds] == [RoundEnd.FAILED, RoundEnd.FAILED, RoundEnd.STOPPED]
    assert facts.gangs[0].rounds[1].category == "Hang"
    assert facts.gangs[0].reason == "the machines are taken away"
    assert [gang.rounds[0].nodes for gang in facts.gangs] == [2, 2]


def test_chronicle_knows_which_steps_are_done_twice():
    facts = tell_troubled_run().facts

    assert [r.repeated_steps for gang in facts.gangs for r in gang.rounds] == [0, 10, 20, 0]
    assert facts.resumed_at_steps == (21, 21, 61)


def test_chronicle_knows_when_fast_steps_began_that_nobody_saw():
    story = Story().begin().start().wait(10)
    story.sample(500, steps=500, step_seconds=0.002, idle_seconds=0.5)

    current = story.facts.gangs[0].rounds[0]
    assert (current.first_step, current.last_step) == (1, 500)
    assert current.first_report_at == pytest.approx(BEGIN + 9.5 - 499 * 0.002)


def test_chronicle_cuts_a_cause_that_is_a_page():
    story = Story().begin().start().train(1, 2).end_round(VerdictAction.RESTART, summary="x" * 9000)

    assert len(story.facts.gangs[0].rounds[0].cause) == 500


def test_chronicle_calls_a_stop_a_cancellation_when_nobody_took_the_machines():
    story = Story().begin().start().train(1, 2).end_gang(GangStatus.STOPPED)

    assert story.facts.gangs[0].end is GangEnd.CANCELLED


def test_chronicle_keeps_the_end_that_was_noted_first():
    story = Story().begin().start().train(1, 2)
    story.chronicle.end_incarnation(GangEnd.PREEMPTED, at=story.now, reason="a node drain")
    story.end_gang(GangStatus.STOPPED)

    assert (story.facts.gangs[0].end, story.facts.gangs[0].reason) == (GangEnd.PREEMPTED, "a node drain")


def test_chronicle_calls_a_gang_lost_when_the_next_one_begins_without_its_end():
    story = Story().begin().start().train(1, 5)
    lost_at = story.now
    story = story.wait(30).begin()

    gang = story.facts.gangs[0]
    assert (gang.end, gang.ended_at, gang.rounds[0].end) == (GangEnd.LOST, lost_at, RoundEnd.LOST)


def test_chronicle_ends_a_round_when_its_nodes_regroup():
    story = Story().begin().start().train(1, 5).wait(3).start(1)

    first, second = story.facts.gangs[0].rounds
    assert (first.end, second.end) == (RoundEnd.REGROUPED, None)


def test_chronicle_takes_a_suspicion_back_with_the_next_step():
    story = Story().begin().start().train(1, 5).wait(20).incident(IncidentKind.SUSPICION)
    assert story.facts.gangs[0].rounds[0].is_hang

    assert not story.train(6, 6).facts.gangs[0].rounds[0].is_hang


def test_chronicle_passes_over_samples_of_ranks_that_are_gone():
    story = Story().begin().start().train(1, 5).end_round(VerdictAction.RESTART).start(1)

    assert story.sample(5, round=0).facts.gangs[0].rounds[1].first_step is None


def test_chronicle_tells_saves_before_the_last_report_from_those_after():
    story = Story().begin().start().train(1, 5).save(5, stall=2.0).train(6, 6)
    story.save(6, stall=3.0).sample(6, idle_seconds=3.0)

    current = story.facts.gangs[0].rounds[0]
    assert (current.save_seconds, current.late_save_seconds) == (2.0, 3.0)


def test_chronicle_measures_speed_in_the_running_round_only():
    story = Story().begin().start().train(1, 10, seconds=0.5)
    assert story.facts.steps_per_second == pytest.approx(2.0)

    assert story.end_round(VerdictAction.RESTART).start(1).facts.steps_per_second == 0.0


def test_chronicle_keeps_the_highest_memory_of_a_rank_over_rounds():
    story = Story().begin().start().train(1, 3, memory_bytes=900).end_round(VerdictAction.RESTART)
    story.start(1).train(3, 6, round=1, memory_bytes=300)

    assert [(rank.memory_bytes, rank.step) for rank in story.facts.ranks] == [(900, 6)]


def test_chronicle_keeps_a_metric_that_is_not_a_number_as_text():
    story = Story().begin().start()
    metrics = {"loss": math.nan, "lr": 1, "on": True}
    story.chronicle.take(Progress(step=1, total_steps=None, metrics=metrics, phase=""), at=story.now)

    assert story.facts.metrics == {"loss": "nan", "lr": 1.0, "on": "True"}
    assert [curve.name for curve in story.facts.curves] == ["lr"]


def test_chronicle_charts_only_so_many_metrics():
    story = Story().begin().start()
    metrics = {f"m{number}": float(number) for number in range(MAX_CURVES + 5)}
    story.chronicle.take(Progress(step=1, total_steps=None, metrics=metrics, phase=""), at=story.now)

    assert (len(story.facts.curves), len(story.facts.metrics)) == (MAX_CURVES, MAX_CURVES + 5)


def test_chronicle_keeps_the_metrics_that_were_reported_last():
    story = Story().begin().start()
    for step in range(MAX_METRICS + 50):
        metrics = {"loss": 1.0, f"loss at {step}": 2.0}
        story.chronicle.take(Progress(step=step, total_steps=None, metrics=metrics, phase=""), at=story.now)

    names = list(story.facts.metrics)
    assert len(names) == MAX_METRICS
    assert names[-2:] == ["loss", f"loss at {MAX_METRICS + 49}"]


def test_chronicle_takes_a_metric_that_is_too_large_for_a_number():
    story = Story().begin().start()
    metrics = {"huge": 10**400, "low": -(10**400)}
    story.chronicle.take(Progress(step=1, total_steps=None, metrics=metrics, phase=""), at=story.now)

    assert story.facts.metrics == {"huge": "inf", "low": "-inf"}


def test_chronicle_keeps_the_newest_checkpoints_and_counts_all():
    story = Story().begin().start()
    for step in range(MAX_CHECKPOINTS + 7):
        story.save(step, stall=1.0, size=10)

    facts = story.facts
    assert (len(facts.checkpoints), facts.checkpoints[-1].step) == (MAX_CHECKPOINTS, MAX_CHECKPOINTS + 6)
    assert (facts.checkpoint_count, facts.checkpoint_bytes) == (57, 570)
    assert facts.checkpoint_stall_seconds == 57.0


def test_chronicle_keeps_since_when_a_phase_lasts_when_only_its_words_change():
    story = Story()
    story.chronicle.note_phase("Queued", "place 3", BEGIN, is_queue=True)
    story.chronicle.note_phase("Queued", "place 2", BEGIN + 9, is_queue=True)

    assert [(phase.at, phase.message) for phase in story.facts.phases] == [(BEGIN, "place 2")]


def test_chronicle_links_an_incident_by_its_number_in_the_run():
    story = Story().begin().start().incident(IncidentKind.FAILURE)
    story.incidents = 0  # the next gang counts its own
    story.incident(IncidentKind.FAILURE)
    story.chronicle.note_link(2, "http://here")

    assert [incident.url for incident in story.facts.incidents] == ["", "http://here"]


def test_chronicle_passes_over_messages_that_say_nothing_of_the_course():
    story = Story()
    story.chronicle.take(Notice(level=20, text="hello"), at=BEGIN + 5)

    assert story.facts == Story().facts


def test_chronicle_goes_on_from_what_was_written_down():
    whole, half = tell_troubled_run(), tell_troubled_run()
    half.chronicle = Chronicle.from_json(json.loads(json.dumps(half.chronicle.to_json())))

    assert half.facts == whole.facts
    assert half.wait(9).begin().start().facts.gangs[-1].rounds[0].lost_before == 100


def test_chronicle_document_has_every_field_of_the_facts():
    facts = tell_troubled_run().facts

    assert parse_facts(render_facts(facts)) == facts
    assert render_facts(facts).keys() == {field.name for field in fields(RunFacts)}


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        pytest.param(("title",), 3, "`chronicle.title` is 3, not a text", id="type"),
        pytest.param(("began_at",), True, "`chronicle.began_at` is True, not a number", id="bool"),
        pytest.param(("gangs", 0, "end"), "gone", "`chronicle.gangs[0].end` is 'gone', not", id="enum"),
        pytest.param(("gangs", 0, "rounds", 1, "nodes"), -1, "rounds[1].nodes` is -1", id="negative"),
        pytest.param(("gangs", 0, "rounds", 1, "more"), 1, "unknown field 'more'", id="unknown"),
        pytest.param(("curves", 0, "points", 0), [1], "points[0]` is [1], not a step", id="point"),
        pytest.param(("metrics", "loss"), [], "`chronicle.metrics.loss` is [], not a number", id="metric"),
    ],
)
def test_chronicle_refuses_a_document_with_a_wrong_field(path: tuple[Any, ...], value: object, words: str):
    body = tell_troubled_run().chronicle.to_json()
    place: Any = body
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value

    with pytest.raises(ValueError, match=re.escape(words)):
        Chronicle.from_json(body)


def test_chronicle_refuses_a_document_that_lacks_a_field():
    body = tell_troubled_run().chronicle.to_json()
    del body["gangs"][1]["places"]

    with pytest.raises(ValueError, match=r"`chronicle\.gangs\[1\]\.places` is missing"):
        Chronicle.from_json(body)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=300))
def test_curve_stays_short_and_in_order_and_ends_with_the_newest(steps: list[int]):
    builder = CurveBuilder(Curve(name="loss"))
    for step in steps:
        builder.add(step, float(step))

    kept = [step for step, _ in builder.curve().points]
    assert kept == sorted(set(kept))
    assert kept[-1] == steps[-1]
    assert len(kept) <= MAX_POINTS + 1


def test_curve_spreads_its_points_over_a_long_run():
    builder = CurveBuilder(Curve(name="loss"))
    for step in range(100_000):
        builder.add(step, 1.0)

    steps = [step for step, _ in builder.curve().points]
    gaps = [after - before for before, after in pairwise(steps)]
    assert (steps[0], steps[-1]) == (0, 99_999)
    assert len(steps) > MAX_POINTS / 3
    assert max(gaps) < 4 * sorted(gaps)[len(gaps) // 2]


def test_slow_ranks_are_those_far_above_the_median():
    ranks = [RankFacts(rank=k, node=0, steps=50, step_seconds=1.0 + 0.01 * k) for k in range(7)]
    slow = RankFacts(rank=7, node=1, steps=50, step_seconds=1.6)

    assert find_slow_ranks([*ranks, slow]) == [slow]
    assert find_slow_ranks(ranks) == []


def test_rank_that_the_others_wait_for_is_slow_though_all_take_equally_long():
    story = Story().begin().start()
    for look in (1, 2):
        for rank in (0, 1):
            offsets = [1_000_000 * step + 250_000 * rank for step in range(20)]
            story.steps = 20
            story.sample(20, rank=rank, arrivals=Arrivals(look=look, first=1, offsets_us=offsets))
    facts = story.facts
    assert [rank.rank for rank in find_slow_ranks(facts.ranks)] == [1]
    assert describe_slowness(facts.ranks[1]) == "the others wait for it 25% of a step"
    assert Chronicle.from_json(story.chronicle.to_json()).facts().ranks == facts.ranks
    story.start(1)
    assert find_slow_ranks(story.facts.ranks) == []  # of another round, of perhaps fewer ranks


def test_slow_ranks_are_not_named_after_a_few_steps():
    ranks = [RankFacts(rank=k, node=0, steps=5, step_seconds=1.0 + k) for k in range(4)]

    assert find_slow_ranks(ranks) == []
