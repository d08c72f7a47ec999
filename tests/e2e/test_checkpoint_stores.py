"""Gangs whose run is in S3, a server on loopback: kills, throttling, an outage, refusals, no secret shown."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prefect.blocks.core import Block
from prefect.client.orchestration import get_client
from pydantic import BaseModel, Field, SecretStr

from prefect_torch_elastic import GangFailed, StoreError, elastic_task, get_context
from prefect_torch_elastic.checkpoint.verify import verify
from prefect_torch_elastic.runlog import RunLog
from prefect_torch_elastic.store import open_store
from tests.e2e.conftest import fetch_logs
from tests.gangs import wait_until
from tests.simulators.s3 import BUCKET, S3Server
from tests.simulators.s3_buckets import fail
from tests.simulators.s3_faults import Faults
from tests.simulators.s3_wire import Request, Response

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

    from tests.e2e.conftest import LiveFlow

pytest.importorskip("obstore")

Note = Callable[..., None]

OUR_KEY = "AKIAEXAMPLE"
SECRET = "wJalrXUtnFEMI-topsecret"
OUTAGE_SECONDS = 30.0

pytestmark = pytest.mark.timeout(240)


class AwsClientParameters(BaseModel):
    """As in prefect-aws: the fields that are read, under their names."""

    endpoint_url: str | None = None
    verify: bool = True
    verify_cert_path: Path | None = None


class AwsCredentials(Block):
    """As in prefect-aws, which need not be installed: blocks are told by the name of their class."""

    _block_type_name = "AWS Credentials"

    aws_access_key_id: str | None = None
    aws_secret_access_key: SecretStr | None = None
    aws_session_token: str | None = None
    profile_name: str | None = None
    region_name: str | None = None
    aws_client_parameters: AwsClientParameters = Field(default_factory=AwsClientParameters)
    assume_role_arn: str | None = None


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """One server, on a machine that knows nothing about any other service; so gangs start warm."""
    with S3Server() as server, pytest.MonkeyPatch.context() as environment:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            environment.delenv(name)
        settings = {"ACCESS_KEY_ID": OUR_KEY, "SECRET_ACCESS_KEY": SECRET, "REGION": "us-east-1"}
        for name, value in (settings | {"ENDPOINT_URL": server.endpoint}).items():
            environment.setenv(f"AWS_{name}", value)
        yield server


@pytest.fixture
def s3(server: S3Server) -> Iterator[S3Server]:
    """The server, empty and in order again."""
    yield server
    server.faults, server.before = Faults(), None
    server.clear()
    server.forget_calls()


@pytest.fixture
def options(request: pytest.FixtureRequest, s3: S3Server, in_flow: LiveFlow) -> dict[str, Any]:
    """Options of a task whose credentials are in the environment, or in a block that Prefect keeps."""
    if request.param == "environment":
        return {"store": s3.url("environment")}
    block = AwsCredentials(
        aws_access_key_id="AKIABLOCK",
        aws_secret_access_key=SecretStr(SECRET),
        region_name="us-east-1",
        aws_client_parameters=AwsClientParameters(endpoint_url=s3.endpoint),
    )
    in_flow(lambda: block.save("e2e", overwrite=True))
    s3.set_faults(unknown_keys=[OUR_KEY])  # those of the environment
    return {"store": s3.url("block"), "store_credentials": "aws-credentials/e2e"}


def assert_all_whole(s3: S3Server, url: str, run: str) -> list[int]:
    """Verify every checkpoint of a run and return their steps, newest first."""
    store = open_store(url, {**s3.credentials, "access_key_id": "AKIATEST"})
    log = RunLog(store, run).refresh()
    assert not log.bad
    assert [str(damage) for commit in log.commits for damage in verify(store, run, commit).damages] == []
    return [commit.step for commit in log.commits]


def assert_secret_is_nowhere(state: State[Any], s3: S3Server) -> None:
    """Look into the task run's log and states, into the files of attempts, and into all objects."""
    task_run_id = state.state_details.task_run_id
    assert task_run_id is not None
    lines = fetch_logs(state, has="Finished in state")
    assert lines
    states: list[State[Any]] = []
    with get_client(sync_client=True) as client:

        def are_all_there() -> bool:  # they travel as events, and come late
            states[:] = client.read_task_run_states(task_run_id)
            return any(one.is_final() for one in states)

        wait_until(are_all_there, 30.0)
    texts = {"log": "\n".join(line.message for line in lines), "states": str(states)}
    files = Path(os.environ["PREFECT_HOME"]).glob("torch-elastic/*/attempts/**/*")
    texts |= {str(path): path.read_bytes().decode(errors="replace") for path in files if path.is_file()}
    assert any("rank-0.log" in name for name in texts)
    for key in s3.buckets.keys(BUCKET):
        texts[key] = s3.buckets.read(BUCKET, key).decode(errors="replace")
    assert [name for name, text in texts.items() if "topsecret" in text] == []


@pytest.mark.parametrize("options", ["environment", "block"], indirect=True)
def test_run_in_s3_survives_the_kill_of_a_rank(
    in_flow: LiveFlow, s3: S3Server, options: dict[str, Any], note: Note, notes: Path
):
    @elastic_task(nproc_per_node=2, run_key="killed", max_restarts=1, **options)
    def train(steps: int) -> float:
        import signal

        import torch

        context = get_context()
        state = {"weights": torch.zeros(1000)}
        first = context.checkpoint.load(state)
        note(f"{context.restart_count} {first}")
        for step in range(first, steps):
            state["weights"] += 1
            context.checkpoint.save(state, step=step + 1, wait=step + 1 in (8, steps))
            if (context.rank, context.restart_count, step) == (1, 0, 9):
                os.kill(os.getpid(), signal.SIGKILL)
        return state["weights"].sum().item()

    state = in_flow(lambda: train(14, return_state=True))
    assert state.result() == 14_000.0
    starts = [tuple(map(int, line.split())) for line in notes.read_text().splitlines()]
    assert starts[:2] == [(0, 0), (0, 0)]
    assert {restart for restart, _ in starts[2:]} == {1}
    (resumed,) = {step for _, step in starts[2:]}
    assert 8 <= resumed <= 10, "step 8 was waited for"
    assert assert_all_whole(s3, options["store"], "killed")[0] == 14
    assert s3.open_uploads() == 0
    assert_secret_is_nowhere(state, s3)


# ---------------------------------------------------------------- a store that is slow, away, or refuses


def test_outage_and_throttling_in_a_save_lose_nothing_and_training_goes_on(
    in_flow: LiveFlow, s3: S3Server, note: Note, notes: Path
):
    @elastic_task(
        nproc_per_node=2,
        run_key="outage",
        store=s3.url("runs"),
        max_restarts=0,
        checkpoint={"every_steps": 5, "keep_last": 1000},
    )
    def train(steps: int) -> tuple[int, float]:
        import torch

        context = get_context()
        state = {"weights": torch.zeros(1000)}
        first = context.checkpoint.load(state)
        for step in range(first, steps):
            state["weights"] += 1
            time.sleep(0.1)
            saved = context.checkpoint.save_if_due(state, step=step + 1)
            if context.rank == 0:
                note(f"{time.monotonic()} {step + 1} {saved}")
        return first, state["weights"].sum().item()

    away = threading.Event()
    began: list[float] = []

    def start_outage_in_a_save(request: Request) -> None:
        if request.method == "PUT" and "/checkpoints/000000000040/" in request.path and not away.is_set():
            away.set()
            began.append(time.monotonic())
            s3.start_outage(seconds=OUTAGE_SECONDS)

    s3.set_faults(fail_share=0.1)
    s3.before = start_outage_in_a_save
    state = in_flow(lambda: train(400, return_state=True))
    assert state.result() == (0, 400_000.0)
    assert sum(call.status == 503 for call in s3.calls()) >= 5
    s3.set_faults(fail_share=0.0)
    steps = [line.split() for line in notes.read_text().splitlines()]
    during = [int(step) for at, step, _ in steps if 0.0 < float(at) - began[0] < OUTAGE_SECONDS]
    assert len(during) > 0.5 * OUTAGE_SECONDS / 0.1, "training went on"
    saved = [int(step) for _, step, is_saved in steps if is_saved == "True"]
    committed = assert_all_whole(s3, s3.url("runs"), "outage")
    assert sorted(committed) == saved, "what was not left out exists"
    assert 40 in committed
    assert not {step for step in committed if during[5] <= step <= during[-5]}
    assert s3.open_uploads() == 0
    lines = [line.message for line in fetch_logs(state, has="answers again")]
    assert any("does not answer as it should" in line for line in lines)
    assert any("is not saved: the save before it is still on its way." in line for line in lines)
    assert in_flow(lambda: train(401)) == (400, 401_000.0)


def test_store_that_refuses_one_rank_ends_all_with_one_cause_c059(
    in_flow: LiveFlow,
    s3: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    note: Note,
    notes: Path,
):
    @elastic_task(
        nproc_per_node=2,
        run_key="refused",
        store=s3.url("runs"),
        max_restarts=0,
        checkpoint={"every_steps": 5, "max_failures": 1},
    )
    def train() -> None:
        import torch

        from prefect_torch_elastic import CheckpointError

        state = {"weights": torch.zeros(1000), "bias": torch.zeros(10)}
        for step in range(1, 10_000):
            try:
                get_context().checkpoint.save_if_due(state, step=step)
            except CheckpointError:
                note(f"{step} {time.monotonic()}")
                raise
            time.sleep(0.02)

    answer, refused = s3.buckets.answer, list[float]()

    def refuse_rank_1(request: Request) -> tuple[Response, Callable[[], None]]:
        if request.method == "PUT" and "/000000000010/" in request.path and "/r00001" in request.path:
            refused.append(time.monotonic())
            return fail(403, "AccessDenied", "Access Denied"), lambda: None
        return answer(request)

    monkeypatch.setattr(s3.buckets, "answer", refuse_rank_1)
    state = in_flow(lambda: train(return_state=True))
    error = state.result(raise_on_failure=False)
    assert isinstance(error, GangFailed)
    assert error.exc_type == "CheckpointError"
    for part in ("The save of step 10 failed", "rank 1", "AccessDenied", s3.url("runs")):
        assert part in str(error)
    told = [line.split() for line in notes.read_text().splitlines()]
    assert len(told) == 2, "both ranks"
    assert len({step for step, _ in told}) == 1
    assert max(float(at) for _, at in told) - refused[0] < 30.0
    assert assert_all_whole(s3, s3.url("runs"), "refused") == [5]
    assert_secret_is_nowhere(state, s3)


def test_store_that_cannot_be_written_is_found_before_training_c059(
    in_flow: LiveFlow,
    s3: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    note: Note,
    notes: Path,
):
    @elastic_task(nproc_per_node=2, store=s3.url("read-only"), retries=0)
    def train() -> None:
        note()

    answer = s3.buckets.answer

    def refuse_writes(request: Request) -> tuple[Response, Callable[[], None]]:
        refused = fail(403, "AccessDenied", "Access Denied"), lambda: None
        return refused if request.method == "PUT" else answer(request)

    monkeypatch.setattr(s3.buckets, "answer", refuse_writes)
    error = in_flow(lambda: train(return_state=True)).result(raise_on_failure=False)
    assert isinstance(error, StoreError)
    for part in ("cannot write", s3.url("read-only"), "AccessDenied"):
        assert part in str(error)
    assert SECRET not in str(error)
    assert not notes.exists()
