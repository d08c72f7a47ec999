"""Simulated nodes on one machine: they meet, they get lost and come back, and the gang goes on."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection
from typing import Any

import psutil
import pytest

from tests.gangs import Driver, Job, find_gang, kill, lives, wait_until, wait_until_gone

BACK_SECONDS = 5.0  # the contract: survivors are in user code again after the loss of a node


@pytest.mark.parametrize(
    ("nnodes", "nodes", "nproc"),
    [(2, 2, 2), ('"1:3"', 3, 1), ('"2:3"', 3, 2)],
    ids=["2 nodes", "1 to 3", "2 to 3"],
)
def test_nodes_form_one_gang(driver, nnodes, nodes, nproc):
    text = f"""
@elastic_task(nnodes={nnodes}, nproc_per_node={nproc}, max_restarts=0)
def train():
    import torch, torch.distributed as dist

    context = get_context()
    context.init_process_group()
    mine = [
        context.rank, context.local_rank, context.world_size, context.local_world_size,
        context.node_rank, context.nnodes, os.getppid(),
    ]
    table = [None] * context.world_size
    dist.all_gather_object(table, mine)
    total = torch.ones(1)
    dist.all_reduce(total)
    return table, int(total)

@flow
def main():
    return train()

RESULT = main()
"""
    table, total = driver.run(text)
    world = nodes * nproc
    assert total == world
    assert [row[:6] for row in table] == [
        [rank, rank % nproc, world, nproc, rank // nproc, nodes] for rank in range(world)
    ]
    agents = {row[4]: row[6] for row in table}
    assert len(set(agents.values())) == nodes, "one agent per node"


# ---------------------------------------------------------------- a node is lost

# Each rank marks the start of a generation: how often this rank number was started.
LOOP = """
@elastic_task(nnodes={nnodes}, nproc_per_node={nproc}, max_restarts={restarts}, grace_seconds=5)
def train():
    import torch, torch.distributed as dist

    context = get_context()
    generation = len(list(FOLDER.glob(f"start-*-{{context.rank}}")))
    mark(f"start-{{generation}}-{{context.rank}}")
    mark(f"code-{{os.getpid()}}", f"{{time.monotonic()}} {{context.world_size}}")
    context.init_process_group()
    steps = 0
    while True:
        value = torch.ones(1) * (FOLDER / "finish").exists()
        dist.all_reduce(value)
        steps += 1
        if value.item() == context.world_size:
            break
        time.sleep(0.02)
    return context.world_size, context.restart_count, context.attempt, steps > 0

@flow
def main():
    return train()

RESULT = main()
"""


def start_loop(driver: Driver, *, nnodes: object, world: int, nproc: int = 1, restarts: int = 0) -> Job:
    """Start a gang that loops over all-reduces until there is a mark `finish`."""
    job = driver.submit(LOOP.format(nnodes=nnodes, nproc=nproc, restarts=restarts))
    wait_for_world(job, world)
    return job


def wait_for_world(job: Job, world: int, *, other_than: Collection[int] = ()) -> tuple[list[int], float]:
    """Return the pids of living ranks once there are `world` of them in user code, and when the last came."""
    found: dict[int, float] = {}

    def whole() -> bool:
        found.clear()
        for path in job.folder.glob("code-*"):
            pid = int(path.stem.removeprefix("code-"))
            if path.suffix == ".part" or pid in other_than or not lives(pid):
                continue
            at, size = path.read_text().split()
            if int(size) == world:
                found[pid] = float(at)
        return len(found) == world

    try:
        wait_until(whole, 40.0)
    except TimeoutError:
        names = sorted(path.name for path in job.folder.iterdir())
        pytest.fail(
            f"No gang of {world} ranks in user code; marks: {names}\n{job.driver.tail()}", pytrace=False
        )
    return sorted(found), max(found.values())


def agents_of(ranks: list[int]) -> list[int]:
    """Return the agents of the ranks, that of rank 0 first."""
    return sorted({psutil.Process(rank).ppid() for rank in ranks})


def agent_with_rank(job: Job, ranks: list[int], number: int) -> int:
    for generation in range(9, -1, -1):
        path = job.folder / f"start-{generation}-{number}"
        if path.exists() and int(path.read_text()) in ranks:
            return psutil.Process(int(path.read_text())).ppid()
    raise AssertionError(f"rank {number} did not start")


def finish(job: Job) -> Any:
    (job.folder / "finish").write_text("")
    return job.wait()


@pytest.mark.parametrize("victim", [0, 1], ids=["node of rank 0", "other node"])
@pytest.mark.parametrize("nproc", [1, 2])
def test_lost_node_is_replaced_without_a_restart(driver, victim, nproc):
    job = start_loop(driver, nnodes=2, world=2 * nproc, nproc=nproc)
    ranks, _ = wait_for_world(job, 2 * nproc)
    gang = find_gang(ranks)
    lost = agent_with_rank(job, ranks, victim * nproc)
    killed_at = time.monotonic()
    kill(lost)
    again, back_at = wait_for_world(job, 2 * nproc, other_than=set(ranks))
    assert back_at - killed_at < BACK_SECONDS
    assert find_gang(again).launcher == gang.launcher, "the launcher and the other node stayed"
    assert set(gang.agents) - {lost} < set(find_gang(again).agents)
    assert finish(job) == [2 * nproc, 0, 1, True]


def test_survivors_go_on_without_the_lost_node_and_it_joins_again(driver):
    job = start_loop(driver, nnodes='"1:3"', world=3)
    ranks, _ = wait_for_world(job, 3)
    killed_at = time.monotonic()
    kill(agent_with_rank(job, ranks, 1))
    again, back_at = wait_for_world(job, 3, other_than=set(ranks))
    assert back_at - killed_at < BACK_SECONDS + 2.0
    first = min(
        float(path.read_text().split()[0])
        for path in job.folder.glob("code-*")
        if int(path.stem.removeprefix("code-")) not in ranks
    )
    assert first - killed_at < BACK_SECONDS
    assert len(again) == 3
    assert finish(job) == [3, 0, 1, True]


def test_gang_ends_when_nodes_are_lost_again_and_again(driver):
    job = driver.submit(
        LOOP.format(nnodes=2, nproc=1, restarts=5).replace("grace_seconds=5", "max_attempts=2")
    )
    ranks, _ = wait_for_world(job, 2)
    kill(agent_with_rank(job, ranks, 1))
    again, _ = wait_for_world(job, 2, other_than=set(ranks))
    kill(agent_with_rank(job, again, 1))
    answer_or_gang = wait_for_end_or_world(job, other_than={*ranks, *again})
    if isinstance(answer_or_gang, list):  # the second attempt: a gang of its own with a budget of its own
        (job.folder / "finish").write_text("")
        assert job.wait()[2] == 2
    else:
        assert "lost" in answer_or_gang["error"]


def wait_for_end_or_world(job: Job, *, other_than: set[int]) -> Any:
    answer = job.driver.jobs / f"{job.number}.answer"
    new: list[int] = []

    def over() -> bool:
        new[:] = [
            int(path.stem.removeprefix("code-"))
            for path in job.folder.glob("code-*")
            if path.suffix != ".part" and int(path.stem.removeprefix("code-")) not in other_than
        ]
        return answer.exists() or len(new) >= 2

    wait_until(over, 40.0)
    return job.wait_for_answer() if answer.exists() else new


def test_sleeping_node_is_left_behind_and_comes_back(driver):
    job = start_loop(driver, nnodes='"1:2"', world=2)
    ranks, _ = wait_for_world(job, 2)
    asleep = agent_with_rank(job, ranks, 1)
    rank_asleep = next(rank for rank in ranks if psutil.Process(rank).ppid() == asleep)
    stopped_at = time.monotonic()
    for pid in (asleep, rank_asleep):
        kill(pid, signal.SIGSTOP)
    try:
        _, back_at = wait_for_world(job, 1, other_than=set(ranks))
        assert back_at - stopped_at < BACK_SECONDS
    finally:
        for pid in (rank_asleep, asleep):
            kill(pid, signal.SIGCONT)
    wait_until_gone([rank_asleep], 10.0)
    again, _ = wait_for_world(job, 2, other_than=set(ranks))
    assert asleep in find_gang(again).agents, "the node woke up and joined"
    assert finish(job) == [2, 0, 1, True]


def test_end_does_not_wait_for_a_sleeping_node(driver):
    job = start_loop(driver, nnodes='"1:2"', world=2)
    ranks, _ = wait_for_world(job, 2)
    asleep = agent_with_rank(job, ranks, 1)
    kill(asleep, signal.SIGSTOP)
    wait_for_world(job, 1, other_than=set(ranks))
    assert finish(job) == [1, 0, 1, True]
    wait_until_gone([asleep], 10.0)


def test_sleeping_agent_alone_is_replaced_by_nobody_and_the_gang_regroups(driver):
    job = start_loop(driver, nnodes=2, world=2)
    ranks, _ = wait_for_world(job, 2)
    asleep = agent_with_rank(job, ranks, 1)
    kill(asleep, signal.SIGSTOP)
    try:
        wait_until(lambda: any(not lives(rank) for rank in ranks), 10.0)
    finally:
        kill(asleep, signal.SIGCONT)
    wait_for_world(job, 2, other_than=set(ranks))
    assert finish(job) == [2, 0, 1, True]


# ---------------------------------------------------------------- a rank fails


def test_failed_rank_is_named_with_its_node_and_no_victim_is(driver):
    text = """
@elastic_task(nnodes=2, nproc_per_node=2, max_restarts=0)
def train():
    import torch, torch.distributed as dist

    context = get_context()
    context.init_process_group()
    for step in range(1000):
        if step == 20 and context.rank == 3:
            raise ValueError("bad batch")
        dist.all_reduce(torch.ones(1))

@flow
def main():
    started = time.monotonic()
    try:
        train()
    except GangFailed as error:
        first = str(error).splitlines()[0]
        return (
            first, error.rank, error.node_rank, error.category, repr(error.__cause__),
            error.diagnosis.victims,
            time.monotonic() - started,
        )

RESULT = main()
"""
    first, rank, node_rank, category, cause, victims, seconds = driver.run(text)
    assert first == "rank 3 (node 1) failed: ValueError: bad batch"
    assert (rank, node_rank, category) == (3, 1, "UserError")
    assert "bad batch" in cause
    assert victims == [0, 1, 2]
    assert seconds < 20.0


def test_failure_before_the_other_node_has_started_spends_the_budget(driver):
    text = """
@elastic_task(nnodes=2, nproc_per_node=1, max_restarts=1)
def train():
    context = get_context()
    mark(f"start-{context.rank}-{os.getpid()}")
    if context.rank == 0:
        raise ValueError("at once")
    time.sleep(300)

@flow
def main():
    try:
        train()
    except GangFailed as error:
        return str(error).splitlines()[0], len(list(FOLDER.glob("start-0-*")))

RESULT = main()
"""
    first, starts = driver.run(text)
    assert first == "rank 0 (node 0) failed: ValueError: at once"
    assert starts == 2


@pytest.mark.parametrize("how", ["raise ValueError('once')", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_one_failure_is_one_restart_on_all_nodes(driver, how):
    text = f"""
@elastic_task(nnodes=2, nproc_per_node=2, max_restarts=1)
def train():
    import torch, torch.distributed as dist

    context = get_context()
    context.init_process_group()
    mark(f"start-{{context.rank}}-{{os.getpid()}}")
    for step in range(40):
        if step == 20 and context.rank == 2 and context.restart_count == 0:
            {how}
        dist.all_reduce(torch.ones(1))
    counts = [None] * context.world_size
    dist.all_gather_object(counts, (context.restart_count, int(os.environ["TORCHELASTIC_RESTART_COUNT"])))
    return counts, [len(list(FOLDER.glob(f"start-{{rank}}-*"))) for rank in range(4)]

@flow
def main():
    return train()

RESULT = main()
"""
    counts, starts = driver.run(text)
    assert counts == [[1, 1]] * 4
    assert starts == [2] * 4


def test_time_limit_ends_all_nodes(driver):
    text = """
@elastic_task(nnodes=2, nproc_per_node=2, grace_seconds=1, run_timeout_seconds=2)
def train():
    mark_rank()
    time.sleep(300)

@flow
def main():
    started = time.monotonic()
    try:
        train()
    except GangTimedOut:
        return [pid for pid in pids_of("rank-*") if lives(pid)], time.monotonic() - started

RESULT = main()
"""
    left, seconds = driver.run(text)
    assert left == []
    assert seconds < 15.0


def test_nodes_that_do_not_come_end_the_gang_at_the_rendezvous_timeout(driver):
    text = """
@elastic_task(nnodes=2, nproc_per_node=1, rdzv_timeout_seconds=3, max_attempts=1, grace_seconds=0)
def train():
    mark(f"start-0-{get_context().rank}")
    time.sleep(300)

@flow
def main():
    try:
        train()
    except GangFailed as error:
        return str(error).splitlines()[0], error.category

RESULT = main()
"""
    job = driver.submit(text)
    ranks = job.pids("start-0-*", 2)
    gang = find_gang(ranks)
    kill(gang.agents[0], signal.SIGSTOP)  # it neither leaves nor meets the other one again
    first, category = job.wait()
    assert category == "NodeLost"
    assert "3 s" in first
