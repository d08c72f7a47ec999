"""The chronicle of a gang of pods that is taken away and comes back: one story over both."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefect_torch_elastic import get_context
from prefect_torch_elastic.goodput import count_goodput
from prefect_torch_elastic.runfacts import GangEnd, RunFacts
from prefect_torch_elastic.runmemory import RunMemory
from tests.hosted import wait_for
from tests.podgangs import PodGang, send_gang

pytestmark = pytest.mark.usefixtures("prefect_server", "no_leftovers")


def train(folder: str, steps: int) -> int:
    import torch

    context = get_context()
    state = {"sum": torch.zeros(1)}
    for step in range(context.checkpoint.load(state), steps):
        context.report({"loss": 1.0}, step=step + 1, total_steps=steps)
        context.checkpoint.save_if_due(state, step=step + 1)
        Path(folder, f"rank-{context.rank}").write_text(str(step + 1))
        time.sleep(0.05)
    return steps


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[PodGang]:
    gang = send_gang(tmp_path / "gang", train, str(tmp_path), 60)
    yield gang
    gang.end()


def read_facts(gang: PodGang) -> RunFacts:
    chronicle = RunMemory(record=gang.record).load()
    assert chronicle, gang.tell()
    return chronicle.facts()


def test_preempted_gang_has_one_chronicle_over_both_its_times(gang: PodGang, tmp_path: Path):
    def has_come() -> bool:
        marks = [tmp_path / f"rank-{rank}" for rank in range(2)]
        return all(mark.exists() and int(mark.read_text() or 0) >= 20 for mark in marks)

    pods = gang.start()
    assert wait_for(has_come, seconds=60), gang.tell()
    for pod in pods:
        pod.terminate()
    assert [pod.wait() for pod in pods] == [143, 143], gang.tell()
    assert [one.end for one in read_facts(gang).gangs] == [GangEnd.PREEMPTED]
    pods = gang.start()
    assert [pod.wait() for pod in pods] == [0, 0], gang.tell()
    facts = read_facts(gang)
    assert [one.end for one in facts.gangs] == [GangEnd.PREEMPTED, GangEnd.SUCCEEDED]
    assert (facts.preemptions, facts.step) == (1, 60)
    parts = count_goodput(facts)
    assert sum(parts.parts_ms.values()) == parts.wall_ms
