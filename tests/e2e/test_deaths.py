"""Whoever of a gang dies, stops or lingers, the rest is ended and the run goes on or says what happened."""

from __future__ import annotations

import pytest

from tests.gangs import Driver, Job, find_gang, kill, lives, wait_until_gone

MARGIN_SECONDS = 5.0

TRAINER = """
@elastic_task(nproc_per_node=2, max_restarts={restarts}, grace_seconds=2)
def train():
    import torch
    import torch.distributed as dist

    context = get_context()
    context.init_process_group()
    if {children}:
        start_children()
    mark_rank()
    generation = len(pids_of(f"start-*-{{context.rank}}"))
    mark(f"start-{{generation}}-{{context.rank}}")
    total = torch.zeros(1)
    for step in range({steps}):
        value = torch.ones(1)
        dist.all_reduce(value)
        total += value
        time.sleep(0.02)
        if (FOLDER / "finish").exists():
            total.fill_({steps} * 2)
            done = torch.ones(1)
            break
    left = [pid for pid in pids_of("child-0-*") if lives(pid)] if context.restart_count else []
    return int(total), context.restart_count, context.attempt, left, generation

@flow
def main():
    return train()

RESULT = main()
"""


def start_trainer(
    driver: Driver, *, restarts: int = 1, children: bool = False, steps: int = 80
) -> tuple[Job, list[int]]:
    """Start a gang that runs `steps` all-reduces in 1.6 s or more, and return its job and ranks."""
    job = driver.submit(TRAINER.format(restarts=restarts, children=children, steps=steps))
    return job, job.pids("start-0-*", 2)


def test_kill_of_an_agent_replaces_the_node_without_a_restart(driver):
    job, ranks = start_trainer(driver, restarts=0, children=True)
    gang, children = find_gang(ranks), job.pids("child-0-*", 6)
    kill(gang.agents[0])
    wait_until_gone([*ranks, *children, *gang.servers], MARGIN_SECONDS)
    assert lives(gang.launcher)
    total, restarts, attempt, _, generation = job.wait()
    assert (total, restarts, attempt, generation) == (160, 0, 1, 1)


def test_kill_of_the_fork_server_leaves_the_ranks_alone(driver):
    job, ranks = start_trainer(driver, restarts=0)
    for server in find_gang(ranks).servers:
        kill(server)
    total, restarts, attempt, _, generation = job.wait()
    assert (total, restarts, attempt, generation) == (160, 0, 1, 0)


def test_restart_after_the_fork_server_was_killed_starts_cold(driver):
    job, ranks = start_trainer(driver)
    for server in find_gang(ranks).servers:
        kill(server)
    kill(ranks[1])
    total, restarts, attempt, _, generation = job.wait()
    assert (total, restarts, attempt, generation) == (160, 1, 1, 1)


def test_kill_of_the_launcher_forms_a_new_gang(driver):
    job, ranks = start_trainer(driver, restarts=0, children=True)
    gang, children = find_gang(ranks), job.pids("child-0-*", 6)
    kill(gang.launcher)
    wait_until_gone([*ranks, *children, *gang.agents, *gang.servers], MARGIN_SECONDS)
    total, restarts, attempt, _, generation = job.wait()
    assert (total, restarts, attempt, generation) == (160, 0, 2, 1)


@pytest.mark.parametrize("victim", [0, 1])
def test_kill_of_a_rank_reaps_all_kinds_of_children_before_the_restart(driver, victim):
    job, ranks = start_trainer(driver, children=True)
    children = job.pids("child-0-*", 6)
    kill(ranks[victim])
    wait_until_gone([*ranks, *children], MARGIN_SECONDS)
    total, restarts, attempt, left, _ = job.wait()
    assert (total, restarts, attempt, left) == (160, 1, 1, [])


def run_failing(driver: Driver, body: str, *, options: str = "max_restarts=0") -> tuple[str, str, float, int]:
    """Run a body that fails in one rank; return the error's first line, its category, seconds and rank."""
    text = f"""
@elastic_task(nproc_per_node=2, {options})
def train():
    context = get_context()
    mark_rank()
{body}

@flow
def main():
    started = time.monotonic()
    try:
        train()
    except GangFailed as error:
        return str(error).splitlines()[0], error.category, time.monotonic() - started, error.rank

RESULT = main()
"""
    return driver.run(text)


def test_exit_without_a_word_is_named_in_seconds(driver):
    body = """
    if context.rank == 1:
        os._exit(0)
    time.sleep(300)
"""
    message, category, seconds, rank = run_failing(driver, body)
    assert (category, rank) == ("ExitedEarly", 1)
    assert "exit code 0" in message
    assert seconds < 15.0


def test_stopped_rank_is_named_and_ended(driver):
    body = """
    import torch, torch.distributed as dist
    context.init_process_group()
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))
"""
    message, category, seconds, rank = run_failing(driver, body)
    assert (category, rank) == ("StoppedResponding", 1)
    assert "SIGSTOP" in message
    assert seconds < 25.0


def test_thread_that_outlives_the_function_does_not_hold_the_gang(driver):
    text = """
@elastic_task(nproc_per_node=2)
def train():
    threading.Thread(target=time.sleep, args=(300,)).start()
    return get_context().world_size

@flow
def main():
    started = time.monotonic()
    return train(), time.monotonic() - started

RESULT = main()
"""
    value, seconds = driver.run(text)
    assert value == 2
    assert seconds < 20.0


def test_children_that_outlive_the_function_are_ended(driver):
    text = """
@elastic_task(nproc_per_node=2)
def train():
    start_children()
    return get_context().world_size

@flow
def main():
    value = train()
    return value, [pid for pid in pids_of("child-*") if lives(pid)], len(pids_of("child-*"))

RESULT = main()
"""
    assert driver.run(text) == [2, [], 6]
