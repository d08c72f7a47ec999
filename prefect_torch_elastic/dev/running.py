"""One flow of a file, deployed to a stack and run there: from its name to what it returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

import httpx
import pydantic_core
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import MissingResult
from prefect.flows import Flow
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelling
from prefect.utilities.urls import url_for

from prefect_torch_elastic.deploying import deploy, find_steps, load_flow
from prefect_torch_elastic.dev.following import TreeFollower
from prefect_torch_elastic.dev.plan import DRIVER_POOL, StackError
from prefect_torch_elastic.errors import ElasticError, SpecError

Show = Callable[[str], None]

DEPLOYMENT = "dev"
_POLL_SECONDS = 0.5
_CANCEL_SECONDS = 120.0  # a gang has a minute to save its checkpoint, then it is ended


class RunFailed(ElasticError):  # noqa: N818  (a fact about a run)
    """A flow run did not complete."""


class _Follower:
    """Waits for a run, shows its log, and cancels it at Ctrl-C."""

    def __init__(
        self, client: SyncPrefectClient, run: FlowRun, show: Show, is_alive: Callable[[], bool]
    ) -> None:
        self._client, self._run, self._show, self._is_alive = client, run, show, is_alive
        self._log = TreeFollower(client, run, show)
        self._cancelled = False
        self._deadline: float | None = None

    def wait(self) -> FlowRun:
        """Return the run when it has ended; raises KeyboardInterrupt when it was cancelled here."""
        while True:
            try:
                if self._look():
                    break
                time.sleep(_POLL_SECONDS)
            except KeyboardInterrupt:
                if self._deadline is not None:
                    raise
                self._deadline = time.monotonic() + _CANCEL_SECONDS
                self._show("Cancelling the run. Press Ctrl-C again to leave at once.")
        if self._deadline is not None and not (self._run.state and self._run.state.is_completed()):
            raise KeyboardInterrupt
        return self._run

    def _look(self) -> bool:
        if not self._is_alive():
            raise StackError(f"the stack has ended, and the run `{self._run.name}` with it.")
        if self._deadline is not None and time.monotonic() > self._deadline:
            waited = f"{_CANCEL_SECONDS:g} s"
            raise RunFailed(f"the run `{self._run.name}` was cancelled and did not end within {waited}.")
        try:
            if self._deadline is not None and not self._cancelled:
                self._client.set_flow_run_state(self._run.id, Cancelling(message="Ctrl-C in `dev run`"))
                self._cancelled = True
            self._run = self._client.read_flow_run(self._run.id)
            self._log.poll()
            if self._run.state is None or not self._run.state.is_final():
                return False
            self._log.finish()
        except httpx.TransportError:  # it starts, is busy, or ends: the next look tells
            return False
        except httpx.HTTPStatusError as error:
            if error.response.status_code < 500:  # SQLite refuses what is written at the same time by 503
                raise
            return False
        return True


def load_for(place: str, pools: Mapping[str, str]) -> Flow[Any, Any]:
    """Return the flow that `FILE[:FLOW]` names, if a stack has all pools that its steps name."""
    flow = load_flow(place)
    for step in find_steps(flow):
        if step.work_pool and step.work_pool not in pools:
            have = ", ".join(f"`{pool}`" for pool in pools)
            raise SpecError(
                f"the step `{step.name}` runs in the pool `{step.work_pool}`, which the stack does not have. "
                f"It has {have}. Start one with `--pool {step.work_pool}`."
            )
    return flow


def run_flow(
    flow: Flow[Any, Any],
    parameters: Mapping[str, Any],
    pools: Mapping[str, str],
    *,
    show: Show,
    is_alive: Callable[[], bool],
) -> Any:
    """Run a flow in the pool `driver` and return its value.

    Ctrl-C cancels the run and waits for its end; a second one leaves at once.

    Args:
        flow: At the top level of a Python file.
        parameters: Of the run.
        pools: Name and type of the stack's pools.
        show: Takes the link, and what the run and its descendants log, line by line.
        is_alive: Whether the stack still runs.

    Raises:
        RunFailed: If it did not complete.
        StackError: If the stack ended before it.
    """
    report = deploy(flow, work_pool=DRIVER_POOL, name=DEPLOYMENT, pools=pools)
    for warning in report.warnings:
        show(f"Warning: {warning}")
    with get_client(sync_client=True) as client:
        run = _create_run(client, report.deployment_id, parameters)
    show(f"Run {run.name!r}: {url_for(run)}")
    # Prefect repeats a request for more than a minute; who follows asks again anyway, and looks up meanwhile.
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(sync_client=True) as client:
        run = _Follower(client, run, show, is_alive).wait()
    assert run.state is not None
    if not run.state.is_completed():
        said = run.state.message or "(no message)"
        raise RunFailed(f"the run `{run.name}` ended as {run.state.name}: {said}")
    return read_result(run)


def render_value(value: Any) -> str:
    """Return a value as one line of JSON; tensors and arrays as numbers, what JSON does not know as text."""
    return pydantic_core.to_json(value, fallback=_to_plain, inf_nan_mode="strings").decode()


def _to_plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def _create_run(client: SyncPrefectClient, deployment_id: UUID, parameters: Mapping[str, Any]) -> FlowRun:
    try:
        return client.create_flow_run_from_deployment(deployment_id, parameters=dict(parameters))
    except httpx.HTTPStatusError as error:
        if error.response.status_code not in (409, 422):
            raise
        raise SpecError(f"the parameters are not accepted: {_read_detail(error.response)}") from error


def _read_detail(response: httpx.Response) -> str:
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return response.text


def read_result(run: FlowRun) -> Any:
    """Return what a completed run returned.

    Raises:
        RunFailed: If its value was not stored, or cannot be read here.
    """
    assert run.state is not None
    try:
        return run.state.result()
    except MissingResult as error:
        raise RunFailed(
            f"the run `{run.name}` completed, but its value was not stored. Take `persist_result=False` away "
            "from its flow."
        ) from error
