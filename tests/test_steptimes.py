"""The histogram of step times: where times go, and what comes back."""

from __future__ import annotations

import random
import statistics

import pytest

from prefect_torch_elastic.steptimes import BUCKETS, bucket_of, quantile_seconds


def fill(times: list[float]) -> list[int]:
    counts = [0] * BUCKETS
    for seconds in times:
        counts[bucket_of(int(seconds * 1e9))] += 1
    return counts


def test_longer_times_go_to_later_buckets():
    buckets = [bucket_of(int(1.01**power * 1000)) for power in range(2500)]
    assert buckets == sorted(buckets)
    assert set(buckets) == set(range(BUCKETS))


@pytest.mark.parametrize(
    ("nanoseconds", "bucket"),
    [(-5, 0), (0, 0), (1, 0), (10**13, BUCKETS - 1), (2**63, BUCKETS - 1)],
    ids=["negative", "none", "tiny", "hours", "years"],
)
def test_time_out_of_range_goes_to_an_end(nanoseconds, bucket):
    assert bucket_of(nanoseconds) == bucket


@pytest.mark.parametrize("seconds", [0.0001, 0.001, 0.0173, 0.25, 1.0, 61.0, 1800.0])
def test_equal_steps_come_back_within_a_tenth(seconds):
    counts = fill([seconds] * 7)
    assert quantile_seconds(counts, 0.5) == pytest.approx(seconds, rel=0.1)
    assert quantile_seconds(counts, 0.95) == pytest.approx(seconds, rel=0.13)


def test_quantiles_of_many_steps_are_close_to_the_true_ones():
    source = random.Random(7)
    times = [source.lognormvariate(-3.0, 0.4) for _ in range(5000)]
    counts = fill(times)
    ordered = sorted(times)
    assert quantile_seconds(counts, 0.5) == pytest.approx(statistics.median(times), rel=0.04)
    assert quantile_seconds(counts, 0.95) == pytest.approx(ordered[4750], rel=0.04)


def test_no_steps_have_no_quantile():
    assert quantile_seconds([0] * BUCKETS, 0.5) == 0.0
