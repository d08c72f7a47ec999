"""What every store does alike: a directory, memory, our S3 server and moto's."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from prefect_torch_elastic.errors import ObjectMissing, SpecError, StoreError
from prefect_torch_elastic.store import Store, open_store, probe_store
from tests.simulators.s3 import S3Process, S3Server

pytest.importorskip("obstore")
MIB = 1 << 20


pytestmark = pytest.mark.usefixtures("no_cloud_settings")


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(scope="module")
def moto() -> Iterator[dict[str, str]]:
    """Credentials of a moto server that has a bucket named `bucket`."""
    server_module = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    server = server_module.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "AKIAEXAMPLE", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=endpoint, **keys).create_bucket(Bucket="bucket")
    yield {
        "kind": "aws",
        "access_key_id": keys["aws_access_key_id"],
        "secret_access_key": keys["aws_secret_access_key"],
        "endpoint_url": endpoint,
    }
    server.stop()


@pytest.fixture(params=["directory", "memory", "s3", "moto"])
def store(request, tmp_path) -> Store:
    prefix = secrets.token_hex(4)
    match request.param:
        case "directory":
            return open_store(str(tmp_path))
        case "memory":
            return open_store("memory://")
        case "s3":
            server = request.getfixturevalue("s3")
            return open_store(server.url(f"{prefix}/a prefix"), server.credentials)
        case _:
            return open_store(f"s3://bucket/{prefix}/a prefix", request.getfixturevalue("moto"))


def keys_of(store: Store, prefix: str = "", *, after: str = "") -> list[str]:
    return [entry.key for entry in store.list(prefix, after=after)]


@pytest.mark.parametrize("size", [0, 1, 3 * MIB + 1], ids=["empty", "one-byte", "large"])
def test_store_returns_what_was_put(store, size):
    data = os.urandom(size)
    store.put("run/block", data)
    assert bytes(store.get("run/block")) == data


def test_put_takes_a_view_of_live_memory(store):
    memory = bytearray(os.urandom(2 * MIB))
    store.put("run/block", memoryview(memory)[MIB:])
    assert store.get("run/block") == memory[MIB:]


def test_put_replaces_an_object(store):
    store.put("run/latest", b"a long first version")
    store.put("run/latest", b"second")
    assert bytes(store.get("run/latest")) == b"second"


def test_get_raises_object_missing_when_there_is_none(store):
    store.put("run/block/0", b"x")
    for key in ("run/other", "run/block", "other/deep/key"):
        with pytest.raises(ObjectMissing, match=key):
            store.get(key)
        with pytest.raises(ObjectMissing, match=key):
            store.get_range(key, 0, 1)


def test_get_range_returns_exactly_the_bytes(store):
    store.put("run/block", bytes(range(100)))
    assert bytes(store.get_range("run/block", 10, 5)) == bytes(range(10, 15))
    assert bytes(store.get_range("run/block", 0, 100)) == bytes(range(100))
    assert bytes(store.get_range("run/block", 99, 1)) == b"\x63"
    assert bytes(store.get_range("run/block", 40, 0)) == b""


@pytest.mark.parametrize("start", [90, 100, 5000], ids=["over-the-end", "at-the-end", "beyond"])
def test_get_range_names_an_object_that_is_cut_short_c056(store, start):
    store.put("run/block", bytes(100))
    with pytest.raises(StoreError, match=r"run/block.*cut short") as caught:
        store.get_range("run/block", start, 20)
    assert not isinstance(caught.value, ObjectMissing)


def test_get_range_survives_a_length_from_a_hostile_manifest(store):
    store.put("run/block", bytes(100))
    with pytest.raises(StoreError, match="cut short"):
        store.get_range("run/block", 0, 1 << 50)


def test_create_writes_only_once(store):
    assert store.create("run/log/1", b"mine")
    assert not store.create("run/log/1", b"theirs")
    assert bytes(store.get("run/log/1")) == b"mine"


def test_create_counts_its_own_bytes_as_ours(store):
    assert store.create("run/log/1", b"nonce-1")
    assert store.create("run/log/1", b"nonce-1")


def test_create_has_one_winner_when_sixteen_threads_race(store):
    start = threading.Barrier(16)

    def race(number: int) -> bool:
        start.wait()
        return store.create("run/log/7", b"nonce-%d" % number)

    with ThreadPoolExecutor(16) as pool:
        wins = list(pool.map(race, range(16)))
    assert wins.count(True) == 1
    assert bytes(store.get("run/log/7")) == b"nonce-%d" % wins.index(True)


def test_list_is_recursive_and_sorted_by_key(store):
    keys = ["a.b", "a/x", "a/y/z", "a0", "b/ü x#%41", "b/1", "é"]
    for key in reversed(keys):
        store.put(key, b"12")
    assert keys_of(store) == sorted(keys)
    assert keys_of(store, "a") == keys_of(store, "a/") == ["a/x", "a/y/z"]
    assert keys_of(store, "nothing/here") == []


def test_list_starts_after_a_key(store):
    for number in range(5):
        store.put(f"run/log/{number:03}", b"x")
    store.put("run/other", b"x")
    assert keys_of(store, "run/log", after="run/log/002") == ["run/log/003", "run/log/004"]
    assert keys_of(store, "run/log", after="run/log/0025") == ["run/log/003", "run/log/004"]
    assert keys_of(store, "run", after="run/log/004") == ["run/other"]
    assert keys_of(store, "run/log", after="run/z") == []


def test_list_says_size_and_time(store):
    store.put("run/block", b"12345")
    (entry,) = store.list("run")
    assert entry.size == 5
    assert entry.modified > 1.7e9


def test_list_goes_on_past_a_page(tmp_path, s3):
    for store in (open_store(str(tmp_path)), open_store(s3.url("pages"), s3.credentials)):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number, store=store: store.put(f"run/{number:04}", b""), range(2100)))
        assert keys_of(store, "run") == [f"run/{number:04}" for number in range(2100)]
        assert len(keys_of(store, "run", after="run/0999")) == 1100
        assert list(store.list_folders("")) == ["run"]
        store.delete(f"run/{number:04}" for number in range(2100))
        assert keys_of(store) == []


def test_list_folders_names_what_lies_directly_below(store):
    for key in ("run/a/1", "run/a/2", "run/b c/1/2", "run/file", "top"):
        store.put(key, b"x")
    assert list(store.list_folders("run")) == ["a", "b c"]
    assert list(store.list_folders("")) == ["run"]
    assert list(store.list_folders("run/none")) == []


def test_delete_removes_objects_and_ignores_missing_ones(store):
    for key in ("run/a", "run/b/c", "run/d"):
        store.put(key, b"x")
    store.delete(["run/a", "run/none", "none/at/all", "run/b/c"])
    assert keys_of(store) == ["run/d"]
    store.delete([])
    store.delete(key for key in ["run/d"])
    assert keys_of(store) == []
    assert list(store.list_folders("")) == []


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a//b",
        "a/",
        "a/./b",
        "a/\x00b",
        "a\\b",
        "a/.tmp-x",
        "k" * 2000,
    ],
    ids=[
        "empty",
        "absolute",
        "up",
        "up-twice",
        "empty-part",
        "slash",
        "dot",
        "nul",
        "backslash",
        "tmp",
        "long",
    ],
)
def test_store_refuses_a_key_that_could_leave_it(store, key):
    data = b"x"
    attempts = [
        lambda: store.put(key, data),
        lambda: store.create(key, data),
        lambda: store.get(key),
        lambda: store.get_range(key, 0, 1),
        lambda: store.delete([key]),
    ]
    for attempt in attempts:
        with pytest.raises(StoreError, match="key") as caught:
            attempt()
        assert not isinstance(caught.value, ObjectMissing)
    assert keys_of(store) == []


def test_probe_accepts_the_store_and_leaves_nothing(store):
    probe_store(store)
    assert keys_of(store) == []
    assert list(store.list_folders("")) == []


def test_url_names_the_store(store):
    assert store.url in repr(store)
    assert "secret" not in repr(store).lower()


def test_memory_stores_are_apart():
    open_store("memory://").put("a", b"x")
    assert keys_of(open_store("memory://")) == []


def test_open_store_takes_a_file_url(tmp_path):
    open_store(f"file://{tmp_path}/with%20space").put("a", b"x")
    assert (tmp_path / "with space" / "a").read_bytes() == b"x"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://host/x", "unknown scheme `ftp`"),
        ("file://user:topsecret@host/x", "three slashes"),
        ("s3://[topsecret@bucket", "is no URL"),
        ("s3:///prefix", "names no bucket"),
        ("s3://AKIA:topsecret@bucket/x", "store_credentials"),
        ("az://container/x?sv=1&sig=topsecret", "store_credentials"),
        ("s3://bucket/a/../b", "another folder"),
    ],
    ids=["scheme", "file-host", "bracket", "no-bucket", "keys-in-url", "sas-in-url", "prefix"],
)
def test_open_store_refuses_a_url_with_the_cure(url, words):
    with pytest.raises((StoreError, SpecError), match=words) as caught:
        open_store(url)
    assert "topsecret" not in str(caught.value)


def test_opening_a_directory_imports_neither_obstore_nor_torch():
    program = """
import json, sys, tempfile
from prefect_torch_elastic.store import open_store, probe_store
probe_store(open_store(tempfile.mkdtemp()))
print(json.dumps([name for name in ("obstore", "torch", "boto3", "prefect") if name in sys.modules]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == []


def test_simulator_serves_a_process_of_its_own():
    with S3Process() as server:
        store = open_store(server.url("runs"), server.credentials)
        probe_store(store)
        server.set_faults(fail_share=0.5)
        store.put("block", bytes(2 * MIB))
        server.set_faults(fail_share=0.0)
        assert len(store.get("block")) == 2 * MIB
        assert ("PUT", "runs/block", 2 * MIB, 200) in server.calls()
        assert server.open_uploads() == 0
        server.clear()
        assert keys_of(store) == []


def test_simulator_counts_open_uploads_and_serves_boto3(s3):
    boto3 = pytest.importorskip("boto3")
    client = boto3.client(
        "s3",
        endpoint_url=s3.endpoint,
        aws_access_key_id="AK",
        aws_secret_access_key="SK",
        region_name="us-east-1",
    )
    client.put_object(Bucket="bucket", Key="boto/small", Body=b"small")
    upload = client.create_multipart_upload(Bucket="bucket", Key="boto/large")["UploadId"]
    assert s3.open_uploads() == 1
    parts = [b"a" * 5 * MIB, b"b"]
    etags = [
        client.upload_part(Bucket="bucket", Key="boto/large", UploadId=upload, PartNumber=n, Body=part)[
            "ETag"
        ]
        for n, part in enumerate(parts, 1)
    ]
    client.complete_multipart_upload(
        Bucket="bucket",
        Key="boto/large",
        UploadId=upload,
        MultipartUpload={"Parts": [{"PartNumber": n, "ETag": etag} for n, etag in enumerate(etags, 1)]},
    )
    assert s3.open_uploads() == 0
    assert client.get_object(Bucket="bucket", Key="boto/large")["Body"].read() == b"".join(parts)
    assert client.head_object(Bucket="bucket", Key="boto/small")["ContentLength"] == 5
    listed = client.list_objects_v2(Bucket="bucket", Prefix="boto/")["Contents"]
    assert [entry["Key"] for entry in listed] == ["boto/large", "boto/small"]
