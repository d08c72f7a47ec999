"""When the stacks of a rank are whole: the main thread is written last."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest

from prefect_torch_elastic.node import stackdump
from prefect_torch_elastic.node.stackdump import StackDump

OTHER = 'Thread 0x2 (most recent call first):\n  File "threading.py", line 1002 in _bootstrap\n'
MAIN = 'Thread 0x1 (most recent call first):\n  File "train.py", line 3 in step\n'


class Rank:
    """A rank that writes when the test does."""

    pid = os.getpid()

    def __init__(self, folder: Path) -> None:
        self.prefix, self.dump_start, self.sent = folder / "rank-0", -1, list[int]()
        self.stacks = folder / "rank-0.stacks"

    def send(self, number: int) -> None:
        self.sent.append(number)

    def write(self, text: str) -> None:
        with self.stacks.open("a") as file:
            file.write(text)


@pytest.fixture
def rank(tmp_path):
    return Rank(tmp_path)


def dump(rank: Rank) -> StackDump:
    return StackDump(cast("Any", rank))


def test_stacks_are_whole_when_the_main_thread_is_there(rank):
    asked = dump(rank)
    assert not asked.is_complete()
    rank.write(OTHER)
    assert not asked.is_complete(), "a rank may be held up between two threads"
    rank.write(MAIN + '  File "<frozen runpy>", line 198 in _run_module_as_main\n')
    assert asked.is_complete()


@pytest.mark.parametrize("end", ['  File "run.py", line 1 in <module>\n', "  ...\n"], ids=["script", "deep"])
def test_outermost_frame_of_a_script_or_of_a_very_deep_stack_is_an_end_too(rank, end):
    asked = dump(rank)
    rank.write(OTHER + MAIN + end)
    assert asked.is_complete()


def test_stacks_without_a_known_end_are_whole_when_they_stand_still(rank, monkeypatch):
    asked = dump(rank)
    rank.write(OTHER)
    assert not asked.is_complete()
    monkeypatch.setattr(stackdump, "_STILL_SECONDS", -1.0)
    assert asked.is_complete()


def test_stacks_of_an_earlier_request_are_not_taken_for_new_ones(rank):
    rank.write(f'{MAIN}  File "run.py", line 1 in <module>\n')
    asked = dump(rank)
    assert not asked.is_complete()
    assert rank.dump_start == rank.stacks.stat().st_size


def test_process_that_does_not_handle_the_signal_is_not_sent_it(rank):
    dump(rank)  # this process has no handler
    assert rank.sent == []
