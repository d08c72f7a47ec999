"""The chronicle of a gang of pods that is taken away and comes back: one story over both."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefect_torch_elastic import get_context
from prefect_torch_elastic.goodput import Part, count_goodput
from prefect_torch_elastic.incidents import IncidentKind
from prefect_torch_elastic.runfacts import GangEnd, RunFacts
from prefect_torch_elastic.runmemory import RunMemory
from tests.hosted import wait_for
from tests.podgangs import PodGang, send_gang

pytestmark = pytest.mark.usefixtures("prefect_server", "no_leftovers")


STEPS, KILLED_AT, PREEMPTED_AT = 60, (8, 40), 20
LAST_SECONDS = 3.0  # pods that leave after the last word of the run


def train(folder: str, *killed_at: int) -> int:
    import torch

    context = get_context()
    state = {"sum": torch.zeros(1)}
    for step in range(context.checkpoint.load(state), STEPS):
        context.report({"loss": 1.0}, step=step + 1, total_steps=STEPS)
        context.checkpoint.save_if_due(state, step=step + 1)
        Path(folder, f"rank-{context.rank}").write_text(str(step + 1))
        killed = Path(folder, f"killed-{step + 1}")
        if step + 1 in killed_at and context.rank == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
    return STEPS


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[PodGang]:
    gang = send_gang(tmp_path / "gang", train, str(tmp_path))
    yield gang
    gang.end()


@pytest.fixture
def unlucky_gang(tmp_path: Path) -> Iterator[PodGang]:
    """A gang in which rank 1 is killed twice."""
    gang = send_gang(tmp_path / "gang", train, str(tmp_path), *KILLED_AT, max_restarts=2)
    yield gang
    gang.end()


def read_facts(gang: PodGang) -> RunFacts:
    chronicle = RunMemory(record=gang.record).load()
    assert chronicle, gang.tell()
    return chronicle.facts()


def run_and_preempt(gang: PodGang, marks: Path) -> None:
    """Let a gang run to its end, but take its pods away once in the middle."""

    def has_come() -> bool:
        steps = [marks / f"rank-{rank}" for rank in range(2)]
        return all(mark.exists() and int(mark.read_text() or 0) >= PREEMPTED_AT for mark in steps)

    pods = gang.start()
    assert wait_for(has_come, seconds=60), gang.tell()
    for pod in pods:
        pod.terminate()
    assert [pod.wait() for pod in pods] == [143, 143], gang.tell()
    assert [one.end for one in read_facts(gang).gangs] == [GangEnd.PREEMPTED]
    pods = gang.start()
    assert [pod.wait() for pod in pods] == [0, 0], gang.tell()


def test_preempted_gang_has_one_chronicle_over_both_its_times(gang: PodGang, tmp_path: Path):
    run_and_preempt(gang, tmp_path)
    facts = read_facts(gang)
    assert [one.end for one in facts.gangs] == [GangEnd.PREEMPTED, GangEnd.SUCCEEDED]
    assert (facts.preemptions, facts.step) == (1, STEPS)


def test_run_with_two_kills_and_a_preemption_accounts_for_its_time_and_keeps_its_evidence(
    unlucky_gang: PodGang, tmp_path: Path
):
    began_at = time.time()
    run_and_preempt(unlucky_gang, tmp_path)
    check_goodput(read_facts(unlucky_gang), seconds=time.time() - began_at)
    check_evidence(unlucky_gang)


def check_goodput(facts: RunFacts, *, seconds: float) -> None:
    kinds = [incident.kind for incident in facts.incidents]
    assert kinds == [IncidentKind.FAILURE, IncidentKind.PREEMPTION, IncidentKind.FAILURE]
    goodput = count_goodput(facts)
    assert sum(goodput.parts_ms.values()) == pytest.approx(goodput.wall_ms, rel=0.01)
    assert goodput.wall_ms / 1000 == pytest.approx(seconds, abs=LAST_SECONDS)
    assert goodput.parts_ms[Part.PRODUCTIVE] >= STEPS * 50 * 0.9
    for part in (Part.STARTUP, Part.REPEATED, Part.TEARDOWN):
        assert goodput.parts_ms[part] > 0, part


def check_evidence(gang: PodGang) -> None:
    """The pods are gone, and their disks could be too."""
    store = gang.record.store
    files = {found.key: bytes(store.get(found.key)).decode() for found in store.list("run/incidents/")}
    assert [key.rpartition("-")[2] for key in sorted(files)] == [
        "failure.txt",
        "preemption.txt",
        "failure.txt",
    ]
    first = files[min(files)]
    assert "Rank 1 (node 1) was killed by SIGKILL" in first
    assert "== Ranks\nrank  node" in first
    assert "rank 0: " in first  # where its log was
