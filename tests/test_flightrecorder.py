"""What a rank writes down about its collectives when its agent asks."""

from __future__ import annotations

import json
import os
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from prefect_torch_elastic import compat
from prefect_torch_elastic.arrivals import KEPT, Arrivals
from prefect_torch_elastic.node import flightrecorder
from prefect_torch_elastic.rankstate import RankState

USER = {"name": "train", "filename": "/home/me/train.py", "line": 12}
TORCH = {
    "name": "all_reduce",
    "filename": "/x/torch/distributed/distributed_c10d.py",
    "line": 3,
}
OURS = {"name": "meet", "filename": f"{flightrecorder._OURS}checkpoint/peers.py", "line": 5}


def entry(number: int, *, group: str = "0", named: str = "default_pg", **changed: Any) -> dict[str, Any]:
    """As torch 2.13 records one."""
    return {
        "frames": [TORCH, USER],
        "process_group": (group, named),
        "collective_seq_id": number,
        "profiling_name": "gloo:all_reduce",
        "input_sizes": [[4, 2]],
        "state": "scheduled",
        "retired": True,
        "is_p2p": False,
        **changed,
    }


def test_last_collective_of_each_group_is_found():
    entries = [entry(1), entry(1, group="1", named="undefined"), entry(2), entry(3, retired=False)]
    main, other = flightrecorder.find_last(entries)
    assert (main.group, main.sequence, main.operation) == ("0 (default_pg)", 3, "gloo:all_reduce")
    assert (main.sizes, main.frames) == ("[[4, 2]]", ["train (/home/me/train.py:12)"])
    assert (other.group, other.sequence, other.is_done) == ("1", 1, True)
    assert not main.is_done


def test_state_of_nccl_says_that_a_collective_is_done():
    (last,) = flightrecorder.find_last([entry(1, retired=False, state="completed")])
    assert last.is_done


def test_two_backends_of_one_group_have_numbers_of_their_own():
    nccl = [entry(number, profiling_name="nccl:all_reduce") for number in range(60)]
    gloo, last = flightrecorder.find_last([entry(2), *nccl])
    assert [(one.group, one.operation, one.sequence) for one in (gloo, last)] == [
        ("0 (default_pg)", "gloo:all_reduce", 2),
        ("0 (default_pg)", "nccl:all_reduce", 59),
    ]
    assert len(flightrecorder.keep_newest([entry(2), *nccl])) == 51


def test_sends_between_two_ranks_are_no_collectives():
    (last,) = flightrecorder.find_last([entry(4), entry(4, is_p2p=True, profiling_name="gloo:send")])
    assert last.operation == "gloo:all_reduce"


def test_nothing_recorded_is_no_collective():
    assert flightrecorder.find_last([]) == []
    assert flightrecorder.keep_newest([]) == []


def test_newest_entries_of_each_group_are_kept_in_their_order():
    entries = [entry(number) for number in range(200)] + [entry(1, group="1")]
    kept = flightrecorder.keep_newest(entries)
    assert [one["collective_seq_id"] for one in kept] == [*range(150, 200), 1]


def test_frames_are_the_users_or_all_if_there_are_none():
    assert flightrecorder.render_frames([TORCH, OURS, USER, USER]) == ["train (/home/me/train.py:12)"] * 2
    assert flightrecorder.render_frames([TORCH])[0].startswith("all_reduce (")
    assert len(flightrecorder.render_frames([USER] * 30)) == 5


# ---------------------------------------------------------------- the thread


@pytest.fixture
def rank(tmp_path):
    """A listening rank: `ask(number)` returns what it wrote."""
    ours, theirs = socket.socketpair()
    ours.settimeout(10.0)
    page = RankState.create_file("test")
    state = RankState(page)
    os.close(page)
    flightrecorder.start_listening(theirs.fileno(), str(tmp_path / "rank-0"), state)
    (thread,) = [one for one in threading.enumerate() if one.name == "evidence"]

    def ask(number: int) -> dict[str, Any]:
        ours.sendall(f"{number}\n".encode())
        assert ours.recv(100) == f"evidence {number}\n".encode()
        return json.loads((tmp_path / "rank-0.collectives.json").read_text())

    yield SimpleNamespace(ask=ask, state=state, socket=ours, thread=thread, folder=tmp_path)
    ours.close()
    thread.join(10.0)
    assert not thread.is_alive(), "it ends with the agent"
    theirs.close()
    state.close()


def test_listener_writes_what_was_recorded(rank, monkeypatch):
    monkeypatch.setattr(compat, "read_flight_recorder", lambda: [entry(1), entry(2)])
    written = rank.ask(7)
    assert (written["number"], len(written["entries"])) == (7, 2)
    assert written["last"][0]["sequence"] == 2
    assert [path.name for path in rank.folder.iterdir()] == ["rank-0.collectives.json"]


def test_listener_answers_each_time(rank, monkeypatch):
    monkeypatch.setattr(compat, "read_flight_recorder", list)
    assert [rank.ask(number)["number"] for number in (1, 2, 0)] == [1, 2, 0]


def test_recorder_that_cannot_be_read_is_told_and_harms_nobody(rank, monkeypatch):
    def fail() -> Any:
        raise KeyError("entries")

    monkeypatch.setattr(compat, "read_flight_recorder", fail)
    written = rank.ask(1)
    assert (written["last"], written["problem"]) == ([], "KeyError: 'entries'")


def test_disk_that_is_away_does_not_end_the_listener(rank, monkeypatch):
    monkeypatch.setattr(compat, "read_flight_recorder", list)
    (rank.folder / "rank-0.collectives.tmp").mkdir()
    rank.socket.sendall(b"1\n")
    assert rank.socket.recv(100) == b"evidence 1\n"
    (rank.folder / "rank-0.collectives.tmp").rmdir()
    assert rank.ask(2)["number"] == 2


def test_memory_of_gpus_is_noted_with_each_answer(rank, monkeypatch):
    cuda = SimpleNamespace(
        is_initialized=lambda: True, device_count=lambda: 2, max_memory_reserved=lambda device: 100 + device
    )
    monkeypatch.setitem(flightrecorder.sys.modules, "torch.cuda", cuda)
    monkeypatch.setattr(compat, "read_flight_recorder", list)
    rank.ask(1)
    rank.ask(2)  # the first one is through by then
    assert rank.state.read_all().gpu_memory_bytes == 201


# ---------------------------------------------------------------- arrivals


def arrive(number: int, at: float, **changed: Any) -> dict[str, Any]:
    return entry(number, time_created_ns=round(at * 1e9), **changed)


def test_arrivals_are_those_of_the_group_of_all_ranks():
    entries = [
        arrive(1, 95.0),
        arrive(4, 99.0),
        arrive(5, 99.5, profiling_name="gloo:broadcast"),
        arrive(9, 99.6, group="1", named="undefined"),
        arrive(5, 99.7, is_p2p=True),
        arrive(80, 99.1, profiling_name="nccl:all_reduce"),
    ]
    found = flightrecorder.find_arrivals(entries, look=5)
    assert found == Arrivals(look=5, first=4, offsets_us=[-1_000_000, -500_000])


def test_arrivals_are_a_few_of_many():
    entries = [arrive(number, number / 10) for number in range(1, 2001)]
    found = flightrecorder.find_arrivals(entries, look=10)
    assert found is not None
    assert (found.first, len(found.offsets_us), found.offsets_us[-1]) == (2001 - KEPT, KEPT, 0)


def test_rank_without_collectives_has_no_arrivals():
    assert flightrecorder.find_arrivals([], look=5) is None
    assert flightrecorder.find_arrivals([arrive(1, 99.0, is_p2p=True)], look=5) is None


def test_group_that_was_made_again_counts_from_one():
    entries = [arrive(number, 90 + number) for number in range(1, 6)]
    entries += [arrive(1, 97.0), arrive(2, 98.0, retired=False)]
    (last,) = flightrecorder.find_last(entries)
    assert (last.sequence, last.is_done) == (2, False)
    assert flightrecorder.find_arrivals(entries, look=5) == Arrivals(
        look=5, first=1, offsets_us=[-3_000_000, -2_000_000]
    )
