"""How ranks agree: whoever is missing, lost or broken is named on every rank, in time, and the rest go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from prefect_torch_elastic.checkpoint import peers as peers_room
from prefect_torch_elastic.checkpoint.manifest import DamagedError
from prefect_torch_elastic.checkpoint.peers import Board, Peers, StoreBoard, Word
from prefect_torch_elastic.errors import (
    CheckpointError,
    CheckpointMismatch,
    NonRetryable,
    ObjectMissing,
    StopTraining,
    StoreError,
    Superseded,
)

MEETING_SECONDS = 0.4
ANSWER_SECONDS = 0.4


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_room, "_ANSWER_SECONDS", ANSWER_SECONDS)


class DictBoard:
    """A board that the threads of one process share."""

    def __init__(self) -> None:
        self.words: dict[str, Any] = {}
        self._changed = threading.Condition()

    def post(self, key: str, word: Word) -> None:
        with self._changed:
            self.words[key] = dict(word)
            self._changed.notify_all()

    def read(self, keys: Sequence[str], *, timeout_seconds: float) -> list[Any] | None:
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self.words for key in keys), timeout_seconds):
                return None
            return [self.words[key] for key in keys]

    def missing(self, keys: Sequence[str]) -> list[str]:
        with self._changed:
            return [key for key in keys if key not in self.words]

    def remove(self, key: str) -> None:
        with self._changed:
            self.words.pop(key, None)


def seat(board: Board, size: int, *, timeout_seconds: float = MEETING_SECONDS) -> list[Peers]:
    return [
        Peers(rank=rank, world_size=size, board=board, timeout_seconds=timeout_seconds)
        for rank in range(size)
    ]


def run_ranks(*calls: Callable[[], Any]) -> list[Any]:
    """Run one call per rank at the same time, and return what each returned or raised."""

    def run(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as error:  # noqa: BLE001  (it is what the test looks at)
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def meeting(
    peers: Peers, purpose: str = "save(step=10)", *, say: Callable[[], Word] | None = None, decide: Any = None
) -> Callable[[], dict[str, Any]]:
    return lambda: peers.meet(
        purpose,
        say or (lambda: {"rank": peers.rank}),
        decide or (lambda words: {"ranks": [word["rank"] for word in words]}),
    )


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise error

    return call


@pytest.mark.parametrize("size", [1, 2, 5], ids=lambda size: f"{size} ranks")
def test_meeting_gives_all_ranks_the_answer_of_rank_0(size: int) -> None:
    board = DictBoard()
    ranks = seat(board, size)
    for _ in range(3):
        assert run_ranks(*map(meeting, ranks)) == [{"ranks": list(range(size))}] * size


def test_meeting_gives_each_rank_its_own_answer() -> None:
    ranks = seat(DictBoard(), 3)
    answers = run_ranks(
        *(meeting(peers, decide=lambda words: [{"you": word["rank"]} for word in words]) for peers in ranks)
    )
    assert answers == [{"you": 0}, {"you": 1}, {"you": 2}]


def test_meetings_leave_no_more_words_than_one_of_them_has() -> None:
    board = DictBoard()
    ranks = seat(board, 3)
    sizes: list[int] = []
    for _ in range(20):
        run_ranks(*map(meeting, ranks))
        sizes.append(len(board.words))
    assert max(sizes) <= 2 * 3
    assert sizes[-1] == sizes[0]


def test_meeting_of_one_rank_needs_no_board() -> None:
    peers = Peers(rank=0, world_size=1, board=None, timeout_seconds=1.0)
    assert meeting(peers)() == {"ranks": [0]}
    with pytest.raises(StoreError, match="away"):
        meeting(peers, say=raising(StoreError("away")))()


@pytest.mark.parametrize("lost", [(1,), (2,), (1, 3)], ids=["rank 1", "rank 2", "ranks 1 and 3"])
def test_meeting_names_the_ranks_that_did_not_come_on_every_rank(lost: tuple[int, ...]) -> None:
    ranks = [peers for peers in seat(DictBoard(), 4) if peers.rank not in lost]
    started = time.monotonic()
    results = run_ranks(*map(meeting, ranks))
    assert time.monotonic() - started < MEETING_SECONDS + ANSWER_SECONDS
    names = ", ".join(f"rank {rank}" for rank in lost)
    for result in results:
        assert type(result) is CheckpointError
        assert f"rank 0 called save(step=10), and {names} did not within" in str(result)
        assert "if rank == 0:" in str(result)


def test_meeting_names_a_few_of_many_missing_ranks() -> None:
    first = Peers(rank=0, world_size=1000, board=DictBoard(), timeout_seconds=0.01)
    (failure,) = run_ranks(meeting(first))
    assert "rank 7, rank 8 and 991 more did not within" in str(failure)


def test_meeting_names_rank_0_when_it_did_not_come() -> None:
    _, *others = seat(DictBoard(), 3)
    started = time.monotonic()
    results = run_ranks(*map(meeting, others))
    assert MEETING_SECONDS <= time.monotonic() - started < 20.0  # it waits, and not for ever
    for rank, result in enumerate(results, start=1):
        assert type(result) is CheckpointError
        assert f"rank {rank} called save(step=10), and rank 0 did not within" in str(result)


def test_meeting_tells_a_late_rank_at_once_that_the_others_have_gone() -> None:
    first, late = seat(DictBoard(), 2)
    (failure,) = run_ranks(meeting(first))
    assert "rank 1 did not within" in str(failure)
    started = time.monotonic()
    (told,) = run_ranks(meeting(late))
    assert time.monotonic() - started < MEETING_SECONDS / 2
    assert type(told) is CheckpointError
    assert "rank 1 did not within" in str(told)
    assert run_ranks(meeting(first), meeting(late)) == [{"ranks": [0, 1]}] * 2  # in step again


@pytest.mark.parametrize("stranger", [0, 1, 2], ids=lambda rank: f"rank {rank}")
def test_meeting_names_the_rank_that_came_for_something_else_t18(stranger: int) -> None:
    ranks = seat(DictBoard(), 3)
    results = run_ranks(
        *(meeting(peers, f"save(step={20 if peers.rank == stranger else 10})") for peers in ranks)
    )
    for result in results:
        assert type(result) is CheckpointError
        assert "save(step=10)" in str(result)
        assert "save(step=20)" in str(result)
        assert f"{f'rank {stranger}' if stranger else 'ranks 1, 2'} called save" in str(result)
        assert "same order" in str(result)
    assert run_ranks(*map(meeting, ranks)) == [{"ranks": [0, 1, 2]}] * 3


KINDS = [
    pytest.param(StoreError("away"), StoreError, id="store"),
    pytest.param(ObjectMissing("gone"), StoreError, id="a kind of store error"),
    pytest.param(CheckpointError("broken"), CheckpointError, id="checkpoint"),
    pytest.param(DamagedError("flipped"), CheckpointError, id="a kind of checkpoint error"),
    pytest.param(CheckpointMismatch("other shape"), CheckpointMismatch, id="mismatch"),
    pytest.param(Superseded("newer gang"), Superseded, id="superseded"),
    pytest.param(OSError(28, "No space left on device"), CheckpointError, id="anything else"),
]


@pytest.mark.parametrize(("error", "kind"), KINDS)
@pytest.mark.parametrize("failing", [0, 1, 2], ids=lambda rank: f"rank {rank}")
def test_meeting_raises_the_error_of_one_rank_on_all_c059(
    error: Exception, kind: type[Exception], failing: int
) -> None:
    ranks = seat(DictBoard(), 3)
    decided: list[Any] = []
    started = time.monotonic()
    results = run_ranks(
        *(
            meeting(peers, say=raising(error) if peers.rank == failing else None, decide=decided.append)
            for peers in ranks
        )
    )
    assert time.monotonic() - started < MEETING_SECONDS
    assert results[failing] is error  # with its own traceback
    for rank, result in enumerate(results):
        if rank != failing:
            assert type(result) is kind
            assert str(result).startswith(f"rank {failing}: ")
            assert str(error) in str(result)
            assert isinstance(result, NonRetryable) == isinstance(error, NonRetryable)
    assert not decided
    assert run_ranks(*map(meeting, ranks)) == [{"ranks": [0, 1, 2]}] * 3


@pytest.mark.parametrize(("error", "kind"), KINDS)
def test_meeting_raises_what_rank_0_could_not_decide_on_all(error: Exception, kind: type[Exception]) -> None:
    ranks = seat(DictBoard(), 3)
    results = run_ranks(*(meeting(peers, decide=raising(error)) for peers in ranks))
    assert results[0] is error
    for result in results[1:]:
        assert type(result) is kind
        assert str(result).startswith("rank 0: ")
    assert run_ranks(*map(meeting, ranks)) == [{"ranks": [0, 1, 2]}] * 3


def test_meeting_with_two_failing_ranks_gives_each_its_own_error() -> None:
    ranks = seat(DictBoard(), 3)
    errors = {0: None, 1: StoreError("one"), 2: StoreError("two")}
    results = run_ranks(
        *(meeting(peers, say=raising(error) if (error := errors[peers.rank]) else None) for peers in ranks)
    )
    assert str(results[0]) == "rank 1: one"
    assert results[1:] == [errors[1], errors[2]]


def test_meeting_lets_a_stop_through_and_names_the_rank_that_left() -> None:
    ranks = seat(DictBoard(), 2)
    stop = StopTraining("stopped")
    results = run_ranks(meeting(ranks[0]), meeting(ranks[1], say=raising(stop)))
    assert results[1] is stop
    assert "rank 1 did not within" in str(results[0])


def test_meeting_does_not_mix_up_rounds_when_ranks_are_of_unequal_speed() -> None:
    ranks = seat(DictBoard(), 3, timeout_seconds=5.0)

    def go(peers: Peers) -> list[Any]:
        answers: list[Any] = []
        for number in range(30):
            time.sleep(0.003 * ((number + peers.rank) % 3))
            answers.append(
                peers.meet(
                    f"round {number}",
                    lambda number=number: {"value": number * 10 + peers.rank},
                    lambda words: {"sum": sum(word["value"] for word in words)},
                )["sum"]
            )
        return answers

    wanted = [30 * number + 3 for number in range(30)]
    assert run_ranks(*(lambda peers=peers: go(peers) for peers in ranks)) == [wanted] * 3


# ------------------------------------------------------------ the real store


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    from torch._C._distributed_c10d import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield server.host, server.port
    del server  # not before: it ends with its last reference


def test_store_board_carries_meetings_and_keeps_them_apart_from_the_training(
    address: tuple[str, int],
) -> None:
    from torch._C._distributed_c10d import TCPStore

    ranks = [
        Peers(rank=rank, world_size=3, board=StoreBoard.connect(*address), timeout_seconds=5.0)
        for rank in range(3)
    ]
    for _ in range(5):
        assert run_ranks(*map(meeting, ranks)) == [{"ranks": [0, 1, 2]}] * 3
    training = TCPStore(*address, is_master=False, wait_for_workers=False)
    assert not training.check(["word/1/1"])
    assert training.num_keys() <= 8  # two answers, and torch's own


def test_store_board_gives_up_in_time_and_names_the_missing(address: tuple[str, int]) -> None:
    first, second, _ = [
        Peers(rank=rank, world_size=3, board=StoreBoard.connect(*address), timeout_seconds=1.2)
        for rank in range(3)
    ]
    started = time.monotonic()
    results = run_ranks(meeting(first), meeting(second))
    assert 1.2 <= time.monotonic() - started < 1.2 + ANSWER_SECONDS + 1.0
    for result in results:
        assert type(result) is CheckpointError
        assert "and rank 2 did not within 1 s" in str(result)


def test_store_board_reads_removes_and_misses(address: tuple[str, int]) -> None:
    board = StoreBoard.connect(*address)
    assert board.read(["a"], timeout_seconds=0.0) is None
    assert board.missing(["a", "b"]) == ["a", "b"]
    board.post("b", {"text": "é", "number": 2, "none": None, "list": [1, [2.5]]})
    assert board.missing(["a", "b"]) == ["a"]
    assert board.read(["b"], timeout_seconds=1.0) == [
        {"text": "é", "number": 2, "none": None, "list": [1, [2.5]]}
    ]
    assert board.read(["b", "a"], timeout_seconds=0.1) is None
    board.remove("b")
    board.remove("never there")
    assert board.missing(["b"]) == ["b"]


def test_store_board_carries_the_plan_of_a_large_model(address: tuple[str, int]) -> None:
    board = StoreBoard.connect(*address)
    plan = [
        [f"model/layer.{index}.weight", [0, 0], [4096, 4096], "bfloat16", [4096, 4096], True]
        for index in range(5000)
    ]
    board.post("plan", {"plan": plan})
    assert board.read(["plan"], timeout_seconds=5.0) == [{"plan": plan}]
