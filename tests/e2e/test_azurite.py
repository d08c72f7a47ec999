"""The store on Azure Blob Storage, as far as Microsoft's emulator goes: `npm install -g azurite`."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate

import pytest

from prefect_torch_elastic.errors import ObjectMissing, StoreError
from prefect_torch_elastic.store import Store, open_store, probe_store

pytestmark = pytest.mark.skipif(
    shutil.which("azurite-blob") is None, reason="`azurite-blob` is not on PATH: npm install -g azurite"
)
ACCOUNT = "devstoreaccount1"
# Every Azurite has this account; Microsoft publishes its key.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def create_container(port: int, name: str) -> None:
    """Create a container with a request signed by hand: obstore makes objects only."""
    date, version = formatdate(usegmt=True), "2021-08-06"
    text = f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:{version}\n"
    text += f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    mac = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Content-Length": "0",
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(mac).decode()}",
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("PUT", f"/{ACCOUNT}/{name}?restype=container", headers=headers)
    answer = connection.getresponse()
    assert answer.status == 201, answer.read()


@pytest.fixture(scope="module")
def azurite(tmp_path_factory) -> Iterator[str]:
    """The connection string of an emulator that has a container named `container`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("azurite")
    command = ["azurite-blob", "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder)]
    process = subprocess.Popen(
        [*command, "--silent", "--skipApiVersionCheck", "--disableTelemetry"], stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline, "azurite does not listen"
            time.sleep(0.1)
        create_container(port, "container")
        endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        yield f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def store(azurite, request) -> Store:
    credentials = {"kind": "azure", "connection_string": azurite}
    return open_store(f"az://container/{request.node.name}", credentials, retry_seconds=5.0)


def test_azure_store_passes_the_probe(store):
    probe_store(store)
    assert list(store.list("")) == []


def test_azure_store_writes_reads_lists_and_deletes(store):
    data = os.urandom(9 << 20)
    store.put("run/block/0", memoryview(data))
    store.put("run/block/0", memoryview(data))
    store.put("run/log/a b#%41", b"x")
    assert store.get("run/block/0") == data
    assert store.get_range("run/block/0", 5_000_000, 100) == data[5_000_000:5_000_100]
    assert [entry.key for entry in store.list("run")] == ["run/block/0", "run/log/a b#%41"]
    assert [entry.key for entry in store.list("run", after="run/block/0")] == ["run/log/a b#%41"]
    assert list(store.list_folders("run")) == ["block", "log"]
    store.delete(["run/none", "run/block/0", "run/other", "run/log/a b#%41"])
    assert list(store.list("")) == []


def test_azure_store_names_what_is_missing_or_short(store):
    with pytest.raises(ObjectMissing, match="run/none"):
        store.get("run/none")
    store.put("run/block", bytes(100))
    for start in (90, 100):
        with pytest.raises(StoreError, match="cut short"):
            store.get_range("run/block", start, 20)


def test_azure_create_has_one_winner_of_sixteen(store):
    with ThreadPoolExecutor(16) as pool:
        wins = list(pool.map(lambda number: store.create("log/1", b"nonce-%d" % number), range(16)))
    assert wins.count(True) == 1
    assert bytes(store.get("log/1")) == b"nonce-%d" % wins.index(True)


def test_azure_container_that_is_missing_is_named(azurite):
    store = open_store("az://other/runs", {"kind": "azure", "connection_string": azurite})
    with pytest.raises(StoreError, match="Create the container") as caught:
        store.get("a")
    assert not isinstance(caught.value, ObjectMissing)


def test_azure_key_that_is_wrong_is_named_and_not_shown(azurite):
    wrong = base64.b64encode(b"another key").decode()
    store = open_store(
        "az://container/runs", {"kind": "azure", "connection_string": azurite.replace(KEY, wrong)}
    )
    with pytest.raises(StoreError, match="Check the credentials") as caught:
        store.put("a", b"x")
    assert wrong not in str(caught.value)
