"""A gang's stalls on a virtual clock: what is only waited for, what is suspected, and what is proven."""

from __future__ import annotations

import math

import pytest

from prefect_torch_elastic.evidence import Category
from prefect_torch_elastic.hangwatch import Finding, HangWatch
from prefect_torch_elastic.observations import LastCollective, NodeSample, RankSample, RankSnapshot

STEP_SECONDS = 0.5
TO_VERDICT_SECONDS = 3 * STEP_SECONDS + 10


def stack(line: int, file: str = "train.py") -> str:
    return f'Current thread 0x1 (most recent call first):\n  File "/me/{file}", line {line} in load\n'


class Watched:
    """Two ranks, a clock, and the looks that the watch asks for.

    `calls` has, by rank, the number of its newest collective and whether it has ended; `lines` where it is.
    """

    def __init__(self, *, limit: float | None = None, world_size: int = 2) -> None:
        self.now, self.world_size = 100.0, world_size
        self.watch = HangWatch(world_size=world_size, limit_seconds=limit, now=self.now)
        self.calls = dict.fromkeys(range(world_size), (0, True))
        self.group = "0"
        self.operations = dict.fromkeys(range(world_size), "gloo:all_reduce")
        self.lines = dict.fromkeys(range(world_size), 10)
        self.facts: dict[int, dict[str, object]] = {rank: {} for rank in range(world_size)}
        self.gone = set[int]()
        self.moving = set[int]()
        self.writing = set[int]()
        self.steps = 0
        self.stepped_at = self.now
        self.looks = 0
        self.ended: list[float | None] = []
        self.missing = set[int]()
        self.silent = set[int]()
        self.blocked = set[int]()

    def train(self, steps: int = 5, *, longest: float = STEP_SECONDS) -> Watched:
        """Let all ranks finish steps."""
        for _ in range(steps):
            self.now += STEP_SECONDS
            self.steps += 1
        self.stepped_at = self.now
        self.tell(longest=longest)
        return self

    def tell(self, *, longest: float = STEP_SECONDS) -> None:
        known = {"step_seconds": STEP_SECONDS, "longest_seconds": longest} if self.steps > 1 else {}
        ranks = [
            RankSample(
                rank=rank,
                step=self.steps or None,
                steps=self.steps,
                idle_seconds=self.now - self.stepped_at,
                **{**known, **self.facts[rank]},  # pyright: ignore[reportArgumentType]
            )
            for rank in range(self.world_size)
        ]
        self.ended.append(self.watch.see(NodeSample(node=0, round=1, ranks=ranks), self.now))

    def wait(self, seconds: float) -> list[tuple[float, Finding]]:
        """Let time pass and answer each look; return what was found, with the seconds since the last step."""
        until, found = self.now + seconds, list[tuple[float, Finding]]()
        while (at := self.watch.next_look()) <= until:
            self.now = max(self.now, at)
            self.watch.asked(self.now)
            self.now += 0.3
            self.looks += 1
            if finding := self.watch.judge(self.snapshots(), self.now):
                found.append((self.now - self.stepped_at, finding))
                if finding.category:
                    return found
        self.now = max(self.now, until)
        return found

    def snapshots(self) -> list[RankSnapshot]:
        for rank in self.moving:
            self.lines[rank] += 1
        return [self.snapshot(rank) for rank in range(self.world_size) if rank not in self.missing]

    def snapshot(self, rank: int) -> RankSnapshot:
        number, done = self.calls[rank]
        newest = LastCollective(
            group=self.group, sequence=number, operation=self.operations[rank], is_done=done
        )
        file = "checkpoint/peers.py" if self.lines[rank] < 0 else "train.py"
        file = "torch/distributed/distributed_c10d.py" if rank in self.blocked else file
        return RankSnapshot(
            rank=rank,
            is_alive=rank not in self.gone,
            step=self.steps or None,
            idle_seconds=self.now - self.stepped_at,
            busy=str(self.facts[rank].get("busy", "")),
            stacks=stack(self.lines[rank], file),
            efforts={"7": [0.0, self.now * 1e6 * (rank in self.writing), 0.0]},
            collectives=[newest] if number and rank not in self.gone | self.silent else [],
            has_answered=rank not in self.silent,
        )

    def hold_up(self, rank: int = 1) -> Watched:
        """Let one rank stand still outside the collective that the others wait in."""
        self.calls = {
            other: (self.steps + (other != rank), other == rank) for other in range(self.world_size)
        }
        return self


def test_rank_that_stands_still_while_others_wait_is_proof_in_time():
    watched = Watched().train().hold_up()
    ((seconds, finding),) = watched.wait(60)
    assert (finding.category, finding.ranks, finding.waiting) == (Category.HANG, (1,), (0,))
    assert TO_VERDICT_SECONDS - 2 < seconds <= TO_VERDICT_SECONDS
    assert finding.sentence == (
        "rank 1 has not entered all_reduce #6, in which rank 0 waits; it is in `load` (train.py:10): "
        "no step for 11 s, where a step takes 0.5 s."
    )


def test_pause_of_all_ranks_is_nothing():
    watched = Watched().train()
    assert watched.wait(5) == []
    assert watched.train().wait(5) == []
    assert set(watched.ended) == {None}


def test_evaluation_of_all_ranks_is_suspected_once_and_never_proof():
    watched = Watched().train()
    watched.moving = {0, 1}
    ((_, finding),) = watched.wait(500)
    assert (finding.category, finding.ranks) == (None, ())
    assert finding.sentence == (
        "no step for 11 s, where a step takes 0.5 s; rank 0 is in `load` (train.py:13)."
    )


def test_evaluation_that_one_rank_ends_before_the_other_is_never_proof():
    watched = Watched().train()
    watched.moving = {0, 1}
    watched.wait(60)
    watched.moving = {1}
    assert watched.hold_up().wait(20) == []
    watched.train()
    assert watched.ended[-1] == pytest.approx(82.5)


def test_evaluation_of_one_rank_is_suspected_and_no_proof_while_its_stack_moves():
    watched = Watched().train().hold_up()
    watched.moving = {1}
    ((_, finding),) = watched.wait(300)
    assert (finding.category, finding.ranks) == (None, (1,))


def test_rank_that_writes_in_one_frame_is_no_proof_until_it_stops():
    watched = Watched().train().hold_up()
    watched.writing = {1}
    ((_, finding),) = watched.wait(300)
    assert (finding.category, finding.ranks) == (None, (1,))
    watched.writing = set()
    ((_, finding),) = watched.wait(150)
    assert (finding.category, finding.ranks) == (Category.HANG, (1,))


def test_rank_that_does_not_say_where_it_waits_is_not_blamed():
    # all are in one slow collective, and the thread of rank 1 that would say so is gone
    watched = Watched().train().hold_up()
    watched.silent, watched.blocked = {1}, {1}
    assert [finding.category for _, finding in watched.wait(300.0)] == [None]


def test_rank_that_cannot_answer_and_is_in_no_collective_is_blamed():
    watched = Watched().train().hold_up()
    watched.silent = {1}
    [(_, proof)] = [found for found in watched.wait(60.0) if found[1].category]
    assert (proof.category, proof.ranks) == (Category.HANG, (1,))


def test_ranks_that_pass_each_other_are_proof_after_half_a_minute():
    watched = Watched()
    watched.calls, watched.blocked = {0: (8, False), 1: (7, False)}, {0, 1}
    [(_, proof)] = [found for found in watched.wait(120.0) if found[1].category]
    assert (proof.category, proof.ranks) == (Category.COLLECTIVES_APART, (1,))
    assert watched.now - 100.0 >= 30.0


def test_rank_that_has_moved_in_this_stall_has_to_stand_still_for_longer():
    watched = Watched().train().hold_up()
    watched.moving = {1}
    watched.wait(20)
    watched.moving = set()
    ((seconds, finding),) = watched.wait(60)
    assert finding.category is Category.HANG
    assert 45 <= seconds < 60


def test_gang_that_was_suspected_for_nothing_gets_twice_that_time():
    watched = Watched().train()
    watched.moving = {0, 1}
    assert len(watched.wait(20)) == 1
    watched.train()
    assert watched.ended[-1]
    assert watched.wait(30) == []


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param({"phase": "evaluate"}, id="phase"),
        pytest.param({"busy": "save"}, id="save"),
        pytest.param({"busy": "load"}, id="load"),
    ],
)
def test_known_work_is_not_looked_at(facts):
    watched = Watched().train().hold_up()
    watched.facts[0] = facts
    watched.tell()
    assert watched.wait(5000) == []
    assert watched.looks == 0


def test_long_first_step_is_not_suspected():
    watched = Watched()
    watched.moving = {0, 1}
    assert watched.wait(1800) == []


def test_second_step_may_be_as_long_as_the_first():
    watched = Watched().train(steps=1)
    watched.moving = {0, 1}
    assert watched.wait(300) == []


def test_what_comes_after_the_last_step_is_not_suspected():
    watched = Watched().train()
    watched.facts = {rank: {"total_steps": 5} for rank in (0, 1)}
    watched.tell()
    watched.moving = {0, 1}
    assert watched.wait(1800) == []


def test_returned_rank_is_proof_while_another_one_waits_c069():
    watched = Watched()
    watched.calls = {0: (3, True), 1: (4, False)}
    watched.gone = {0}
    watched.watch.say_left(watched.now)
    ((seconds, finding),) = watched.wait(60)
    assert (finding.category, finding.ranks) == (Category.COLLECTIVES_APART, (0,))
    assert seconds < 10
    assert finding.sentence == (
        "rank 0 has returned already, and rank 1 waits in all_reduce #4, which will never end."
    )


def test_returned_rank_is_nothing_while_the_other_one_works():
    watched = Watched()
    watched.gone = {0}
    watched.watch.say_left(watched.now)
    assert watched.wait(1800) == []


@pytest.mark.parametrize("steps", [0, 5], ids=["silent", "reporting"])
def test_different_collectives_are_proof_with_and_without_reports(steps):
    watched = Watched().train(steps)
    watched.calls = {0: (7, False), 1: (7, False)}
    watched.operations[1] = "gloo:broadcast"
    ((seconds, finding),) = watched.wait(60)
    assert (finding.category, finding.ranks) == (Category.COLLECTIVES_APART, (1,))
    assert seconds <= (TO_VERDICT_SECONDS if steps else 20)


def test_wait_that_is_another_one_in_each_look_is_no_proof():
    watched = Watched()
    for number in range(2, 30):
        watched.calls = {0: (number, False), 1: (number - 1, False)}
        assert watched.wait(5) == []


def test_evidence_of_some_ranks_alone_proves_nothing():
    watched = Watched(world_size=3).train().hold_up()
    watched.missing = {2}
    assert [finding.category for _, finding in watched.wait(60)] == [None]


def test_gang_in_which_a_rank_stands_still_is_ended_after_ten_minutes():
    watched = Watched().train()
    watched.moving = {0}
    *_, (seconds, finding) = watched.wait(2000)
    assert finding.category is Category.HANG
    assert 600 <= seconds < 640
    assert "longer than `progress_timeout_seconds=600`" in finding.sentence


def test_gang_in_which_all_ranks_move_is_suspected_once_and_not_ended_by_the_default_limit():
    watched = Watched().train()
    watched.moving = {0, 1}
    ((_, finding),) = watched.wait(5000)
    assert finding.category is None


def test_rank_that_stands_still_for_a_part_of_the_stall_is_no_sign_yet():
    watched = Watched().train()
    watched.moving = {0, 1}
    watched.wait(300)
    watched.moving = {0}
    ((seconds, _),) = watched.wait(2000)
    assert 880 <= seconds < 940


def test_default_limit_proves_nothing_without_the_evidence_of_all_ranks():
    watched = Watched().train()
    watched.missing = {1}
    assert [finding.category for _, finding in watched.wait(2000)] == [None]


def test_answer_that_is_missing_once_does_not_make_a_rank_move():
    watched = Watched().train()
    watched.wait(100)
    watched.missing = {0, 1}
    watched.wait(10)
    watched.missing = set()
    ((seconds, finding),) = watched.wait(2000)
    assert finding.category is Category.HANG
    assert 600 <= seconds < 640


def test_queue_of_nccl_is_suspected_and_is_proof_at_the_limit_only():
    watched = Watched().train()
    watched.operations = dict.fromkeys(range(2), "nccl:all_reduce")
    watched.calls = {0: (8, False), 1: (7, False)}
    (_, suspected), (seconds, finding) = watched.wait(2000)
    assert (suspected.category, finding.category, finding.ranks) == (None, Category.HANG, (1,))
    assert 600 <= seconds < 640


def test_returned_rank_is_blamed_for_a_group_in_which_it_was_seen_at_an_earlier_look():
    watched = Watched()
    watched.group = "5"
    watched.calls = {0: (3, True), 1: (3, True)}
    watched.wait(12)
    assert watched.looks == 1
    watched.calls[1], watched.gone = (4, False), {0}
    watched.watch.say_left(watched.now)
    ((_, finding),) = watched.wait(60)
    assert (finding.category, finding.ranks) == (Category.COLLECTIVES_APART, (0,))


def test_gang_with_long_gaps_is_given_five_of_them():
    watched = Watched().train(longest=200.0)
    *_, (seconds, _) = watched.wait(2000)
    assert 1000 <= seconds < 1040


def test_limit_of_the_user_is_kept():
    watched = Watched(limit=20).train()
    watched.moving = {0, 1}
    *_, (seconds, finding) = watched.wait(2000)
    assert 20 <= seconds < 26
    assert "`progress_timeout_seconds=20`" in finding.sentence


def test_save_beyond_the_limit_of_the_user_names_the_rank_that_does_not_wait_for_others():
    watched = Watched(limit=8).train()
    watched.facts = {rank: {"busy": "save"} for rank in (0, 1)}
    watched.tell()
    watched.lines[0] = -1  # in the meeting
    ((seconds, finding),) = watched.wait(60)
    assert (finding.category, finding.ranks, finding.waiting) == (Category.STUCK_SAVE, (1,), (0,))
    assert 8 <= seconds < 10
    assert finding.sentence == (
        "rank 1 has been in a save of a checkpoint for 8 s, longer than `progress_timeout_seconds=8`; "
        "it is in `load` (train.py:10)."
    )


def test_phase_is_never_ended():
    watched = Watched(limit=8).train()
    watched.facts[1] = {"phase": "evaluate"}
    watched.tell()
    assert watched.watch.next_look() == math.inf


def test_silent_gang_in_one_collective_is_ended_after_the_limit():
    watched = Watched()
    watched.calls = {0: (5, False), 1: (5, False)}
    (suspected, _), (seconds, finding) = watched.wait(2000)
    assert 60 <= suspected < 80
    assert 580 <= seconds < 640
    assert finding.category is Category.HANG
    assert finding.sentence.startswith("all ranks wait in all_reduce #5 for")


def test_silent_gang_that_waits_for_a_busy_rank_goes_on():
    watched = Watched().hold_up()
    watched.calls = {0: (5, False), 1: (4, True)}
    watched.moving = {1}
    assert watched.wait(2000) == []


def test_silent_gang_that_does_not_communicate_goes_on():
    assert Watched(limit=8).wait(2000) == []


def test_lone_rank_without_reports_is_not_looked_at():
    watched = Watched(world_size=1)
    assert watched.watch.next_look() == math.inf
