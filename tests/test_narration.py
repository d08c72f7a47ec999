"""The narrator: what of a gang's progress reaches the log of its task run."""

from pathlib import Path
from typing import Any

import pytest

from prefect_torch_elastic.narration import LINE_CHARACTERS, PROGRESS_SECONDS, Narrator
from prefect_torch_elastic.spec import Spec
from prefect_torch_elastic.wire import Progress, RankInfo, RanksStarted


class Log:
    """A logger that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, text: str, *values: Any) -> None:
        self.lines.append(text % values)


class Gang:
    """A gang that tells a narrator what it does, on a clock that only tests move."""

    def __init__(self) -> None:
        self.now, self.log = 100.0, Log()
        self._narrate = Narrator(self.log, Spec(), folder=Path("/run"), clock=lambda: self.now)

    def start(self, *, restart_count: int) -> None:
        rank = RankInfo(rank=0, local_rank=0, node_rank=0, pid=1, log="")
        self._narrate(
            RanksStarted(
                node=0,
                round=restart_count,
                world_size=1,
                restart_count=restart_count,
                warm=True,
                ranks=[rank],
            )
        )

    def report(self, step: int, *, after_seconds: float = PROGRESS_SECONDS) -> str:
        self.now += after_seconds
        count = len(self.log.lines)
        self._narrate(Progress(step=step, total_steps=1000, metrics={}, phase=""))
        return " ".join(self.log.lines[count:])


@pytest.fixture
def gang() -> Gang:
    gang = Gang()
    gang.start(restart_count=0)
    return gang


def test_progress_has_the_speed_since_the_line_before(gang):
    assert gang.report(10) == "░░░░░░░░░░ 1% · step 10/1000"
    assert gang.report(60) == "░░░░░░░░░░ 6% · step 60/1000 · 5 steps/s · ETA 3m08s"


def test_progress_is_said_now_and_then_only(gang):
    gang.report(10)
    assert gang.report(12, after_seconds=1.0) == ""


def test_progress_has_no_speed_over_a_restart_that_went_back_to_a_checkpoint(gang):
    gang.report(100)
    gang.report(150)
    gang.start(restart_count=1)  # goes on from step 100, and does 53 steps
    assert gang.report(153) == "█░░░░░░░░░ 15% · step 153/1000"
    assert gang.report(203) == "██░░░░░░░░ 20% · step 203/1000 · 5 steps/s · ETA 2m39s"


def test_progress_has_a_bar_that_is_full_at_the_end(gang):
    assert gang.report(1000) == "██████████ 100% · step 1000/1000"


def test_progress_has_no_bar_when_nobody_knows_the_end(gang):
    gang.now += PROGRESS_SECONDS
    gang._narrate(Progress(step=7, total_steps=None, metrics={"loss": 0.5}, phase="evaluate"))
    assert gang.log.lines[-1] == "step 7 · loss 0.5 · evaluate"


def test_progress_stays_on_one_line_with_many_metrics(gang):
    gang.now += PROGRESS_SECONDS
    metrics = {f"metric_{number}": 0.125 for number in range(20)}
    gang._narrate(Progress(step=7, total_steps=100, metrics=metrics, phase=""))
    assert "metric_0 0.125" in gang.log.lines[-1]
    assert len(gang.log.lines[-1]) <= LINE_CHARACTERS
