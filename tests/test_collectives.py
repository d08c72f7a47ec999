"""Who waits for whom, from the newest collectives of all ranks."""

from __future__ import annotations

import pytest

from prefect_torch_elastic.collectives import (
    Split,
    SplitKind,
    describe_common_wait,
    find_split,
    list_memberships,
    name_ranks,
)
from prefect_torch_elastic.observations import LastCollective, RankSnapshot
from prefect_torch_elastic.stacks import find_place, group_stacks, read_main_thread
from prefect_torch_elastic.standstill import is_same_place

# Written by faulthandler of Python 3.11, the thread that took the signal first.
SLEEPING = """Current thread 0x00007f7d0f1f9b80 (most recent call first):
  File "/usr/lib/python3.11/random.py", line 10 in pick
  File "/home/me/train.py", line 12 in load
  File "/home/me/train.py", line 40 in train

Thread 0x00007f7d0e6a56c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in run
"""
BLOCKED = """Current thread 0x00007f7d0f1f9b80 (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3190 in all_reduce
  File "/home/me/train.py", line 44 in train
"""
# Written by py-spy 0.4.
SPY = """Process 71: python -m prefect_torch_elastic.node
Python v3.11.7 (/usr/bin/python3.11)

Thread 80 (active): "pump"
    run (threading.py:982)
Thread 71 (idle): "MainThread"
    wait (/usr/lib/python3.11/threading.py:327)
    take_lock (/home/me/train.py:31)
"""


def calls(
    sequence: int,
    operation: str = "all_reduce",
    *,
    done: bool = False,
    group: str = "0",
    sizes: str = "",
    backend: str = "gloo",
) -> LastCollective:
    return LastCollective(
        group=group, sequence=sequence, operation=f"{backend}:{operation}", is_done=done, sizes=sizes
    )


def rank(number: int, *collectives: LastCollective, alive: bool = True, **facts) -> RankSnapshot:
    return RankSnapshot(rank=number, is_alive=alive, collectives=list(collectives), **facts)


def split(*snapshots: RankSnapshot) -> Split:
    found = find_split(snapshots)
    assert found
    return found


def test_rank_that_has_not_entered_the_collective_is_behind():
    found = split(rank(0, calls(31)), rank(1, calls(30, done=True), stacks=SLEEPING), rank(2, calls(31)))
    assert (found.kind, found.ranks, found.waiting) == (SplitKind.BEHIND, (1,), (0, 2))
    assert found.sentence == (
        "rank 1 has not entered all_reduce #31, in which ranks 0 and 2 wait; it is in `load` (train.py:12)"
    )
    assert not found.is_final


def test_rank_without_any_collective_is_behind_in_the_group_of_all_ranks():
    found = split(rank(0, calls(1)), rank(1))
    assert (found.kind, found.ranks) == (SplitKind.BEHIND, (1,))


def test_rank_without_any_collective_is_no_member_of_another_group():
    assert find_split([rank(0, calls(1, group="5")), rank(1, calls(1, group="5")), rank(2)]) is None


@pytest.mark.parametrize(
    "snapshots",
    [
        pytest.param([], id="nobody"),
        pytest.param([rank(0), rank(1)], id="no-collectives"),
        pytest.param([rank(0, calls(3, done=True)), rank(1, calls(2, done=True))], id="nobody-waits"),
        pytest.param([rank(0, calls(3)), rank(1, calls(3))], id="all-in-the-same"),
        pytest.param([rank(0, calls(3, done=True)), rank(1, calls(3))], id="one-is-out-already"),
        pytest.param([rank(0, calls(3)), rank(1, calls(4, done=True))], id="one-is-late-to-leave"),
        pytest.param([rank(0, calls(9, "send")), rank(1, calls(4, "recv"))], id="point-to-point"),
    ],
)
def test_ranks_that_work_together_are_not_apart(snapshots):
    assert find_split(snapshots) is None


def test_culprit_is_found_behind_a_chain_of_waiting_ranks():
    # Ranks 0 and 2 share a group, 2 and 3 another: 0 waits for 2, which waits for 3.
    found = split(
        rank(0, calls(10, group="dp0")),
        rank(1, calls(10, group="dp1")),
        rank(2, calls(9, done=True, group="dp0"), calls(5, group="tp")),
        rank(3, calls(9, done=True, group="dp1"), calls(4, done=True, group="tp")),
    )
    assert (found.kind, found.ranks, found.waiting) == (SplitKind.BEHIND, (3,), (1, 2))


def test_returned_rank_is_named_when_the_others_wait_for_it_c069():
    found = split(rank(0, alive=False), rank(1, calls(4)))
    assert (found.kind, found.ranks, found.waiting) == (SplitKind.LEFT, (0,), (1,))
    assert (
        found.sentence
        == "rank 0 has returned already, and rank 1 waits in all_reduce #4, which will never end"
    )
    assert found.is_final


def test_returned_rank_is_not_blamed_for_a_group_that_it_may_not_belong_to():
    found = split(rank(0, alive=False), rank(1, calls(4, group="2")), rank(2, calls(3, done=True, group="2")))
    assert (found.kind, found.ranks) == (SplitKind.BEHIND, (2,))


def test_returned_rank_is_blamed_for_another_group_only_if_it_was_seen_there():
    snapshots = [rank(0, alive=False), rank(1, calls(4, group="2"))]
    assert find_split(snapshots) is None
    assert find_split(snapshots, memberships=list_memberships([rank(0, calls(9, group="3"))])) is None
    found = find_split(snapshots, memberships=list_memberships([rank(0, calls(3, group="2"))]))
    assert found
    assert (found.kind, found.ranks, found.waiting) == (SplitKind.LEFT, (0,), (1,))


def test_returned_rank_is_not_blamed_while_a_third_one_has_not_come_yet():
    # it has sent its part of the gather, and the one that computes is what the others wait for
    found = split(rank(0, calls(4, "gather")), rank(1, alive=False), rank(2, calls(3, done=True)))
    assert (found.kind, found.ranks, found.waiting) == (SplitKind.BEHIND, (2,), (0,))


@pytest.mark.parametrize("name", ["0", "default_pg", "0 (default_pg)"])
def test_group_of_all_ranks_is_known_by_each_of_its_names(name):
    found = split(rank(0, alive=False), rank(1, calls(4, group=name)))
    assert "wait in all_reduce #4," in found.sentence.replace("waits", "wait")


def test_different_operations_at_one_number_are_final_and_the_odd_one_is_named():
    found = split(rank(0, calls(7)), rank(1, calls(7)), rank(2, calls(7, "broadcast")))
    assert (found.kind, found.ranks, found.waiting) == (SplitKind.DIFFERENT, (2,), (0, 1))
    assert "rank 2 called broadcast as number 7" in found.sentence
    assert "ranks 0 and 1 called all_reduce" in found.sentence
    assert found.is_final


def test_of_two_different_operations_the_one_that_rank_0_did_not_call_is_odd():
    assert split(rank(0, calls(7)), rank(1, calls(7, "barrier"))).ranks == (1,)


def test_different_counts_in_one_all_reduce_are_final():
    found = split(rank(0, calls(7, sizes="[[3]]")), rank(1, calls(7, sizes="[[2, 2]]")))
    assert (found.kind, found.ranks) == (SplitKind.DIFFERENT, (1,))
    assert "rank 1 called all_reduce of 4 elements as number 7" in found.sentence


def test_shapes_of_one_all_reduce_may_differ():
    assert find_split([rank(0, calls(7, sizes="[[4]]")), rank(1, calls(7, sizes="[[2, 2]]"))]) is None


def test_shapes_of_a_scatter_may_differ():
    assert find_split([rank(0, calls(7, "scatter", sizes="[[3]]")), rank(1, calls(7, "scatter"))]) is None


def test_rank_that_waits_in_a_collective_that_the_others_have_left_is_named():
    found = split(rank(0, calls(8), stacks=BLOCKED), rank(1, calls(7), stacks=BLOCKED))
    assert found.is_final
    assert (found.kind, found.ranks, found.waiting) == (SplitKind.PASSED, (1,), (0,))
    assert found.sentence == (
        "rank 1 waits in all_reduce #7, which rank 0 already left: it waits in all_reduce #8"
    )


def test_ranks_that_wait_for_each_other_in_two_groups_are_named_both():
    found = split(
        rank(0, calls(4, group="a"), calls(6, done=True, group="b"), stacks=BLOCKED),
        rank(1, calls(3, done=True, group="a"), calls(7, group="b"), stacks=BLOCKED),
    )
    assert (found.kind, found.ranks, found.is_final) == (SplitKind.CROSSED, (0, 1), True)
    assert "all_reduce #4 of process group a" in found.sentence


@pytest.mark.parametrize(
    "snapshots",
    [
        pytest.param([rank(0, calls(8, backend="nccl")), rank(1, calls(7, backend="nccl"))], id="passed"),
        pytest.param(
            [rank(0, calls(8), stacks=SLEEPING), rank(1, calls(7), stacks=BLOCKED)], id="async, passed"
        ),
        pytest.param(
            [
                rank(0, calls(2, group="a"), calls(1, done=True, group="b"), stacks=SLEEPING),
                rank(1, calls(1, done=True, group="a"), calls(2, group="b"), stacks=SLEEPING),
            ],
            id="async, crossed",
        ),
        pytest.param(
            [
                rank(0, calls(4, group="a", backend="nccl"), calls(6, done=True, group="b", backend="nccl")),
                rank(1, calls(3, done=True, group="a", backend="nccl"), calls(7, group="b", backend="nccl")),
            ],
            id="crossed",
        ),
    ],
)
def test_collectives_that_are_only_started_are_never_final(snapshots):
    found = split(*snapshots)
    assert found.kind in (SplitKind.PASSED, SplitKind.CROSSED)
    assert not found.is_final


def test_order_of_two_queues_is_told_without_claiming_that_a_rank_waits():
    found = split(rank(0, calls(8, backend="nccl")), rank(1, calls(7, backend="nccl")))
    assert found.sentence == (
        "rank 1 has called nothing after all_reduce #7, and rank 0 waits in all_reduce #8"
    )


def test_numbers_of_two_backends_in_one_group_are_not_compared():
    done = calls(5, done=True, backend="nccl")
    assert find_split([rank(0, calls(9), done), rank(1, calls(9), done)]) is None
    assert find_split([rank(0, calls(5, "barrier"), done), rank(1, calls(5, "barrier"), done)]) is None


def test_marks_tell_the_same_wait_from_a_later_one():
    one, same, later = (split(rank(0, calls(n)), rank(1, calls(n - 1, done=True))) for n in (3, 3, 4))
    assert one.mark == same.mark != later.mark


def test_wait_of_all_ranks_is_told():
    assert describe_common_wait([rank(0, calls(5)), rank(1, calls(5))]) == "all ranks wait in all_reduce #5"
    assert describe_common_wait([rank(0, calls(5)), rank(1, calls(5, done=True))]) == ""


def test_rank_with_the_same_frames_stands_where_it_stood():
    later = SLEEPING.replace("0x00007f7d0f1f9b80", "0x00007f7d0f1f9b81").replace("line 982", "line 990")
    assert is_same_place(rank(0, stacks=SLEEPING), rank(0, stacks=later))


@pytest.mark.parametrize(
    "later",
    [
        pytest.param(rank(0, stacks=SLEEPING.replace("line 12", "line 13")), id="other-frame"),
        pytest.param(rank(0, stacks=SLEEPING, step=2), id="other-step"),
        pytest.param(rank(0, calls(1), stacks=SLEEPING), id="other-collective"),
        pytest.param(rank(0), id="no-stack"),
    ],
)
def test_rank_that_did_something_has_moved(later):
    assert not is_same_place(rank(0, stacks=SLEEPING), later)


EFFORTS = {"70": [9.0, 1e6, 300.0], "71": [50.0, 1e6, 10.0]}


@pytest.mark.parametrize(
    "now",
    [
        pytest.param({**EFFORTS, "70": [9.6, 1e6, 300.0]}, id="computed"),
        pytest.param({"70": [9.6, 1e6, 300.0]}, id="computed-while-a-child-went-away"),
        pytest.param({**EFFORTS, "71": [50.0, 1.2e6, 10.0]}, id="child-read"),
        pytest.param({**EFFORTS, "70": [9.0, 1e6, 321.0]}, id="slept-often"),
        pytest.param({**EFFORTS, "72": [0.6, 0.0, 1000.0]}, id="new-child-computed"),
    ],
)
def test_rank_that_works_in_one_frame_has_moved(now):
    assert not is_same_place(rank(0, stacks=SLEEPING, efforts=EFFORTS), rank(0, stacks=SLEEPING, efforts=now))


def test_rank_that_waits_for_a_disk_has_moved():
    assert not is_same_place(rank(0, stacks=SLEEPING), rank(0, stacks=SLEEPING, is_in_disk=True))


def test_what_a_look_costs_is_no_movement():
    one = rank(0, stacks=SLEEPING, efforts=EFFORTS, look_bytes=500_000)
    now = {"70": [9.1, 1.52e6, 305.0], "72": [0.0, 0.0, 99.0]}
    assert is_same_place(one, rank(0, stacks=SLEEPING, efforts=now))


def test_many_ranks_are_named_in_short():
    assert name_ranks([1]) == "rank 1"
    assert name_ranks([1, 3, 5]) == "ranks 1, 3 and 5"
    assert name_ranks(range(64)) == "ranks 0, 1, 2 ... (64 ranks)"


@pytest.mark.parametrize(
    ("stacks", "place"),
    [
        pytest.param(SLEEPING, "`load` (train.py:12)", id="faulthandler"),
        pytest.param(SPY, "`take_lock` (train.py:31)", id="py-spy"),
        pytest.param("", "", id="nothing"),
    ],
)
def test_place_is_the_innermost_frame_of_the_user(stacks, place):
    assert find_place(stacks) == place


def test_main_thread_is_the_first_or_the_one_named_so():
    assert "train.py" in read_main_thread(SLEEPING)
    assert "982" not in read_main_thread(SLEEPING) + read_main_thread(SPY)


def test_equal_stacks_are_grouped():
    same = SLEEPING.replace("0x00007f7d0f1f9b80", "0x1")
    assert group_stacks({0: SLEEPING, 1: SPY, 2: same, 3: ""}) == [([0, 2], SLEEPING), ([1], SPY)]
