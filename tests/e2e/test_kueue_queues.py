"""Gangs that do not get through their queue, or not into the cluster: who says why, and what is left of them.

One flow sends all of them at once. No pod runs: the cluster has no node.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.hosted import cancel_run, client
from tests.kueueruns import KueueLab, KueueRun, open_lab
from tests.simulators.cluster import Cluster
from tests.simulators.kubernetes.faults import Faults
from tests.simulators.kubernetes.server import ApiServer
from tests.simulators.kubernetes.storage import Storage

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

pytestmark = [pytest.mark.e2e, pytest.mark.kueue, pytest.mark.usefixtures("prefect_server")]

GRACE_SECONDS = 3.0  # of those that cannot be admitted
ANSWER_SECONDS = 60.0  # a mistake is said within

# Kueue has half a minute to take notice of a gang, and the gang half a minute more: here, 2 s each.
_IMPATIENT = """
from prefect_torch_elastic.kubernetes import judging, quota
judging.UNMANAGED_SECONDS = quota.UNMANAGED_AFTER_SECONDS = 2.0
"""

# Each gang's error is written as soon as it is there; the flow ends with the last of them.
_SEND_ALL = """
from concurrent.futures import ThreadPoolExecutor

def conclude(name, future):
    error = future.result(raise_on_failure=False)
    text = f"{{type(error).__name__}}: {{error}}"
    Path(FOLDER, f"{{name}}.part").write_text(text)
    Path(FOLDER, f"{{name}}.part").rename(Path(FOLDER, name))

futures = {{}}
for name, options in json.loads({cases!r}).items():
    options = {{**LIMITS, **options}}
    task = elastic_task(name=name, work_pool=POOL, store=STORE, **options)(train)
    futures[name] = task.submit(str(FOLDER), 5)
with ThreadPoolExecutor(len(futures)) as threads:
    list(threads.map(conclude, futures, futures.values()))
"""


@dataclass(frozen=True, kw_only=True)
class Story:
    """All gangs of the flow.

    Attributes:
        lab: Where they are sent.
        run: The flow.
        began: When it was started.
    """

    lab: KueueLab
    run: KueueRun
    began: float

    def child(self, name: str) -> FlowRun | None:
        return next((run for run in self.lab.children() if run.name.startswith(f"{name}-")), None)

    def state(self, name: str) -> tuple[str, str]:
        """Return name and message of the state of a gang's run."""
        child = self.child(name)
        state = child.state if child else None
        return (state.name or "", state.message or "") if state else ("", "")

    def wait_for_state(self, name: str, *states: str) -> str:
        """Return the message that comes with one of the states."""
        self.lab.until(lambda: self.state(name)[0] in states, f"{states} of `{name}`", self.run)
        return self.state(name)[1]

    def history(self, name: str) -> list[tuple[str, str]]:
        """Return names and messages of all states of a gang's run."""
        child = self.child(name)
        assert child
        with client() as api:
            states = sorted(api.read_flow_run_states(child.id), key=lambda state: state.timestamp)
        return [(state.name or "", state.message or "") for state in states]

    def error(self, name: str) -> str:
        """Return what the driver got for a gang, once it has."""
        file = self.run.folder / name
        self.lab.until(file.exists, f"the error of `{name}`", self.run)
        return file.read_text()

    def said(self, name: str, state: str) -> str:
        """Return the message of the first state of that name."""
        found = [message for held, message in self.history(name) if held == state]
        assert found, self.history(name)
        return found[0]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ApiServer]]:
    """API servers of clusters that lack something; no controller acts in them."""
    no_right = Faults()
    no_right.deny("create", "jobsets")
    with ExitStack() as stack:
        yield {
            "no-kueue": stack.enter_context(ApiServer(Storage(), absent_groups={"kueue.x-k8s.io"})),
            "no-jobset": stack.enter_context(ApiServer(Storage(), absent_groups={"jobset.x-k8s.io"})),
            "no-right": stack.enter_context(ApiServer(Storage(), faults=no_right)),
        }


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=0) as started:
        started.add_queue("lq", cpu=2)
        started.add_queue("held", "cq-held", cpu=2)
        started.hold("cq-held")
        yield started


@pytest.fixture(scope="module")
def story(
    prefect_server: str,
    cluster: Cluster,
    elsewhere: dict[str, ApiServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("queues")
    cases: dict[str, dict[str, Any]] = {
        "large": {"nnodes": 3},
        "no-queue": {"queue": "lqq"},
        "no-priority": {"queue_priority": "urgent"},
        "held": {"queue": "held"},
    }
    for name, server in elsewhere.items():
        kubeconfig = str(server.write_kubeconfig(folder / f"kubeconfig-{name}"))
        cases[name] = {"namespace": "default", "job_variables": {"cluster_config": kubeconfig}}
    cases["no-jobset"]["queue"] = cases["no-right"]["queue"] = None
    grace = {"inadmissible_grace_seconds": GRACE_SECONDS}
    with open_lab(cluster, folder / "lab", worker_prelude=_IMPATIENT, **grace) as lab:
        run = lab.start(_SEND_ALL.format(cases=json.dumps(cases)))
        yield Story(lab=lab, run=run, began=time.time())


def end_seconds(story: Story, name: str) -> float:
    """Return how long a gang's run lived once it was taken."""
    child = story.child(name)
    assert child
    assert child.state
    assert child.created
    return (child.state.timestamp - child.created).total_seconds()


def jobsets(cluster: Cluster, name: str) -> list[str]:
    """Return the JobSets of a gang."""
    found = [obj["metadata"]["name"] for obj in cluster.api.list("jobsets", namespace=cluster.namespace)]
    return [jobset for jobset in found if jobset.startswith(f"{name}-")]


def test_gang_that_is_larger_than_the_quota_fails_after_its_grace_with_both_numbers_c042(
    story: Story, cluster: Cluster
):
    error = story.error("large")
    assert "it asks for 3 `cpu`, and the queue has 2 at most" in story.said("large", "Inadmissible")
    assert story.state("large")[0] == "Failed"
    for part in ("GangFailed", "asks for 3 `cpu`, and the queue has 2 at most", "(`inadmissible_grace_sec"):
        assert part in error
    assert not jobsets(cluster, "large")


def test_queue_that_does_not_exist_is_named_at_once_with_those_that_do_c042(story: Story, cluster: Cluster):
    error = story.error("no-queue")
    assert story.state("no-queue")[0] == "Failed"
    assert end_seconds(story, "no-queue") < ANSWER_SECONDS
    for text in (error, story.state("no-queue")[1]):
        assert "`lqq`" in text
        assert "`held`, `lq`" in text
    assert not jobsets(cluster, "no-queue")


def test_priority_class_that_does_not_exist_is_named_c042(story: Story, cluster: Cluster):
    error = story.error("no-priority")
    assert "no WorkloadPriorityClass `urgent`" in story.said("no-priority", "Unmanaged")
    assert story.state("no-priority")[0] == "Failed"
    assert "no WorkloadPriorityClass `urgent`" in error
    assert not jobsets(cluster, "no-priority")


def test_cluster_without_kueue_refuses_a_gang_that_names_a_queue(story: Story, elsewhere: dict[str, Any]):
    error = story.error("no-kueue")
    assert story.state("no-kueue")[0] == "Failed"
    assert "Kueue is not installed in this cluster" in error
    assert not elsewhere["no-kueue"].storage.list("jobsets")


def test_cluster_without_jobset_is_said_in_one_sentence_c047(story: Story):
    error = story.error("no-jobset")
    name, message = story.state("no-jobset")
    assert (name, message.count("\n")) == ("Failed", 0)
    for text in (error, message):
        assert "The gang cannot be created: JobSet is not installed in this cluster" in text
        assert "Traceback" not in text


def test_missing_right_is_said_in_one_sentence_c047(story: Story, elsewhere: dict[str, Any]):
    error = story.error("no-right")
    name, message = story.state("no-right")
    assert (name, message.count("\n")) == ("Failed", 0)
    for text in (error, message):
        assert "cannot create jobsets.jobset.x-k8s.io in 'default' as " in text
        assert "Traceback" not in text
    refused = elsewhere["no-right"].counts["create", "jobsets"]
    assert refused == 1  # another try would meet the same


@pytest.mark.usefixtures("no_leftovers")
def test_gang_in_a_queue_on_hold_waits_and_goes_on_when_it_is_resumed_c042(story: Story, cluster: Cluster):
    message = story.wait_for_state("held", "Queued")
    assert "on hold" in message or "is closed" in message
    waited = time.time() - story.began
    time.sleep(max(0.0, 2 * GRACE_SECONDS - waited))  # an ordinary wait is no failure, however long
    assert story.state("held")[0] == "Queued"
    cluster.resume("cq-held")
    story.wait_for_state("held", "Starting")
    child = story.child("held")
    assert child
    cancel_run(child.id)
    story.lab.until(lambda: story.state("held")[0] == "Cancelled", "the end of `held`")
    assert "Cancelled" in story.error("held")
    cluster.assert_empty()
