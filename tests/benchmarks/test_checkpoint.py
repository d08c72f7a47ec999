"""Seconds of a save and of a load in S3: ours against s3torchconnector, DCP on s3fs, torch.save with boto3.

`python -m pytest tests/benchmarks -m benchmark -k checkpoint`; results are the last lines, JSON for programs.
`ratio` is a peer's time over ours. The store is an S3 server on loopback that keeps objects in memory, at
full speed and with 30 ms and 80 MB/s for each request, as S3 has them. All processes share the machine's
cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.benchmarks.checkpoint_gangs import PEER, S3LIKE, Contest, Size, Taken, contest, report

MIB = int(os.environ.get("PTE_BENCH_CHECKPOINT_MIB", "512"))
ROUNDS = int(os.environ.get("PTE_BENCH_ROUNDS", "5"))
SLOW_ROUNDS = min(ROUNDS, 3)
CLIENTS = ("fsspec", "boto3", PEER, "ours")
_MISSING = [name for name in ("boto3", "s3fs", "s3torchconnector", "tenacity") if find_spec(name) is None]
_LEAST_WRITE_RATIO = 2.5  # below it even a busy machine is no excuse

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        bool(_MISSING), reason=f"{', '.join(_MISSING)} missing: run pip install '.[benchmark]'"
    ),
]


def check_memory(written: Taken, read: Taken) -> None:
    assert written.extra_mib["ours"] <= 100
    assert read.extra_mib["ours"] <= 150


@pytest.fixture(scope="module", params=[pytest.param(1, id="rank1"), pytest.param(2, id="ranks2")])
def clients(request: pytest.FixtureRequest) -> Iterator[Contest]:
    """The clients, with a state of 32 tensors, as one process each or as two."""
    with contest(Size(count=32, kib=MIB * 1024 // 32, ranks=request.param), CLIENTS) as contestants:
        yield contestants


def test_checkpoint_is_faster_than_its_peers(clients: Contest):
    few = {"fsspec": 2, "boto3": 3}
    clients.set_regime()
    written, read = clients.save(ROUNDS, few=few), clients.load(ROUNDS, few=few)
    report("ckpt-write", written, clients.size, targets={PEER: 3.5, "fsspec": 9})
    report("ckpt-read", read, clients.size, targets={PEER: 2, "fsspec": 8})
    check_memory(written, read)
    assert (written.ratio(PEER) or 0) >= _LEAST_WRITE_RATIO


def test_checkpoint_is_faster_than_its_peers_when_requests_take_as_long_as_on_s3(clients: Contest):
    few = {"fsspec": 1}  # it takes half a minute
    clients.set_regime(**S3LIKE)
    written, read = clients.save(SLOW_ROUNDS, few=few), clients.load(SLOW_ROUNDS, few=few)
    report("ckpt-s3like-write", written, clients.size, targets={PEER: 2, "fsspec": 15})
    report("ckpt-s3like-read", read, clients.size, targets={PEER: 1.5, "fsspec": 15})
    check_memory(written, read)


def test_checkpoint_of_many_small_tensors_is_faster_than_its_peers():
    """Save and load together; Fsspec only saves, its load took more than four minutes."""
    size = Size(count=3000, kib=64)
    with contest(size, CLIENTS) as clients:
        clients.set_regime(latency_seconds=S3LIKE["latency_seconds"])
        written = clients.save(SLOW_ROUNDS, few={"fsspec": 1})
        read = clients.load(SLOW_ROUNDS, few={"fsspec": 0})
    both = Taken()
    for client in read.seconds:
        both.seconds[client] = [
            sum(pair) for pair in zip(written.seconds[client], read.seconds[client], strict=True)
        ]
        both.extra_mib[client] = max(written.extra_mib[client], read.extra_mib[client])
    report(
        "ckpt-small",
        both,
        size,
        targets={PEER: 2},
        ratio_write=round(written.ratio(PEER) or 0, 3),
        ratio_read=round(read.ratio(PEER) or 0, 3),
        ratio_write_fsspec=round(written.ratio("fsspec") or 0, 3),
    )
