"""The key that signs pickles: one for a workspace, made once, the same on all its machines."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import httpx
import pytest
from prefect.blocks.system import Secret
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_torch_elastic import signing
from prefect_torch_elastic.errors import StoreError
from prefect_torch_elastic.signing import BLOCK_NAME, fetch_run_secret, forget_key

pytestmark = pytest.mark.timeout(120)


def remove_block() -> None:
    with get_client(sync_client=True) as client:
        try:
            block = client.read_block_document_by_name(BLOCK_NAME, block_type_slug="secret")
        except ObjectNotFound:
            return
        client.delete_block_document(block.id)


def save_block(value: object) -> None:
    cast("Any", Secret)(value=value).save(BLOCK_NAME, overwrite=True, _sync=True)


@pytest.fixture
def workspace(prefect_server, monkeypatch) -> Iterator[str]:
    """A workspace without a key, in which this process has asked for none."""
    monkeypatch.setattr(signing, "_keys", {})
    remove_block()
    yield prefect_server
    remove_block()


# ---------------------------------------------------------------- the block


def test_first_call_makes_the_block_and_each_flow_run_has_a_key_of_its_own(workspace):
    secret = fetch_run_secret("flow-run")
    assert len(secret) == 32
    assert fetch_run_secret("flow-run") == secret != fetch_run_secret("another")
    block: Any = cast("Any", Secret.load)(BLOCK_NAME, _sync=True)
    assert secret.hex() not in block.get()


def test_key_is_masked_in_lists_of_blocks(workspace):
    fetch_run_secret("flow-run")
    with get_client(sync_client=True) as client:
        block = client.read_block_document_by_name(BLOCK_NAME, "secret", include_secrets=False)
    assert set(block.data["value"]) == {"*"}


def test_drivers_that_start_together_agree_on_the_key(workspace):
    together = threading.Barrier(4)

    def ask(_: int) -> bytes:  # what a process of its own does: nothing is shared but the API
        together.wait(30)
        return signing._fetch_or_create(workspace)

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(ask, range(4)))) == 1


def test_another_process_gets_the_same_key(workspace, run_script):
    secret = fetch_run_secret("flow-run")
    other = run_script(
        "from prefect_torch_elastic.signing import fetch_run_secret\n"
        "print(fetch_run_secret('flow-run').hex())\n"
    )
    assert other.stdout.strip() == secret.hex()


def test_process_keeps_the_key_that_it_got(workspace):
    secret = fetch_run_secret("flow-run")
    remove_block()
    assert fetch_run_secret("flow-run") == secret


def test_key_that_was_made_again_is_fetched_after_the_old_one_is_forgotten(workspace):
    secret = fetch_run_secret("flow-run")
    save_block("torch-elastic-1:" + "5e" * 32)
    assert fetch_run_secret("flow-run") == secret
    forget_key()
    assert fetch_run_secret("flow-run") != secret


async def test_key_is_fetched_inside_a_running_event_loop(workspace):
    secret = await asyncio.to_thread(fetch_run_secret, "flow-run")
    signing._keys.clear()
    assert fetch_run_secret("flow-run") == secret


async def test_key_is_made_inside_a_running_event_loop(workspace):
    assert len(fetch_run_secret("flow-run")) == 32


@pytest.mark.parametrize(
    "value",
    [
        pytest.param("hunter2", id="text"),
        pytest.param("torch-elastic-1:00ff", id="short"),
        pytest.param("torch-elastic-1:" + "g" * 64, id="no-hex"),
        pytest.param({"key": "hunter2"}, id="mapping"),
        pytest.param(17, id="number"),
    ],
)
def test_block_of_somebody_else_is_named_with_the_cure(workspace, value):
    save_block(value)
    with pytest.raises(StoreError) as refused:
        fetch_run_secret("flow-run")
    assert "`secret/torch-elastic-signing-key` holds something else" in str(refused.value)
    assert "`prefect block delete secret/torch-elastic-signing-key`" in str(refused.value)
    assert "hunter2" not in str(refused.value)
    remove_block()  # the cure works, and the error was not kept
    assert len(fetch_run_secret("flow-run")) == 32


# ---------------------------------------------------------------- an API that does not do it


@dataclass
class FakeAPI:
    """Gives one answer to everything, or only to the first requests: later ones reach the real API."""

    status: int = 200
    text: str = "{}"
    until: float = float("inf")
    real: str = ""
    requests: int = 0

    def answer(self, path: str) -> tuple[int, str]:
        self.requests += 1
        if self.requests <= self.until:
            return self.status, self.text
        found = httpx.get(self.real.removesuffix("/api") + path)
        return found.status_code, found.text


@pytest.fixture
def fake_api(monkeypatch) -> Iterator[FakeAPI]:
    api = FakeAPI()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = api.answer(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    monkeypatch.setattr(signing, "_keys", {})
    monkeypatch.setattr(signing, "_SECONDS_BETWEEN_TRIES", 0.05)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{server.server_port}/api"}):
        yield api
    server.shutdown()
    server.server_close()


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What is said outside of task runs; Prefect's loggers may not propagate."""
    texts: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    logger, handler = logging.getLogger("prefect.torch_elastic"), Handler(logging.WARNING)
    logger.addHandler(handler)
    yield texts
    logger.removeHandler(handler)


def test_api_that_is_away_is_named_with_the_cure_within_the_patience(monkeypatch):
    monkeypatch.setattr(signing, "_keys", {})
    monkeypatch.setattr(signing, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(signing, "_SECONDS_BETWEEN_TRIES", 0.05)
    began = time.monotonic()
    away = temporary_settings({PREFECT_API_URL: "http://someone:hunter2@127.0.0.1:9/api"})
    with away, pytest.raises(StoreError) as refused:
        fetch_run_secret("flow-run")
    assert 0.5 <= time.monotonic() - began < 5
    assert "`http://127.0.0.1:9/api`" in str(refused.value)
    assert "ConnectError" in str(refused.value)
    assert "`prefect config view`" in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_api_that_comes_back_is_asked_again_and_the_wait_is_said_once(workspace, fake_api, warnings):
    with temporary_settings({PREFECT_API_URL: workspace}):
        secret = fetch_run_secret("flow-run")
    fake_api.status, fake_api.until, fake_api.real = 500, 2, workspace
    assert fetch_run_secret("flow-run") == secret
    assert fake_api.requests == 3
    (warning,) = warnings
    assert "does not answer (HTTP 500" in warning


@pytest.mark.parametrize("status", [401, 403])
def test_api_that_refuses_is_asked_once_and_the_cure_is_a_key(fake_api, status):
    fake_api.status = status
    with pytest.raises(StoreError, match=rf"HTTP {status}.*`PREFECT_API_KEY`"):
        fetch_run_secret("flow-run")
    assert fake_api.requests == 1


def test_address_that_is_no_api_is_an_error(fake_api):
    fake_api.text = "<!DOCTYPE html>"
    with pytest.raises(StoreError, match="can be neither read nor made"):
        fetch_run_secret("flow-run")
    assert fake_api.requests == 1


def test_hidden_key_is_told_from_another_content():
    with pytest.raises(StoreError, match=r"asterisks.*may read the secrets of blocks"):
        signing._parse("********")


# ---------------------------------------------------------------- calls of one process


@dataclass
class FakeWorkspace:
    """Holds each question until it is let go."""

    answers: list[bytes | BaseException]
    asked: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    go_on: threading.Event = field(default_factory=threading.Event)
    questions: int = 0

    def fetch(self, api: str) -> bytes:
        self.questions += 1
        answer = self.answers[min(self.questions, len(self.answers)) - 1]
        self.asked.release()
        assert self.go_on.wait(30)
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.fixture
def ask_at_once(monkeypatch):
    """Start calls in threads, which wait for the one that asks; return what each returned or raised."""
    monkeypatch.setattr(signing, "_keys", {})

    def ask(fake: FakeWorkspace, calls: int) -> list[Any]:
        monkeypatch.setattr(signing, "_fetch_or_create", fake.fetch)

        def call(_: int) -> Any:
            try:
                return fetch_run_secret("flow-run")
            except BaseException as error:  # noqa: BLE001  (the tests look at it)
                return error

        with ThreadPoolExecutor(calls) as threads:
            results = threads.map(call, range(calls))
            assert fake.asked.acquire(timeout=30)
            time.sleep(0.1)
            fake.go_on.set()
            return list(results)

    return ask


def test_calls_that_start_together_ask_once(ask_at_once):
    fake = FakeWorkspace([b"s" * 32])
    assert len(set(ask_at_once(fake, 8))) == 1
    assert fake.questions == 1


def test_question_that_is_under_way_is_not_forgotten(monkeypatch):
    asked: Future[bytes] = Future()
    monkeypatch.setattr(signing, "_keys", {"api": asked, "other": Future()})
    signing._keys["other"].set_result(b"s" * 32)
    forget_key()
    assert signing._keys == {"api": asked}


def test_calls_that_wait_for_a_failed_question_fail_with_it_and_the_next_one_asks_again(ask_at_once):
    fake = FakeWorkspace([StoreError("away"), b"s" * 32])
    errors = ask_at_once(fake, 4)
    assert [str(error) for error in errors] == ["away"] * 4
    assert len(set(map(id, errors))) == 4
    assert fake.questions == 1
    assert len(fetch_run_secret("flow-run")) == 32


def test_call_asks_itself_when_the_one_that_asked_is_stopped(ask_at_once):
    fake = FakeWorkspace([KeyboardInterrupt(), b"s" * 32])
    results = ask_at_once(fake, 4)
    assert [type(result) for result in results].count(KeyboardInterrupt) == 1
    assert len({result for result in results if isinstance(result, bytes)}) == 1
    assert fake.questions == 2
