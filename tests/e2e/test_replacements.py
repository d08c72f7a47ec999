"""A node that is lost and replaced costs time only: rounds, restart counts and verdicts stay right."""

from __future__ import annotations

import psutil
import pytest

from tests.gangs import Driver, Job, kill, lives, wait_until

# Each start of a rank leaves a mark `start-GENERATION-RANK`: how often this rank number was started before.
START = """
def start():
    context = get_context()
    generation = len(pids_of(f"start-*-{context.rank}"))
    mark(f"start-{generation}-{context.rank}")
    return context, generation
"""


def agent_of(rank: int) -> int:
    return psutil.Process(rank).ppid()


def test_agent_of_a_lone_node_is_replaced_after_a_restart_and_the_next_verdict_counts(driver: Driver):
    text = """
@elastic_task(nproc_per_node=2, max_restarts=3, grace_seconds=2)
def train():
    context, generation = start()
    if context.rank == 0 and generation == 0:
        wait_for("start-0-1")
        raise ValueError("once")
    if context.rank == 0 and generation == 2:
        wait_for("start-2-1")
        mark("count", context.restart_count)
        raise NonRetryable("enough")
    time.sleep(300)

@flow
def main():
    try:
        train()
    except GangFailed as error:
        return error.category, len(pids_of("start-*-0")), int((FOLDER / "count").read_text())

from prefect_torch_elastic import NonRetryable
RESULT = main()
"""
    job = driver.submit(START + text)
    kill(agent_of(job.pids("start-1-*", 2)[0]))
    assert job.wait() == ["NonRetryable", 3, 1]


@pytest.mark.parametrize("victim", [0, 1], ids=["node of rank 0", "other node"])
def test_restart_counts_are_equal_and_non_retryable_ends_the_gang_when_a_node_was_replaced(
    driver: Driver, victim: int
):
    text = """
@elastic_task(nnodes=2, nproc_per_node=1, max_restarts=3, grace_seconds=2)
def train():
    context, generation = start()
    if generation == 0 and context.rank == 0:
        wait_for("start-0-1")
        raise ValueError("once")
    if len(pids_of("start-*")) > 4:
        mark(f"count-{context.rank}-env", os.environ["TORCHELASTIC_RESTART_COUNT"])
        mark(f"count-{context.rank}", context.restart_count)
        if context.rank == 1:
            wait_for("count-0")
            raise NonRetryable("enough")
    time.sleep(300)

@flow
def main():
    try:
        train()
    except GangFailed as error:
        return error.category, error.rank, pids_of("count-*"), len(pids_of("start-*"))

from prefect_torch_elastic import NonRetryable
RESULT = main()
"""
    job = driver.submit(START + text)
    kill(agent_of(job.pids("start-1-*", 2)[victim]))
    assert job.wait() == ["NonRetryable", 1, [1, 1, 1, 1], 6]


def test_range_of_nodes_goes_on_smaller_when_a_node_was_lost_max_attempts_times(driver: Driver):
    text = """
@elastic_task(nnodes="1:2", nproc_per_node=1, max_restarts=0, max_attempts=2, grace_seconds=2)
def train():
    context = get_context()
    mark(f"world-{context.world_size}-{context.rank}-{os.getpid()}")
    wait_for("finish")
    return context.world_size, context.restart_count, context.attempt

@flow
def main():
    return train()

RESULT = main()
"""
    job = driver.submit(text)
    for _ in range(2):
        kill(agent_of(living_ranks(job, "world-2-*", 2)[1]))
        wait_until(lambda: len(living(job, "world-2-*")) < 2, 10.0)
    living_ranks(job, "world-1-*", 1)
    (job.folder / "finish").write_text("")
    assert job.wait() == [1, 0, 1]


def living(job: Job, pattern: str) -> list[int]:
    """Return the pids of living ranks in the marks that match, in the order of their ranks."""
    return [pid for pid in job.pids(pattern, 0) if lives(pid)]


def living_ranks(job: Job, pattern: str, count: int) -> list[int]:
    """`living`, once there are `count` of them."""
    try:
        wait_until(lambda: len(living(job, pattern)) == count, 30.0)
    except TimeoutError:
        names = sorted(path.name for path in job.folder.iterdir())
        pytest.fail(f"No {count} ranks `{pattern}`; marks: {names}\n{job.driver.tail()}", pytrace=False)
    return living(job, pattern)


def test_agents_that_died_between_gangs_are_not_charged_to_the_next_one(driver: Driver):
    text = """
import logging

class Ear(logging.Handler):
    def emit(self, record):
        heard.append(record.getMessage())

@elastic_task(nnodes=2, nproc_per_node=1, max_restarts=0, max_attempts=1)
def train():
    context = get_context()
    mark(f"agent-{context.attempt}-{context.node_rank}", os.getppid())
    return context.attempt, context.restart_count

@flow
def main():
    train()
    agents = pids_of("agent-*")
    for agent in agents:
        os.kill(agent, signal.SIGKILL)
    while any(lives(agent) for agent in agents):
        time.sleep(0.01)
    heard.clear()
    ended = train()
    return ended, set(agents).isdisjoint(pids_of("agent-*")), [line for line in heard if "was lost" in line]

heard, ear = [], Ear()
logging.getLogger("prefect.task_runs").addHandler(ear)
try:
    RESULT = main()
finally:
    logging.getLogger("prefect.task_runs").removeHandler(ear)
"""
    assert driver.run(text) == [[1, 0], True, []]
