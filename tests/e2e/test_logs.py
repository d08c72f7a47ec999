"""What ranks say: every line with its rank and level in the task run's log, all of it in files."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prefect import get_run_logger

from prefect_torch_elastic import GangFailed, elastic_task, get_context

if TYPE_CHECKING:
    from tests.e2e.conftest import LiveFlow

ReadLogs = Callable[..., Any]


def said(lines: Any, text: str) -> list[tuple[str, int]]:
    """Return message and level of the lines that contain `text`."""
    return [(line.message, line.level) for line in lines if text in line.message]


def log_files(store: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(store.rglob("rank-*.log"))}


def test_lines_of_ranks_reach_the_task_run_with_rank_and_level_c032(
    in_flow: LiveFlow, read_logs: ReadLogs, tmp_path: Path
):
    @elastic_task(nproc_per_node=2, log_prints=True, store=str(tmp_path / "store"))
    def train():
        import sys
        import warnings

        from prefect.logging import get_run_logger as the_same

        rank = get_context().rank
        get_run_logger().info("epoch %s of rank %s", 1, rank)
        the_same().debug("nobody asked for this")
        print("loss", 0.5, rank)
        sys.stderr.write(f"stderr of {rank}\n")
        os.write(1, f"native output of {rank}\n".encode())
        logging.getLogger("mylib").warning("slow disk at %s\nand its second line", rank)
        logging.getLogger("mylib").error("bad sector at %s", rank)
        logging.getLogger("mylib").info("fine detail of %s", rank)
        warnings.warn(f"deprecated on {rank}", stacklevel=1)
        print(f"no end of line on {rank}", end="")

    before = set(os.listdir(tempfile.gettempdir()))
    state = in_flow(lambda: train(return_state=True))
    assert state.is_completed(), state.message
    lines = read_logs(state, has="no end of line on 0")
    info, warning, error = logging.INFO, logging.WARNING, logging.ERROR
    assert said(lines, "epoch 1 of rank") == [("[rank 0] task - epoch 1 of rank 0", info)]
    assert said(lines, "loss 0.5") == [("[rank 0] loss 0.5 0", info)]
    assert said(lines, "stderr of") == [("[rank 0] stderr of 0", info)]
    assert said(lines, "native output") == [("[rank 0] native output of 0", info)]
    assert said(lines, "fine detail") == [("[rank 0] mylib - fine detail of 0", info)]
    assert said(lines, "no end of line") == [("[rank 0] no end of line on 0", info)]
    assert said(lines, "nobody asked") == []
    for text, level in (
        ("slow disk at", warning),
        ("bad sector at", error),
        ("UserWarning: deprecated on", warning),
    ):
        found = said(lines, text)
        assert sorted(message[: len("[rank 0]")] for message, _ in found) == ["[rank 0]", "[rank 1]"]
        assert {got for _, got in found} == {level}
    assert {level for _, level in said(lines, "and its second line")} == {warning}

    files = log_files(tmp_path / "store")
    assert list(files) == ["rank-0.log", "rank-1.log"]
    for rank in (0, 1):
        text = files[f"rank-{rank}.log"]
        for expected in (f"loss 0.5 {rank}", f"epoch 1 of rank {rank}", f"native output of {rank}"):
            assert expected in text
    folder = next((tmp_path / "store").rglob("rank-0.log")).parent.parent
    assert said(lines, str(folder))
    assert set(os.listdir(tempfile.gettempdir())) == before


@pytest.mark.parametrize(
    ("leader", "others", "expected"),
    [
        ("INFO", "INFO", {"[rank 0] hello", "[rank 1] hello", "[rank 0] mylib - oh", "[rank 1] mylib - oh"}),
        ("WARNING", "ERROR", {"[rank 0] mylib - oh"}),
    ],
    ids=["more", "less"],
)
def test_levels_that_go_up_are_settable_c032(
    in_flow: LiveFlow, read_logs: ReadLogs, leader: str, others: str, expected: set[str]
):
    @elastic_task(nproc_per_node=2, log_level_leader=leader, log_level_all_ranks=others)
    def train():
        print("hello")
        logging.getLogger("mylib").warning("oh")

    state = in_flow(lambda: train(return_state=True))
    lines = read_logs(state, has="mylib - oh")
    assert {line.message for line in lines if line.message.startswith("[rank")} == expected


def test_last_lines_before_a_kill_are_there_c032(in_flow: LiveFlow, read_logs: ReadLogs):
    @elastic_task(nproc_per_node=2, max_restarts=0)
    def train():
        if get_context().rank == 0:
            print("my last words")
            os.write(2, b"and native ones")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    state = in_flow(lambda: train(return_state=True))
    assert isinstance(state.result(raise_on_failure=False), GangFailed)
    lines = read_logs(state, has="native ones")
    assert said(lines, "my last words")
    assert said(lines, "native ones")


def test_traceback_of_a_failed_rank_is_not_written_line_by_line_c032(in_flow: LiveFlow, read_logs: ReadLogs):
    """It is part of the error, which Prefect logs."""

    @elastic_task(nproc_per_node=2, max_restarts=0)
    def train():
        raise ValueError("said once")

    state = in_flow(lambda: train(return_state=True))
    lines = read_logs(state, has="Finished in state")
    assert len([line for line in lines if line.message.endswith("ValueError: said once")]) <= 1


def test_log_file_goes_on_over_restarts_c032(in_flow: LiveFlow, tmp_path: Path):
    @elastic_task(nproc_per_node=1, max_restarts=1, retries=1, store=str(tmp_path / "store"), run_key="k")
    def train():
        context = get_context()
        print(f"attempt {context.attempt}, restart {context.restart_count}")
        raise RuntimeError

    in_flow(lambda: train(return_state=True))
    files = sorted((tmp_path / "store").rglob("rank-0.log"))
    assert [str(path.relative_to(tmp_path / "store")) for path in files] == [
        f"k/attempts/{number:04}/node-0/rank-0.log" for number in (1, 2)
    ]
    for number, path in enumerate(files, start=1):
        lines = [line for line in path.read_text().splitlines() if line.startswith("attempt")]
        assert lines == [f"attempt {number}, restart {restart}" for restart in (0, 1)]


@pytest.mark.parametrize("rank", [0, 1])
def test_flood_of_lines_stalls_nobody_c032(in_flow: LiveFlow, read_logs: ReadLogs, tmp_path: Path, rank: int):
    count = 200_000

    @elastic_task(nproc_per_node=2, store=str(tmp_path / "store"), log_level_all_ranks="INFO")
    def train():
        started = time.monotonic()
        if get_context().rank == rank:
            for number in range(count):
                print(f"line {number} of a flood that nobody can read")
        else:
            print("a quiet word")
        return time.monotonic() - started

    started = time.monotonic()
    state = in_flow(lambda: train(return_state=True))
    assert state.is_completed()
    assert time.monotonic() - started < 40
    lines = read_logs(state, has="cut here")
    sent = said(lines, "of a flood")
    assert 100 < len(sent) < 5000
    cut = said(lines, "cut here")
    assert cut
    assert {level for _, level in cut} == {logging.WARNING}
    assert f"rank-{rank}.log" in cut[-1][0]
    assert said(lines, "a quiet word")
    text = log_files(tmp_path / "store")[f"rank-{rank}.log"]
    assert text.count("\n") == count
    assert f"line {count - 1} " in text


def test_cut_lines_are_counted_c032(in_flow: LiveFlow, read_logs: ReadLogs, tmp_path: Path):
    @elastic_task(nproc_per_node=1, store=str(tmp_path / "store"))
    def train():
        for number in range(2000):
            print("x", number)

    state = in_flow(lambda: train(return_state=True))
    lines = read_logs(state, has="cut here")
    numbers = [int(message.split("… ")[1].split(" lines")[0]) for message, _ in said(lines, "cut here")]
    sent = [line for line in lines if line.message.startswith("[rank 0] x ")]
    assert sum(numbers) + len(sent) == 2000


def test_odd_output_does_no_harm_c032(in_flow: LiveFlow, read_logs: ReadLogs):
    @elastic_task(nproc_per_node=1)
    def train():
        os.write(1, b"\xff\xfe not text\n")
        os.write(1, b"a\0b\n")
        print("y" * 100_000)
        print("\r10%\r20%\r100% done")
        print("%s and {braces}")
        print("after all of it")

    state = in_flow(lambda: train(return_state=True))
    assert state.is_completed()
    lines = read_logs(state, has="after all of it")
    assert said(lines, "not text")
    assert said(lines, "%s and {braces}")
    assert said(lines, "100% done")
    assert max(len(line.message) for line in lines) < 10_000


def test_progress_of_rank_0_reaches_the_log(in_flow: LiveFlow, read_logs: ReadLogs):
    @elastic_task(nproc_per_node=2)
    def train():
        context = get_context()
        for step in range(5):
            context.report({"loss": 0.25}, step=step + 1, total_steps=5)

    state = in_flow(lambda: train(return_state=True))
    lines = read_logs(state, has="step 5/5")
    assert said(lines, "step 5/5 · loss 0.25")


def test_first_line_says_the_product_of_the_budgets(in_flow: LiveFlow, read_logs: ReadLogs):
    @elastic_task(nproc_per_node=1, max_restarts=2, max_attempts=2, retries=1)
    def train():
        pass

    lines = read_logs(in_flow(lambda: train(return_state=True)), has="starts at most")
    assert "at most 12 times" in lines[0].message


def test_fields_without_meaning_here_are_named_in_one_warning(in_flow: LiveFlow, read_logs: ReadLogs):
    @elastic_task(nproc_per_node=1, queue="gpu", image="train:1", labels={"team": "ml"})
    def train():
        pass

    lines = read_logs(in_flow(lambda: train(return_state=True)), has="`image`")
    (warning,) = [line.message for line in lines if line.level == logging.WARNING]
    assert all(f"`{name}`" in warning for name in ("queue", "image", "labels"))
