"""A gang whose watches break in every way and phase, and whose cluster goes away: its run shows the truth."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.kueueruns import KueueLab, open_lab
from tests.proxy import ClosableProxy
from tests.simulators.cluster import Cluster
from tests.simulators.kubernetes.faults import Break

pytestmark = [
    pytest.mark.kueue,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("prefect_server", "no_leftovers"),
]

SOON_SECONDS = 10.0  # a watch that broke is listed again
SILENT_SECONDS = 25.0  # one that fell silent has ended, and is listed again
AWAY_SECONDS = 8.0

# A silent watch is given up 30 s after its four minutes are over; here, after 13 s in all.
_ALERT = """
from prefect_torch_elastic.kubernetes import client, listwatch
listwatch.WATCH_SECONDS, client._WATCH_SLACK_SECONDS = 12.0, 1.0
"""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=2) as started:
        started.simulated_only()
        started.add_queue("lq", cpu=2)
        started.add_priority_class("low", 100)
        started.add_priority_class("high", 1000)
        yield started


@pytest.fixture
def way(cluster: Cluster) -> Iterator[ClosableProxy]:
    """The worker's way to the cluster, which a test may close."""
    proxy = ClosableProxy(cluster.server.url)
    yield proxy
    proxy.close()


@pytest.fixture
def lab(cluster: Cluster, way: ClosableProxy, tmp_path: Path) -> Iterator[KueueLab]:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(cluster.kubeconfig.read_text().replace(cluster.server.url, way.url))
    defaults = {"queue_priority": "low", "cluster_config": str(kubeconfig)}
    with open_lab(cluster, tmp_path / "lab", worker_prelude=_ALERT, **defaults) as opened:
        yield opened
    cluster.assert_empty()


def break_watches(cluster: Cluster, ways: Mapping[str, Break]) -> None:
    for plural, how in ways.items():
        cluster.faults.break_watches(plural, how)


def test_phases_are_seen_whatever_befalls_the_watches_and_while_the_cluster_was_away(
    lab: KueueLab, cluster: Cluster, way: ClosableProxy
):
    cluster.hold(drain=False)
    run = lab.start("return pretrain(str(FOLDER), 250, 0.05)", max_attempts=1)
    run.wait_for_state("Queued")
    break_watches(cluster, {"jobsets": Break.DROP, "workloads": Break.GARBAGE, "jobs": Break.GONE})
    cluster.resume()
    run.wait_for_state("Starting", "Running", seconds=SOON_SECONDS)
    run.wait_for_step(5)
    break_watches(cluster, {"jobsets": Break.GONE, "workloads": Break.STALL, "jobs": Break.DROP})
    lab.preempt(seconds=120)
    run.wait_for_state("Preempted", seconds=SILENT_SECONDS)
    break_watches(cluster, {"jobsets": Break.STALL, "workloads": Break.GONE, "jobs": Break.GARBAGE})
    lab.end_preemptor()
    run.wait_for_state("Starting", "Running", seconds=SILENT_SECONDS)
    run.wait_for_step(run.step() + 5)
    way.close()
    lab.preempt(seconds=1)  # nobody hears of it
    lab.until(lambda: cluster.jobset("high") is None, "the end of the second preemption", run)
    time.sleep(AWAY_SECONDS)
    assert run.script.process.poll() is None
    way.open()
    value = run.result()
    assert (value["sum"], value["preemptions"], value["attempt"]) == (sum(3 * n for n in range(250)), 2, 1)
    history = run.history()
    phases = [name for name in history if name in ("Queued", "Running", "Preempted", "Completed")]
    assert phases[:4] == ["Queued", "Running", "Preempted", "Running"]
    assert history[-1] == "Completed"
    assert not {"Failed", "Crashed"} & set(history)
