"""Who is waited for, told by when ranks come to their collectives: patterns as training makes them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest

from prefect_torch_elastic.arrivals import KEPT, Arrivals, Delays, find_delays, is_notable

Work = Callable[[int, int], float]  # seconds of a rank in a step


def even(rank: int, step: int) -> float:
    return 0.1


def slow_on(slow: int, extra: float = 0.05) -> Work:
    return lambda rank, step: 0.1 + (extra if rank == slow else 0.0)


def play(
    work: Work, *, ranks: int = 2, steps: int = 40, buckets: int = 4, skew: Mapping[int, float] | None = None
) -> dict[int, Arrivals]:
    """Return when ranks came to their collectives; they wait for each other in the last one of a step.

    Args:
        work: What a rank does before its first collective of a step.
        ranks: How many there are.
        steps: Of each.
        buckets: Collectives of a step.
        skew: By how much clocks are wrong, in seconds.
    """
    times: dict[int, list[float]] = {rank: [] for rank in range(ranks)}
    together = 0.0
    for step in range(steps):
        for rank, mine in times.items():
            mine += [together + work(rank, step) + 0.001 * bucket for bucket in range(buckets)]
        together = max(mine[-1] for mine in times.values())
    wrong = skew or {}
    return {
        rank: Arrivals(
            look=1,
            first=1 + max(0, len(mine) - KEPT),
            offsets_us=[round((at + wrong.get(rank, 0.0)) * 1e6) for at in mine[-KEPT:]],
        )
        for rank, mine in times.items()
    }


def look(arrivals: dict[int, Arrivals], *, step_seconds: float = 0.15) -> dict[int, float]:
    return find_delays(arrivals, step_seconds=step_seconds)


def find_waited_for(arrivals: dict[int, Arrivals], *, step_seconds: float = 0.15) -> list[int]:
    delays = look(arrivals, step_seconds=step_seconds)
    return [rank for rank, delay in delays.items() if is_notable(delay, delays)]


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("buckets", [1, 4], ids=["waits each time", "overlaps"])
def test_slow_rank_is_the_one_that_the_others_wait_for(ranks: int, buckets: int):
    arrivals = play(slow_on(1), ranks=ranks, buckets=buckets, steps=200)
    assert find_waited_for(arrivals) == [1]
    assert look(arrivals)[1] == pytest.approx(0.33, abs=0.05)


def test_ranks_that_are_equally_fast_wait_for_nobody():
    assert look(play(even)) == {0: 0.0, 1: 0.0}


@pytest.mark.parametrize("skew", [0.004, -0.004])
def test_clocks_that_differ_a_little_blame_nobody(skew: float):
    assert find_waited_for(play(even, skew={1: skew})) == []
    assert find_waited_for(play(slow_on(1), skew={0: skew})) == [1]


def test_ranks_that_take_turns_are_not_named():
    chance = random.Random(7)
    jitter = [[chance.random() * 0.08 for _ in range(60)] for _ in range(2)]
    assert find_waited_for(play(lambda rank, step: 0.1 + jitter[rank][step], steps=60)) == []


def test_evaluation_of_one_rank_now_and_then_is_no_slowness():
    arrivals = play(lambda rank, step: 3.0 if rank == 0 and step % 5 == 0 else 0.1, steps=40)
    assert find_waited_for(arrivals) == []


def test_looks_a_few_collectives_apart_are_compared_where_they_overlap():
    arrivals = play(slow_on(0))
    later = arrivals[1]
    arrivals[1] = Arrivals(look=1, first=later.first + 3, offsets_us=later.offsets_us[3:])
    assert find_waited_for(arrivals) == [0]


@pytest.mark.parametrize(
    "arrivals",
    [
        pytest.param({0: play(slow_on(0))[0]}, id="one rank"),
        pytest.param(play(slow_on(0), steps=5), id="too few"),
        pytest.param({rank: Arrivals(look=1, first=900 * rank) for rank in (0, 1)}, id="none at all"),
        pytest.param(
            {rank: Arrivals(look=1, first=99 * rank, offsets_us=[0] * 9) for rank in (0, 1)}, id="no overlap"
        ),
    ],
)
def test_nothing_is_said_where_too_little_is_known(arrivals: dict[int, Arrivals]):
    assert look(arrivals) == {}


def test_delay_counts_when_two_looks_show_it():
    delays, told = Delays(2), []
    for number, slow in [(1, 1), (2, 1), (3, 0)]:
        for rank, one in play(slow_on(slow)).items():
            seen = Arrivals(look=number, first=one.first, offsets_us=one.offsets_us)
            told.append(delays.see(rank, seen, step_seconds=0.15))
    assert [bool(one) for one in told] == [False, True, False, True, False, True]
    assert [told[1][1], told[5][0], told[5][1]] == [0.0, 0.0, 0.0]
    assert told[3] == {0: 0.0, 1: pytest.approx(0.33, abs=0.05)}


def test_nothing_is_said_of_a_gang_that_reports_no_steps():
    assert look(play(slow_on(0)), step_seconds=0.0) == {}


def test_delay_of_a_few_milliseconds_is_none():
    arrivals = play(lambda rank, step: 0.012 * (rank + 1))
    assert find_waited_for(arrivals, step_seconds=0.024) == []


def test_look_that_a_rank_missed_is_left_out():
    delays, arrivals = Delays(2), play(slow_on(1))
    late = Arrivals(look=2, first=1, offsets_us=arrivals[1].offsets_us)
    assert delays.see(0, arrivals[0], step_seconds=0.15) == {}
    assert delays.see(1, late, step_seconds=0.15) == {}
    assert delays.see(0, arrivals[0], step_seconds=0.15) == {}
