"""Random kills: whatever dies, the run ends with the right result or the right error, and nothing is left.

No checkpoint that was committed is lost, and what is repeated is at most an interval and a save on its way.

`PTE_CHAOS_SEED` repeats a run, `PTE_CHAOS_KILLS` sets how many kills the long test makes.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from prefect_torch_elastic.checkpoint.verify import verify
from prefect_torch_elastic.runlog import RunLog
from prefect_torch_elastic.store import open_store
from tests.gangs import Driver, GangProcesses, Job, find_gang, kill, wait_until, wait_until_gone
from tests.leftovers import describe, our_files, our_processes

VICTIMS = ("rank", "agent", "fork server", "launcher", "driver")
LATEST_SECONDS = 1.5  # a gang trains for about two
DEADLINE_SECONDS = 60.0
GONE_SECONDS = 15.0
STEPS = 60

EVERY = 5
RUN_KEY = "chaos"

# Gradient descent on all ranks' mean: the same number, whatever the world size and the restarts.
TRAINING = """
@elastic_task(
    nnodes={nnodes}, nproc_per_node=2, max_restarts={restarts}, grace_seconds=5,
    run_key={run_key!r}, store={store!r}, checkpoint={{"every_steps": {every}}},
)
def train():
    import torch, torch.distributed as dist

    context = get_context()
    context.init_process_group()
    state = {{"weight": torch.tensor([8.0]), "count": 0}}
    weight = state["weight"]
    first = context.checkpoint.load(state)
    assert state["count"] == first
    dist.barrier()
    mark(f"rank-{{os.getpid()}}")
    note = (Path({store!r}).parent / "steps").open("a", buffering=1) if context.rank == 0 else None
    print("start", first, file=note)
    for step in range(first + 1, {steps} + 1):
        gradient = weight - context.rank
        dist.all_reduce(gradient)
        weight -= 0.5 * gradient / context.world_size
        state["count"] += 1
        context.report({{"weight": weight.item()}}, step=step)
        time.sleep(0.03)
        saved = context.checkpoint.save_if_due(state, step=step)
        print("saved" if saved else "step", step, file=note)
    return round(weight.item(), 3), context.world_size, state["count"]

@flow
def main():
    try:
        return {{"value": train()}}
    except GangFailed as error:
        return {{"category": error.category, "rank": error.rank}}

RESULT = main()
"""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What is killed, when, and in what kind of gang."""

    victim: str
    nnodes: int
    restarts: int
    after_seconds: float
    pick: float

    def choose(self, gang: GangProcesses, driver: Driver) -> int:
        match self.victim:
            case "rank":
                pids = gang.ranks
            case "agent":
                pids = gang.agents
            case "fork server":
                pids = gang.servers
            case "launcher":
                pids = [gang.launcher]
            case _:
                pids = [driver.pid]
        return pids[int(self.pick * len(pids))]


def plan_kills(seed: int, count: int) -> list[Kill]:
    """Return kills in a random order in which each kind of victim has its turn."""
    chance = random.Random(seed)
    victims = [VICTIMS[number % len(VICTIMS)] for number in range(count)]
    chance.shuffle(victims)
    return [
        Kill(
            victim=victim,
            nnodes=chance.choice([1, 2]),
            restarts=chance.choice([0, 1]),
            after_seconds=chance.uniform(0.0, LATEST_SECONDS),
            pick=chance.random(),
        )
        for victim in victims
    ]


@pytest.fixture
def seed() -> int:
    return int(os.environ.get("PTE_CHAOS_SEED", random.SystemRandom().randrange(10**6)))


@pytest.mark.timeout(120)
def test_some_random_kills_leave_the_right_outcome_and_nothing_else(shared_driver, seed, tmp_path):
    run_chaos(shared_driver, seed, tmp_path, count=6)


@pytest.mark.chaos
@pytest.mark.timeout(1500)
def test_many_random_kills_leave_the_right_outcome_and_nothing_else(shared_driver, seed, tmp_path):
    run_chaos(shared_driver, seed, tmp_path, count=int(os.environ.get("PTE_CHAOS_KILLS", "50")))


def run_chaos(driver: Driver, seed: int, folder: Path, *, count: int) -> None:
    """Make the kills one after the other; fail at the first wrong outcome and say how to repeat it."""
    print(f"PTE_CHAOS_SEED={seed} PTE_CHAOS_KILLS={count}")
    outcomes: Counter[str] = Counter()
    for number, plan in enumerate(plan_kills(seed, count)):
        driver.revive()
        before = {*our_processes()}, our_files()
        (folder / str(number)).mkdir()
        try:
            outcome = run_one(driver, plan, folder / str(number))
            expect_nothing_left(driver, *before)
        except BaseException:
            print(f"kill {number} of PTE_CHAOS_SEED={seed} PTE_CHAOS_KILLS={count}: {plan}")
            driver.end_unfinished()
            raise
        outcomes[f"{plan.victim}: {outcome}"] += 1
    for line, times in sorted(outcomes.items()):
        print(f"{times:3} x {line}")


def run_one(driver: Driver, plan: Kill, folder: Path) -> str:
    script = TRAINING.format(
        nnodes=plan.nnodes,
        restarts=plan.restarts,
        steps=STEPS,
        every=EVERY,
        run_key=RUN_KEY,
        store=str(folder / "store"),
    )
    job = driver.submit(script)
    ranks = job.pids("rank-*", 2 * plan.nnodes)
    gang = find_gang(ranks)
    time.sleep(plan.after_seconds)
    victim = plan.choose(gang, driver)
    was_there = psutil.pid_exists(victim)
    kill(victim)
    if plan.victim == "driver":
        driver.script.process.wait(10)
        wait_until_gone(ranks, GONE_SECONDS)
        job = driver.submit(script)
    result = job.wait(DEADLINE_SECONDS)
    expect_no_loss(folder)
    return judge(plan, result, job, was_there=was_there)


def judge(plan: Kill, result: dict[str, Any], job: Job, *, was_there: bool) -> str:
    """Return the outcome in words, or fail if it is not one that this kill may have."""
    if "value" in result:
        assert result["value"] == [(2 * plan.nnodes - 1) / 2, 2 * plan.nnodes, STEPS]
        return "right result"
    assert (plan.victim, plan.restarts, was_there) == ("rank", 0, True), f"{result}\n{job.driver.tail()}"
    assert result["category"] == "Killed", f"{result}\n{job.driver.tail()}"
    return "right error"


def expect_no_loss(folder: Path) -> None:
    """Every checkpoint in the log is whole, and each start repeats no more than it may.

    A save is taken on only when the one before has its commit, so that one is the oldest to start from.
    """
    store = open_store(str(folder / "store"))
    log = RunLog(store, RUN_KEY).refresh()
    assert not log.bad
    assert [str(damage) for commit in log.commits for damage in verify(store, RUN_KEY, commit).damages] == []
    # One more when the kill came between a commit and the removal of the oldest: the next save does that.
    assert len(log.commits) in (min(3, len(log.all_commits)), 4), "the newest three stay"
    saved, reached = [0], 0
    for line in (folder / "steps").read_text().splitlines():
        what, step = line.split()[0], int(line.split()[1])
        if what == "start":
            assert step in {commit.step for commit in log.all_commits} | {0}
            assert step >= saved[-2:][0], f"step {step} after {saved[-2:]} were saved and {reached} reached"
            saved = [step]
        elif what == "saved":
            assert len(saved) > 1 or step == (saved[0] // EVERY + 1) * EVERY, "nothing was on its way"
            saved.append(step)
        reached = step


def expect_nothing_left(driver: Driver, processes: set[Any], files: set[str]) -> None:
    """Wait until there is nothing but the driver of what was not there before; its sockets go with it."""
    left: list[str] = []

    def clean() -> bool:
        left[:] = [
            f"{process.pid}: {describe(process)[:200]}"
            for key, process in our_processes().items()
            if key not in processes and process.pid != driver.pid
        ]
        left.extend(sorted(our_files() - files))
        return not left and not listening_ports(driver)

    try:
        wait_until(clean, GONE_SECONDS)
    except TimeoutError:
        pytest.fail(f"Left after {GONE_SECONDS:g} s:\n" + "\n".join([*left, *listening_ports(driver)]))


def listening_ports(driver: Driver) -> list[str]:
    """Ports that the driver itself still listens on; those of dead processes are closed."""
    if not driver.alive:
        return []
    found = psutil.Process(driver.pid).net_connections(kind="inet")
    return [str(entry.laddr) for entry in found if entry.status == psutil.CONN_LISTEN]


def test_plan_of_a_seed_is_always_the_same():
    assert plan_kills(7, 50) == plan_kills(7, 50) != plan_kills(8, 50)
    assert Counter(kill.victim for kill in plan_kills(7, 50)) == dict.fromkeys(VICTIMS, 10)
