"""One line format for all that a rank says, and the way back from a line to its level."""

from __future__ import annotations

import io
import logging
import sys
import warnings

import pytest

from prefect_torch_elastic.node import ranklog
from prefect_torch_elastic.node.ranklog import parse_line


@pytest.fixture
def written(monkeypatch):
    """The stream that this process logs to, as a rank does."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    ranklog.start_logging(stream)
    yield stream
    logging.captureWarnings(False)
    root.handlers[:], root.level = handlers, level


def parse(text: str) -> list[tuple[int, str]]:
    """Parse lines as the agent does: each knows the level of the one before."""
    found: list[tuple[int, str]] = []
    for line in text.splitlines():
        found.append(parse_line(line, found[-1][0] if found else logging.INFO))
    return found


@pytest.mark.parametrize(
    ("line", "level", "text"),
    [
        pytest.param("loss 0.5", logging.INFO, "loss 0.5", id="print"),
        pytest.param("", logging.INFO, "", id="empty"),
        pytest.param("12:34:56.789 | WARNING | lib - slow", logging.WARNING, "lib - slow", id="logging"),
        pytest.param("12:34:56.789 | INFO    | lib - a | b", logging.INFO, "lib - a | b", id="padded"),
        pytest.param("12:34:56.789 | CRITICAL | lib - x", logging.CRITICAL, "lib - x", id="critical"),
        pytest.param("12:34:56.789 | NOTICE  | lib - x", logging.INFO, "lib - x", id="unknown-level"),
        pytest.param("12:34:56 | WARNING | x", logging.INFO, "12:34:56 | WARNING | x", id="not-quite"),
    ],
)
def test_line_has_a_level(line, level, text):
    assert parse_line(line, logging.ERROR) == (level, text)


@pytest.mark.parametrize(
    ("line", "level"),
    [
        pytest.param("[W1129 18:31:00.123456789 socket.cpp:752] retry", logging.WARNING, id="torch-cpp"),
        pytest.param("[rank1]:[W1129 18:31:00.1 ProcessGroupNCCL.cpp:1] x", logging.WARNING, id="torch-rank"),
        pytest.param(
            "[rank0]:E1129 18:31:00.123000 99 torch/_dynamo.py:1] x", logging.ERROR, id="torch-python"
        ),
        pytest.param("W1129 18:31:00.123000 99 torch/run.py:1] x", logging.WARNING, id="glog"),
        pytest.param("I1129 18:31:00.123456 99 file.cc:12] x", logging.INFO, id="glog-info"),
        pytest.param("F1129 18:31:00.123456 99 file.cc:12] x", logging.CRITICAL, id="glog-fatal"),
        pytest.param("W1129 is the number of the ticket", logging.INFO, id="no-time"),
        pytest.param("E2024 18 o'clock", logging.INFO, id="no-time-either"),
    ],
)
def test_line_of_native_code_has_its_level_and_stays_whole(line, level):
    assert parse_line(line, logging.INFO) == (level, line)


def test_records_are_read_back_with_their_levels_c032(written):
    logging.getLogger("mylib").warning("slow disk: %s", "sda")
    logging.getLogger("mylib.deep").info("epoch 1")
    logging.getLogger().error("bad")
    assert parse(written.getvalue()) == [
        (logging.WARNING, "mylib - slow disk: sda"),
        (logging.INFO, "mylib.deep - epoch 1"),
        (logging.ERROR, "root - bad"),
    ]


def test_every_line_of_a_record_has_the_records_level_c032(written):
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("mylib").exception("it failed")
    print("and a print", file=written)
    lines = parse(written.getvalue())
    assert lines[0] == (logging.ERROR, "mylib - it failed")
    assert lines[1] == (logging.ERROR, "Traceback (most recent call last):")
    assert lines[-3:] == [
        (logging.ERROR, "ValueError: two"),
        (logging.ERROR, "lines"),
        (logging.INFO, "and a print"),
    ]


def test_debug_records_are_not_written(written):
    logging.getLogger("mylib").debug("detail")
    assert written.getvalue() == ""


def test_python_warning_is_a_warning(written):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old option", DeprecationWarning, stacklevel=1)
    level, text = parse(written.getvalue())[0]
    assert level == logging.WARNING
    assert "DeprecationWarning: old option" in text


def test_logging_of_a_rank_starts_anew_without_the_servers_handlers(written):
    logging.getLogger().addHandler(logging.StreamHandler(written))
    ranklog.start_logging(written)
    logging.getLogger().warning("once")
    assert written.getvalue().count("once") == 1


# ---------------------------------------------------------------- get_run_logger


def test_get_run_logger_works_without_a_run_when_the_rank_imports_prefect_c032(run_script):
    result = run_script(
        """
import sys
from prefect_torch_elastic.node import ranklog
ranklog.start_logging(sys.stdout)
ranklog.patch_get_run_logger()
ranklog.patch_get_run_logger()
assert "prefect" not in sys.modules
from prefect import get_run_logger
get_run_logger().warning("epoch 1")
from prefect.logging import get_run_logger
get_run_logger().info("epoch 2")
from prefect.logging.loggers import get_run_logger
get_run_logger(None, name="x").error("epoch 3")
"""
    )
    assert result.rc == 0, result.stderr
    assert parse(result.stdout) == [
        (logging.WARNING, "task - epoch 1"),
        (logging.INFO, "task - epoch 2"),
        (logging.ERROR, "task - epoch 3"),
    ]


def test_get_run_logger_works_when_prefect_was_loaded_before_c032(run_script):
    result = run_script(
        """
import sys
import prefect.main
from prefect import get_run_logger as early
from prefect_torch_elastic.node import ranklog
ranklog.start_logging(sys.stdout)
ranklog.patch_get_run_logger()
import prefect, prefect.logging
prefect.logging.get_run_logger().warning("one")
prefect.get_run_logger().warning("two")
"""
    )
    assert result.rc == 0, result.stderr
    assert parse(result.stdout) == [(logging.WARNING, "task - one"), (logging.WARNING, "task - two")]


def test_importing_the_room_changes_no_import():
    assert not any(isinstance(finder, ranklog._PatchOnImport) for finder in sys.meta_path)
