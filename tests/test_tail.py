"""The end of a log as it grows: what goes up, what is cut, and that the last words are never lost."""

from __future__ import annotations

import logging

import pytest

from prefect_torch_elastic.node import tail
from prefect_torch_elastic.node.tail import LogTail

INFO, WARNING = logging.INFO, logging.WARNING


class Clock:
    """Stands still until a test moves it."""

    seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(tail, "time", clock)
    return clock


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "rank-0.log"
    path.touch()
    return path


def append(log, text: str) -> None:
    with log.open("a") as file:
        file.write(text)


def record(level: str, text: str) -> str:
    return f"12:34:56.789 | {level:7} | {text}\n"


def texts(lines) -> list[str]:
    return [text for _, text in lines]


def test_new_lines_are_returned_once(log):
    reader = LogTail(log, level=INFO)
    append(log, "one\ntwo\n")
    assert reader.read() == [(INFO, "one"), (INFO, "two")]
    assert reader.read() == []
    append(log, "three\n")
    assert reader.read() == [(INFO, "three")]


def test_line_goes_up_when_it_is_whole(log):
    reader = LogTail(log, level=INFO)
    append(log, "lo")
    assert reader.read() == []
    append(log, "ss 0.5\nnex")
    assert reader.read() == [(INFO, "loss 0.5")]
    assert reader.finish() == [(INFO, "nex")]


def test_character_that_was_written_in_two_pieces_is_whole(log):
    reader = LogTail(log, level=INFO)
    with log.open("ab") as file:
        file.write("ü".encode()[:1])
        file.flush()
        assert reader.read() == []
        file.write("ü".encode()[1:] + b"\n\xff\n")
    assert texts(reader.read()) == ["ü", "\N{REPLACEMENT CHARACTER}"]


def test_lines_below_the_level_stay_in_the_file_c032(log):
    reader = LogTail(log, level=WARNING)
    append(log, "a print\n" + record("INFO", "lib - epoch") + record("WARNING", "lib - slow"))
    assert reader.read() == [(WARNING, "lib - slow")]


def test_lines_of_one_record_go_up_together_over_two_reads(log):
    reader = LogTail(log, level=WARNING)
    append(log, record("ERROR", "lib - failed"))
    assert reader.read() == [(logging.ERROR, "lib - failed")]
    append(log, "    | ValueError: x\nplain\n")
    assert reader.read() == [(logging.ERROR, "ValueError: x")]


def test_empty_lines_do_not_go_up(log):
    reader = LogTail(log, level=INFO)
    append(log, "\n  \none\n")
    assert texts(reader.read()) == ["one"]


def test_log_that_is_not_there_has_no_lines(tmp_path):
    reader = LogTail(tmp_path / "missing", level=INFO)
    assert (reader.read(), reader.finish(), reader.last_lines()) == ([], [], [])


# ---------------------------------------------------------------- floods


def test_flood_is_cut_and_counted(log, clock):
    reader = LogTail(log, level=INFO)
    append(log, "".join(f"line {number}\n" for number in range(1000)))
    assert texts(reader.read()) == [f"line {number}" for number in range(tail.BURST_LINES)]
    assert reader.finish() == [(WARNING, f"… 600 lines cut here; all of it is in {log}")]


def test_note_of_a_cut_stands_where_the_lines_are_missing(log, clock):
    reader = LogTail(log, level=INFO)
    append(log, "x\n" * (tail.BURST_LINES + 7))
    reader.read()
    clock.seconds += 1.0
    append(log, "after\n")
    assert texts(reader.read()) == [f"… 7 lines cut here; all of it is in {log}", "after"]


def test_lines_go_up_at_a_steady_rate_after_a_flood(log, clock):
    reader = LogTail(log, level=INFO)
    append(log, "x\n" * tail.BURST_LINES)
    reader.read()
    clock.seconds += 2.0
    append(log, "y\n" * 1000)
    assert texts(reader.read()).count("y") == 2 * tail.LINES_PER_SECOND
    clock.seconds += 1e6
    append(log, "z\n" * 1000)
    assert texts(reader.read()).count("z") == tail.BURST_LINES


def test_lines_below_the_level_use_up_no_budget(log, clock):
    reader = LogTail(log, level=WARNING)
    append(log, "a print\n" * 5000 + record("WARNING", "lib - slow"))
    assert texts(reader.read()) == ["lib - slow"]


def test_backlog_that_nobody_can_read_is_skipped_and_counted(log, clock):
    reader = LogTail(log, level=WARNING)
    append(log, "x" * 99 + "\n")
    append(log, ("y" * 99 + "\n") * 60_000)
    append(log, record("WARNING", "lib - newest"))
    assert texts(reader.read()) == [f"… 5 MiB cut here; all of it is in {log}", "lib - newest"]


def test_huge_line_is_shortened_and_says_so(log, clock):
    reader = LogTail(log, level=INFO)
    append(log, "x" * 100_000 + "\nnext\n")
    first, second = texts(reader.read())
    assert first == "x" * tail.LINE_CHARACTERS + "… (96000 more characters)"
    assert second == "next"


def test_huge_line_without_an_end_does_not_fill_the_memory(log, clock):
    reader = LogTail(log, level=INFO)
    for _ in range(20):  # a progress bar that never ends its line
        append(log, "=" * 3000)
        assert all(len(text) <= tail.LINE_CHARACTERS + 40 for text in texts(reader.read()))
        assert len(reader._partial) <= tail.LINE_CHARACTERS


# ---------------------------------------------------------------- the end


def test_last_lines_before_a_kill_go_up_c032(log, clock):
    reader = LogTail(log, level=INFO)
    reader.read()
    append(log, "step 41\nstep 42, and th")
    assert texts(reader.finish()) == ["step 41", "step 42, and th"]


def test_warning_behind_much_that_stays_below_the_level_goes_up_c032(log, clock):
    reader = LogTail(log, level=WARNING)
    append(log, ("a print\n" * 150_000) * 2 + record("ERROR", "lib - last words"))
    assert log.stat().st_size > 2 * tail._READ_BYTES
    assert texts(reader.finish()) == ["lib - last words"]


def test_failure_report_has_the_last_lines(log):
    reader = LogTail(log, level=WARNING)
    append(log, "".join(f"line {number}\n" for number in range(1000)) + "cut of")
    lines = reader.last_lines()
    assert lines[-2:] == ["line 999", "cut of"]
    assert len(lines) == tail.LAST_LINES


def test_failure_report_of_huge_lines_is_bounded(log):
    reader = LogTail(log, level=WARNING)
    append(log, "x" * 10**6 + "\nend\n")
    lines = reader.last_lines()
    assert lines[-1] == "end"
    assert all(len(line) <= tail.LINE_CHARACTERS for line in lines)


def test_restarted_rank_begins_where_its_round_begins(log):
    append(log, record("ERROR", "lib - of the round before") + "Traceback of the round before\n")
    reader = LogTail(log, level=INFO, start=log.stat().st_size)
    append(log, "new round\n")
    assert texts(reader.read()) == ["new round"]
    assert reader.last_lines() == ["new round"]
