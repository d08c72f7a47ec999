"""Stores that fail: for a moment, for good, silently, or on purpose."""

from __future__ import annotations

import errno
import logging
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prefect_torch_elastic.errors import MissingExtraError, ObjectMissing, StoreError
from prefect_torch_elastic.store import Store, open_store, probe_store

pytest.importorskip("obstore")
MIB = 1 << 20


pytestmark = pytest.mark.usefixtures("no_cloud_settings")


@pytest.fixture
def store(s3) -> Store:
    return open_store(s3.url("runs"), s3.credentials, request_timeout_seconds=5.0, retry_seconds=20.0)


def expect_refusal(run, *words: str) -> str:
    """Run what must fail at once with a message that has the cure and no secret, and return the message."""
    started = time.monotonic()
    with pytest.raises(StoreError) as caught:
        run()
    assert not isinstance(caught.value, ObjectMissing)
    assert time.monotonic() - started < 3.0
    message = str(caught.value)
    for word in words:
        assert word in message
    assert "not-for-the-eyes-of-others" not in message
    assert "Debug source" not in message
    return message


# --- a moment --------------------------------------------------------------------------------------------


def test_store_loses_nothing_when_a_tenth_of_requests_fails_c058(s3, store):
    s3.set_faults(fail_share=0.1)
    blocks = {f"block/{number:03}": os.urandom(1000) for number in range(100)}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(store.put, blocks, blocks.values()))
        read = dict(zip(blocks, map(bytes, pool.map(store.get, blocks)), strict=True))
    assert all(store.create(f"log/{number:03}", b"nonce") for number in range(50))
    assert read == blocks
    assert [entry.key for entry in store.list("block")] == sorted(blocks)
    store.delete(blocks)
    assert list(store.list("block")) == []
    assert any(call.status == 503 for call in s3.calls())
    assert s3.open_uploads() == 0


def test_store_waits_out_an_outage_and_says_so_once(s3, store, caplog):
    store.put("before", b"x")
    s3.start_outage(seconds=2.5)
    with caplog.at_level(logging.INFO, "prefect_torch_elastic.store"), ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: store.put(f"during/{number}", b"x"), range(4)))
    assert len(list(store.list("during"))) == 4
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "trying for up to 20 s" in line]) == 1
    assert len([line for line in lines if "answers again" in line]) == 1


def test_listing_is_taken_up_again_when_it_breaks_off(s3, store):
    for number in range(1500):
        s3.buckets.write("bucket", f"runs/log/{number:05}", b"")
    listing = store.list("log")
    seen = [next(listing).key for _ in range(10)]
    s3.set_faults(drop=3, only_methods=["GET"])
    seen += [entry.key for entry in listing]
    assert seen == [f"log/{number:05}" for number in range(1500)]
    assert s3.faults.drop == 0


def test_request_that_hangs_is_sent_again_after_its_time_limit(s3):
    store = open_store(s3.url("runs"), s3.credentials, request_timeout_seconds=1.0, retry_seconds=20.0)
    held, over = threading.Event(), threading.Event()

    def hold_first(request) -> None:
        if not held.is_set():
            held.set()
            over.wait(60.0)

    s3.before = hold_first
    started = time.monotonic()
    try:
        store.put("block", b"x")  # before the first one is over
    finally:
        over.set()
    assert 0.9 < time.monotonic() - started < 20.0


def test_large_write_has_longer_than_one_request(s3):
    """Its time limit counts the body: a result of minutes on a slow line would never be kept."""
    s3.set_faults(bytes_per_second=1 * MIB)
    store = open_store(s3.url("runs"), s3.credentials, request_timeout_seconds=1.0, retry_seconds=0.0)
    store.put("result", bytes(3 * MIB))
    assert store.get_range("result", 0, 10) == bytes(10)


def test_retries_leave_the_random_numbers_of_the_training_alone(s3, store):
    def draws() -> bool:
        random.seed(7)
        state = random.getstate()
        s3.set_faults(drop=2)
        store.put("block", b"x")
        return random.getstate() != state

    assert not all(draws() for _ in range(5))  # threads of Prefect draw now and then in this process


def test_signal_is_handled_between_two_tries(s3, store):
    s3.start_outage(seconds=30.0)
    main = threading.main_thread().ident
    assert main is not None
    import signal

    def stop(number: int, frame: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGUSR1)).start()
        started = time.monotonic()
        with pytest.raises(InterruptedError):
            store.get("block")
        assert time.monotonic() - started < 3.0
    finally:
        signal.signal(signal.SIGUSR1, before)


# --- a lost answer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lose_as", ["drop", "500"])
def test_create_is_ours_when_the_answer_was_lost_after_it_was_written(s3, store, lose_as):
    s3.set_faults(lose=1, lose_as=lose_as)
    assert store.create("log/1", b"nonce-a")
    assert bytes(store.get("log/1")) == b"nonce-a"
    assert s3.faults.lose == 0


@pytest.mark.parametrize("lose_as", ["drop", "500"])
def test_create_is_not_ours_when_its_lost_answer_was_a_refusal(s3, store, lose_as):
    s3.buckets.write("bucket", "runs/log/1", b"nonce-b")
    s3.set_faults(lose=1, lose_as=lose_as)
    assert not store.create("log/1", b"nonce-a")
    assert s3.buckets.read("bucket", "runs/log/1") == b"nonce-b"


def test_create_is_sent_again_when_the_request_was_lost(s3, store):
    s3.set_faults(drop=2)
    assert store.create("log/1", b"nonce-a")
    assert bytes(store.get("log/1")) == b"nonce-a"


def test_create_is_not_ours_when_another_wrote_while_the_request_was_lost(s3, store):
    def write_first(request) -> None:
        if request.method == "PUT":
            s3.buckets.write("bucket", "runs/log/1", b"nonce-b")
            raise ConnectionError

    s3.before = write_first
    assert not store.create("log/1", b"nonce-a")


def test_create_has_one_winner_when_answers_are_lost_in_a_race(s3, store):
    s3.set_faults(lose=8, fail_share=0.2)
    with ThreadPoolExecutor(16) as pool:
        wins = list(pool.map(lambda number: store.create("log/1", b"nonce-%d" % number), range(16)))
    assert wins.count(True) == 1
    assert bytes(store.get("log/1")) == b"nonce-%d" % wins.index(True)


# --- for good --------------------------------------------------------------------------------------------


def test_probe_refuses_a_store_that_ignores_conditions(s3, store):
    s3.set_faults(ignore_conditions=True)
    expect_refusal(lambda: probe_store(store), "s3://bucket/runs", "If-None-Match", "rclone")
    assert s3.buckets.keys("bucket") == []


def test_wrong_credentials_are_named_before_training_c059(s3, store):
    s3.set_faults(unknown_keys=["AKIAEXAMPLE"])
    expect_refusal(
        lambda: probe_store(store), "403 InvalidAccessKeyId", "Check the credentials", "s3://bucket/runs"
    )
    expect_refusal(lambda: list(store.list("log")), "403 InvalidAccessKeyId", "Check the credentials")


def test_missing_bucket_is_an_error_and_not_a_missing_object(s3):
    store = open_store("s3://no-such-bucket/runs", s3.credentials)
    for run in (
        lambda: store.put("a", b"x"),
        lambda: store.create("a", b"x"),
        lambda: store.get("a"),
        lambda: list(store.list("")),
        lambda: store.list_folders(""),
        lambda: store.delete(["a"]),
    ):
        expect_refusal(run, "NoSuchBucket", "Create the bucket", "s3://no-such-bucket/runs")


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (403, "RequestTimeTooSkewed", "clock"),
        (403, "SignatureDoesNotMatch", "Check the credentials"),
        (403, "AccessDenied", "read, write, list and delete"),
        (301, "PermanentRedirect", "another region"),
        (400, "AuthorizationHeaderMalformed", "AWS_REGION"),
        (501, "NotImplemented", "NotImplemented"),
        (507, "XMinioStorageFull", "Make room"),
    ],
)
def test_refusal_of_the_service_comes_with_its_cure(s3, store, status, code, words, monkeypatch):
    from tests.simulators import s3 as simulator
    from tests.simulators.s3_buckets import fail

    monkeypatch.setattr(simulator.S3Server, "_refuse", lambda self, request, faults: fail(status, code, "no"))
    expect_refusal(lambda: store.put("a", b"x"), "`a` in `s3://bucket/runs`", words)
    expect_refusal(lambda: store.get("a"), "`a` in `s3://bucket/runs`", words)


def test_page_that_is_no_object_store_is_no_missing_object(s3, store, monkeypatch):
    from tests.simulators import s3 as simulator
    from tests.simulators.s3_wire import Response

    page = Response(404, b"<html>nothing here</html>")
    monkeypatch.setattr(simulator.S3Server, "_refuse", lambda self, request, faults: page)
    expect_refusal(lambda: store.get("a"), "404", "Check the endpoint", "AWS_ENDPOINT_URL")


def test_refused_connection_is_given_up_at_the_deadline(s3):
    s3.close()
    store = open_store(s3.url("runs"), s3.credentials, request_timeout_seconds=5.0, retry_seconds=1.0)
    message = expect_refusal(
        lambda: store.get("a"), "connection refused", "Check the network and the endpoint"
    )
    assert "times in 1 s" in message


def test_no_credentials_at_all_are_named_at_once(s3, monkeypatch):
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    store = open_store(s3.url("runs"))
    expect_refusal(lambda: store.get("a"), "asking for credentials failed", "AWS_ACCESS_KEY_ID")


def test_account_that_is_not_named_is_found_when_the_store_is_opened():
    expect_refusal(lambda: open_store("az://container/runs"), "Account", "AZURE_STORAGE_ACCOUNT_NAME")


def test_environment_changes_nothing_that_the_log_depends_on(s3, monkeypatch):
    for name, value in {
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_BUCKET": "another",
        "AWS_CONDITIONAL_PUT": "disabled",
        "AWS_SESSION_TOKEN": "of-other-keys",
        "AWS_ACCESS_KEY_ID": "other",
    }.items():
        monkeypatch.setenv(name, value)
    headers: list[dict[str, str]] = []
    s3.before = lambda request: headers.append(request.headers)
    probe_store(open_store(s3.url("runs"), s3.credentials))
    assert all("Credential=AKIAEXAMPLE/" in sent["authorization"] for sent in headers)
    assert not any("x-amz-security-token" in sent for sent in headers)


def test_obstore_that_is_not_installed_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtraError, match=r"prefect-torch-elastic\[store\]"):
        open_store("s3://bucket/runs")


# --- directories -----------------------------------------------------------------------------------------


def test_directory_flushes_the_file_and_its_folders_before_put_returns(tmp_path, monkeypatch):
    synced: list[str] = []
    real = os.fsync

    def note(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        real(file)

    monkeypatch.setattr(os, "fsync", note)
    open_store(str(tmp_path)).put("run/log/1", b"x")
    assert synced[:2] == [str(tmp_path), str(tmp_path / "run")]  # the names of the new folders
    assert Path(synced[2]).parent == tmp_path / "run" / "log"  # the file, before it has its name
    assert synced[3:] == [str(tmp_path / "run" / "log")]
    synced.clear()
    assert open_store(str(tmp_path)).create("run/log/2", b"x")
    assert [Path(path).name.startswith(".tmp-") for path in synced] == [True, False]


def test_directory_is_private(tmp_path):
    open_store(str(tmp_path / "store")).put("run/log/1", b"x")
    assert (tmp_path / "store" / "run").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "store" / "run" / "log" / "1").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("write", ["put", "create"])
def test_directory_shows_nothing_when_the_writer_is_killed_c050(tmp_path, write):
    program = f"""
import os, signal
from prefect_torch_elastic.store import open_store
store = open_store({str(tmp_path)!r})
store.put("run/old", b"old")
real, os.fsync = os.fsync, lambda file: os.kill(os.getpid(), signal.SIGKILL)
store.{write}("run/new", b"x" * 100_000)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == -9
    store = open_store(str(tmp_path))
    (left,) = (tmp_path / "run").glob(".tmp-*")
    assert [entry.key for entry in store.list("")] == ["run/old"]
    with pytest.raises(ObjectMissing):
        store.get("run/new")
    assert store.create("run/new", b"second")
    os.utime(left, (1.0, 1.0))
    store.delete(["run/old", "run/new"])
    assert list(tmp_path.iterdir()) == []  # what was left is old, so it does not keep the folder


def test_directory_keeps_a_folder_that_another_process_writes_into(tmp_path):
    store = open_store(str(tmp_path))
    store.put("run/a", b"x")
    (tmp_path / "run" / ".tmp-00").write_bytes(b"half of it")
    store.delete(["run/a"])
    assert (tmp_path / "run" / ".tmp-00").exists()


def test_directory_writes_while_another_thread_removes_empty_folders(tmp_path):
    store = open_store(str(tmp_path))
    store.put("keep", b"")

    def write_and_delete(number: int) -> None:
        for turn in range(40):
            store.put(f"run/deep/{number}-{turn}", b"x")
            store.delete([f"run/deep/{number}-{turn}"])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write_and_delete, range(4)))
    assert [entry.key for entry in store.list("")] == ["keep"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keep"]


def test_directory_that_cannot_be_written_is_found_by_the_probe_c059(tmp_path):
    (tmp_path / "file").write_text("in the way")
    expect_refusal(
        lambda: probe_store(open_store(str(tmp_path / "file"))), str(tmp_path / "file"), "another `store=`"
    )
    expect_refusal(lambda: probe_store(open_store("/proc/torch-elastic")), "/proc/torch-elastic")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_directory_without_the_right_to_write_names_the_user_c059(tmp_path):
    tmp_path.chmod(0o500)
    expect_refusal(lambda: probe_store(open_store(str(tmp_path))), "Permission denied", f"user {os.getuid()}")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, ("3.0 MB", "MB are free", "Make room")),
        (errno.EROFS, ("Read-only", "another `store=`")),
    ],
    ids=["full", "read-only"],
)
def test_directory_that_fails_in_a_write_leaves_no_file_c059(tmp_path, monkeypatch, number, words):
    store = open_store(str(tmp_path))
    store.put("run/old", b"old")

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(StoreError) as caught:
        store.put("run/new", bytes(3_000_000))
    monkeypatch.undo()
    assert all(word in str(caught.value) for word in ("run/new", *words))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["old"]


def test_directory_without_hard_links_is_refused_by_the_probe(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    expect_refusal(lambda: probe_store(open_store(str(tmp_path))), "without hard links", "s3://")
    assert list(tmp_path.rglob("*")) == []


def test_directory_that_is_gone_is_no_empty_store(tmp_path):
    store = open_store(str(tmp_path / "unmounted"))
    for run in (
        lambda: store.get("run/log/1"),
        lambda: list(store.list("run")),
        lambda: store.list_folders(""),
    ):
        expect_refusal(run, "does not exist", "mounted")
