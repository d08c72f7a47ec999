"""When the ranks ask each other next, and when a save is due."""

from __future__ import annotations

import pytest

from prefect_torch_elastic.checkpoint.schedule import VOTE_SECONDS, SaveClock, next_vote


@pytest.mark.parametrize(
    ("steps", "seconds", "distance"),
    [
        pytest.param(0, 1.0, 1, id="no step yet"),
        pytest.param(10, 0.0, 1, id="no time has passed"),
        pytest.param(1, 30.0, 1, id="slow steps"),
        pytest.param(10, 1.0, 10, id="a second away"),
        pytest.param(2, 0.001, 4, id="a few quick steps do not decide about many"),
        pytest.param(40, 0.1, 50, id="at most fifty"),
        pytest.param(10_000, 0.5, 50, id="at most fifty of very quick ones"),
    ],
)
def test_next_vote_is_a_second_away_and_fifty_steps_at_most(
    steps: int, seconds: float, distance: int
) -> None:
    assert next_vote(1000, steps_since=steps, seconds_since=seconds) == 1000 + distance


def test_votes_of_even_steps_come_about_once_a_second() -> None:
    step, since, seconds_per_step, votes = 0, 0, 0.04, 0
    while step < 1000:
        upcoming = next_vote(step, steps_since=since, seconds_since=since * seconds_per_step)
        step, since, votes = upcoming, upcoming - step, votes + 1
    assert votes <= 1000 * seconds_per_step / VOTE_SECONDS + 10


def test_save_clock_lets_a_save_be_tried_until_one_was_measured() -> None:
    clock = SaveClock()
    assert clock.fits(0.0)
    clock.add(10.0)
    assert clock.fits(13.0)
    assert not clock.fits(11.0)
