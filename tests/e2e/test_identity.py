"""A run keeps its folder over retries and restarts and shares it with nobody; what is finished stays so."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from prefect_torch_elastic import SpecError, StoreError, calls, elastic_task, get_context, launch
from prefect_torch_elastic.signing import BLOCK_NAME
from tests.e2e.conftest import fetch_logs

if TYPE_CHECKING:
    from tests.conftest import RunningScript, ScriptRunner
    from tests.e2e.conftest import LiveFlow

Note = Callable[..., None]


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has a store of its own."""
    path = tmp_path / "store"
    monkeypatch.setenv("PREFECT_INTEGRATIONS_TORCH_ELASTIC_STORE", str(path))
    return path


def folders(store: Path) -> list[str]:
    return sorted(entry.name for entry in store.iterdir() if (entry / "attempts").exists())


# ---------------------------------------------------------------- in one flow run


def test_retry_keeps_its_folder(in_flow: LiveFlow, store: Path, note: Note, notes: Path):
    @elastic_task(nproc_per_node=1, max_restarts=0, retries=1)
    def train():
        context = get_context()
        note(f"{context.run_key} {context.attempt}")
        if context.attempt == 1:
            raise ValueError("once")
        return context.run_key

    run_key = in_flow(train)
    assert notes.read_text().splitlines() == [f"{run_key} 1", f"{run_key} 2"]
    assert folders(store) == [run_key]
    assert run_key.startswith("train-")


def test_retry_of_the_task_around_it_finds_the_outcome(in_flow: LiveFlow, note: Note, notes: Path):
    from prefect import task

    @elastic_task(nproc_per_node=1)
    def train(x: int):
        note(x)
        return get_context().run_key

    tries: list[Any] = []

    @task(retries=1)
    def search() -> Any:
        tries.append([train(1), train(1)])
        if len(tries) == 1:
            raise ValueError("once")

    in_flow(lambda: search())
    assert tries[0] == tries[1]
    assert tries[0][0] != tries[0][1]
    assert notes.read_text().splitlines() == ["1", "1"]


def test_calls_have_runs_of_their_own_whatever_their_arguments(in_flow: LiveFlow, store: Path):
    @elastic_task(nproc_per_node=1)
    def train(x: Any):
        return get_context().run_key, x

    def job() -> list[Any]:
        mapped = train.map([{"a", "b"}, {"c"}, {"a", "b"}]).result()
        return [*mapped, train({"a", "b"}), train({"c"})]

    results = in_flow(job)
    assert [value for _, value in results] == [{"a", "b"}, {"c"}, {"a", "b"}, {"a", "b"}, {"c"}]
    keys = {key for key, _ in results}
    assert len(keys) == 5
    assert folders(store) == sorted(keys)


def test_map_over_what_cannot_be_hashed_asks_for_a_run_key(in_flow: LiveFlow, note: Note, notes: Path):
    @elastic_task(nproc_per_node=1, retries=2)
    def train(view: Any, name: str):
        note()
        return bytes(view).decode() + name

    views = [memoryview(b"one "), memoryview(b"two ")]

    def job(run_key: str | None) -> Any:
        chosen = train.with_options(run_key=run_key) if run_key else train
        return [future.result(raise_on_failure=False) for future in chosen.map(views, ["a", "b"])]

    for error in in_flow(lambda: job(None)):
        assert isinstance(error, SpecError)
        assert "`view` cannot be hashed" in str(error)
    assert not notes.exists()
    assert in_flow(lambda: job("run-{name}")) == ["one a", "two b"]


def test_result_that_a_failed_state_carries_is_tried_again(in_flow: LiveFlow, note: Note, notes: Path):
    """A retry that Prefect makes because of the value must run the function, not find the value."""

    @elastic_task(nproc_per_node=1, retries=1)
    def train():
        from prefect.states import Completed, Failed

        note()
        second = get_context().attempt == 2
        return Completed(message="good") if second else Failed(message="not good enough")

    assert in_flow(lambda: train(return_state=True)).is_completed()
    assert notes.read_text().count("\n") == 2


def test_failure_after_the_gang_does_not_train_again_c036(in_flow: LiveFlow, note: Note, notes: Path):
    """Prefect may fail to persist what the function returned; the retry finds the outcome."""

    @elastic_task(nproc_per_node=2, retries=1, persist_result=True)
    def train():
        note()
        return get_context().run_key

    launch_body, values = launch.launch, list[Any]()

    def launch_and_fail_once(*args: Any) -> Any:
        values.append(launch_body(*args))
        if len(values) == 1:
            raise OSError("the result could not be persisted")
        return values[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "launch", launch_and_fail_once)
        state = in_flow(lambda: train(return_state=True))
    assert state.is_completed()
    assert [state.result()] * 2 == values
    assert notes.read_text().count("\n") == 2  # two ranks, once
    lines = [line.message for line in fetch_logs(state, has="succeeded already")]
    assert any("This call has succeeded already, in attempt 1" in line for line in lines)
    assert any("a retry finds it there if Prefect cannot persist it" in line for line in lines)


def test_storage_that_cannot_be_written_is_found_before_training_c036(
    in_flow: LiveFlow, note: Note, notes: Path, tmp_path: Path
):
    (tmp_path / "blocked").write_text("a file is in the way")

    @elastic_task(nproc_per_node=2, persist_result=True, result_storage=tmp_path / "blocked" / "results")
    def train():
        note()

    error = in_flow(lambda: train(return_state=True)).result(raise_on_failure=False)
    assert isinstance(error, StoreError)
    assert "`LocalFileSystem`, which cannot be written" in str(error)
    assert "Nothing was trained yet" in str(error)
    assert not notes.exists()


def test_storage_that_can_be_written_is_left_as_it_was_c036(in_flow: LiveFlow, tmp_path: Path):
    storage = tmp_path / "results"

    @elastic_task(nproc_per_node=1, persist_result=True, result_storage=storage)
    def train():
        return 5

    assert in_flow(train) == 5
    assert calls.RESULT_PROBE not in [entry.name for entry in storage.iterdir()]


def test_store_that_is_a_file_is_refused_before_training(in_flow: LiveFlow, store: Path, note: Note):
    store.write_text("a file is in the way")

    @elastic_task(nproc_per_node=1)
    def train():
        note()

    error = in_flow(lambda: train(return_state=True)).result(raise_on_failure=False)
    assert isinstance(error, StoreError)
    assert str(store) in str(error)


def test_credentials_that_are_not_saved_are_named(in_flow: LiveFlow):
    @elastic_task(nproc_per_node=1, retries=1, store_credentials="aws-credentials/nobody")
    def train(): ...

    error = in_flow(lambda: train(return_state=True)).result(raise_on_failure=False)
    assert isinstance(error, SpecError)
    assert "`store_credentials='aws-credentials/nobody'`: there is no such block" in str(error)


# ---------------------------------------------------------------- over processes

DRIVER = """
import sys, time
from pathlib import Path
from prefect import flow, task
from prefect.flow_engine import load_flow_run, run_flow
from prefect_torch_elastic import elastic_task, get_context

notes, stop = Path(sys.argv[2]), Path(sys.argv[3])

def note(text):
    with notes.open("a") as file:
        file.write(text + "\\n")

@elastic_task(nproc_per_node=2)
def train(x, extra=frozenset("abc")):
    context = get_context()
    if context.rank == 0:
        note(f"{x} {context.run_key} {context.attempt}")
    return {"x": x, "run_key": context.run_key}

@flow
def sub():
    return train(7)

@flow(name="identity")
def main():
    results = [train(1), train(1), sub()]
    results += train.map([2, 3]).result()
    note("trained")
    while not stop.exists():
        time.sleep(0.05)
    return results

if __name__ == "__main__":
    print("RESULT", run_flow(main, flow_run=load_flow_run(sys.argv[1])))
"""


def create_flow_run() -> str:
    from prefect import flow
    from prefect.client.orchestration import get_client

    @flow(name="identity")
    def main() -> None: ...

    with get_client(sync_client=True) as client:
        return str(client.create_flow_run(main).id)


def wait_for(notes: Path, text: str, script: RunningScript, *, timeout_seconds: float = 60) -> None:
    deadline = time.monotonic() + timeout_seconds
    while text not in (notes.read_text() if notes.exists() else ""):
        assert script.process.poll() is None, script.stderr
        assert time.monotonic() < deadline, script.stderr
        time.sleep(0.05)


@pytest.fixture
def killed(prefect_server: str, run_script: ScriptRunner, tmp_path: Path, notes: Path) -> list[str]:
    """Arguments of a driver that was killed with -9 after its gangs had finished."""
    args = [create_flow_run(), str(notes), str(tmp_path / "stop")]
    script = run_script.start(DRIVER, args=args)
    wait_for(notes, "trained", script)
    script.process.kill()
    script.process.wait()
    (tmp_path / "stop").touch()
    return args


def test_restarted_driver_finds_what_its_gangs_returned_c039(
    killed: list[str], run_script: ScriptRunner, notes: Path, store: Path
):
    trained = notes.read_text().splitlines()[:-1]
    assert len(trained) == 5
    again = run_script(DRIVER, args=killed, timeout_seconds=90)
    assert "RESULT" in again.stdout, again.stderr
    assert notes.read_text().splitlines() == [*trained, "trained", "trained"]  # no gang ran
    assert again.stderr.count("This call has succeeded already, in attempt 1") == 5
    keys = sorted(line.split()[1] for line in trained)
    assert all(key in again.stdout for key in keys)
    assert folders(store) == keys


def test_outcome_whose_key_is_not_here_is_not_loaded(
    killed: list[str], run_script: ScriptRunner, notes: Path, store: Path
):
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        block = client.read_block_document_by_name(BLOCK_NAME, "secret")
        client.delete_block_document(block.id)
    again = run_script(DRIVER, args=killed, timeout_seconds=90)
    assert "RESULT" in again.stdout, again.stderr
    assert again.stderr.count("signature does not match") == 5
    lines = [line for line in notes.read_text().splitlines() if line != "trained"]
    assert sorted(line.rsplit(" ", 1)[0] for line in lines[:5]) == sorted(
        line.rsplit(" ", 1)[0] for line in lines[5:]
    )
    assert {line.rsplit(" ", 1)[1] for line in lines[5:]} == {"2"}  # the same runs, one attempt later
    third = run_script(DRIVER, args=killed, timeout_seconds=90)
    assert third.stderr.count("This call has succeeded already, in attempt 2") == 5


def test_run_key_is_shared_over_flow_runs_and_outcomes_are_not(in_flow: LiveFlow, store: Path):
    from prefect import flow

    @elastic_task(nproc_per_node=1, run_key="pretrain-{size}")
    def train(size: str):
        return get_context().run_key, get_context().attempt

    @flow
    def main() -> Any:
        return train("7b")

    @flow
    def other() -> Any:
        return train("7b")

    assert in_flow(lambda: [main(), other()]) == [("pretrain-7b", 1), ("pretrain-7b", 2)]
    assert folders(store) == ["pretrain-7b"]


def test_flow_that_is_retried_finds_what_its_gangs_returned(
    prefect_server: str, store: Path, note: Note, notes: Path
):
    from prefect import flow

    @elastic_task(nproc_per_node=1)
    def train(x: int):
        note(x)
        return get_context().run_key, get_context().task_run_id

    seen: list[Any] = []

    @flow(retries=1)
    def main() -> Any:
        seen.append([train(1), train(1), train.with_options(refresh_cache=True)(2)])
        if len(seen) == 1:
            raise ValueError("once")

    main()
    assert seen[0][:2] == seen[1][:2]
    assert seen[0][2] != seen[1][2]  # the user asked for a new one
    assert notes.read_text().splitlines() == ["1", "1", "2", "2"]
