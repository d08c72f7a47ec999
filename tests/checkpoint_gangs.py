"""Real ranks for tests of checkpoints: they meet at a TCPStore and run what they get.

Ranks that train with torch's collectives are processes that stay (`Gangs`). Where the session alone is looked
at, threads do (`run_ranks`): a test can hold them with events, and patch what they use.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from prefect_torch_elastic.checkpoint.session import CheckpointSession
from prefect_torch_elastic.store import Store
from prefect_torch_elastic.store.directory import DirectoryStore
from tests.checkpoint_stores import WatchedStore, open_session

ANSWER_SECONDS = 80.0
STACKS_SECONDS = 60.0  # then a rank prints where it stands, and ends


@dataclass(frozen=True, kw_only=True)
class Seat:
    """What a rank knows of its gang."""

    rank: int
    world_size: int
    port: int

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    @contextmanager
    def process_group(self) -> Iterator[None]:
        """Give the rank a gloo group of all ranks."""
        from torch import distributed
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        client = TCPStore(*self.address, is_master=False, wait_for_workers=False)
        distributed.init_process_group(
            "gloo", store=PrefixStore("group", client), rank=self.rank, world_size=self.world_size
        )
        try:
            yield
        finally:
            distributed.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What a rank raised, as text: exceptions of a rank are looked at, not raised again."""

    kinds: tuple[str, ...]
    text: str
    traceback: str


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """How a rank ended: `value` or `failure`, and after how many seconds."""

    value: Any
    failure: Failure | None
    seconds: float


def serve(channel: Connection) -> None:
    """Be a rank, again and again, until the channel is closed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed.fsdp  # FSDP2; the first test would pay for it

    torch.set_num_threads(1)
    # What gangs leave in cycles stays: a process group whose peers are gone, or a client whose server is, can
    # hang while it is collected. Real ranks leave by `os._exit`.
    gc.disable()
    while True:
        try:
            work, seat, options = channel.recv()
        except EOFError:
            os._exit(0)  # whatever a test left hanging
        started, value, failure = time.monotonic(), None, None
        faulthandler.dump_traceback_later(STACKS_SECONDS, exit=True)
        try:
            value = work(seat, **options)
        except BaseException as error:  # noqa: BLE001  (the test looks at it)
            kinds = tuple(kind.__name__ for kind in type(error).__mro__)
            failure = Failure(kinds=kinds, text=str(error), traceback=traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        channel.send(RankResult(value=value, failure=failure, seconds=time.monotonic() - started))


class Gangs:
    """A few processes that become gangs of up to so many ranks."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._channels: list[Connection] = []
        self._processes: list[Any] = []
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for number in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True, name=f"rank {number}")
            process.start()
            theirs.close()
            self._channels.append(ours)
            self._processes.append(process)

    def run(self, work: Callable[..., Any], world_size: int, **options: Any) -> list[RankResult]:
        """Run `work(seat, **options)` on each rank and return how each ended.

        Args:
            work: A function of a module; it is imported there.
            world_size: Ranks.
            options: The same for all ranks.
        """
        from torch._C._distributed_c10d import TCPStore

        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        channels = self._channels[:world_size]
        for rank, channel in enumerate(channels):
            channel.send((work, Seat(rank=rank, world_size=world_size, port=server.port), options))
        deadline = time.monotonic() + ANSWER_SECONDS
        results: list[RankResult] = []
        for rank, channel in enumerate(channels):
            try:
                assert channel.poll(max(0.1, deadline - time.monotonic())), f"rank {rank} did not answer"
                results.append(channel.recv())
            except (AssertionError, EOFError, ConnectionError) as error:
                self.close()
                self._start()  # the next test gets ranks that work
                raise AssertionError(f"rank {rank} did not answer; stderr has all stacks") from error
        return results

    def values(self, work: Callable[..., Any], world_size: int, **options: Any) -> list[Any]:
        """Run `work` and return what the ranks returned; none may fail."""
        results = self.run(work, world_size, **options)
        for result in results:
            assert result.failure is None, result.failure.traceback
        return [result.value for result in results]

    def failures(self, work: Callable[..., Any], world_size: int, **options: Any) -> list[Failure]:
        """Run `work` and return what the ranks raised; all must fail."""
        failures = [result.failure for result in self.run(work, world_size, **options)]
        assert all(failures), failures
        return [failure for failure in failures if failure]

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join(5.0)
        self._channels, self._processes = [], []


def open_rank(seat: Seat, store: Store, **options: Any) -> CheckpointSession:
    """Return the session of a rank; `policy` options may be given directly."""
    options = {"meeting_timeout_seconds": 10.0, **options}
    return open_session(store, rank=seat.rank, world_size=seat.world_size, address=seat.address, **options)


def open_directory(
    seat: Seat,
    folder: str,
    *,
    before: Callable[[str, str], None] = lambda verb, key: None,
    **options: Any,
) -> CheckpointSession:
    """Return the session of a rank on a directory, with `before` called at each operation."""
    return open_rank(seat, WatchedStore(DirectoryStore(Path(folder)), before), **options)


def run_ranks(work: Callable[[Seat], Any], world_size: int = 2) -> list[Any]:
    """Run `work` on ranks that are threads and return what each returned or raised."""
    from torch._C._distributed_c10d import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(rank: int) -> Any:
        try:
            return work(Seat(rank=rank, world_size=world_size, port=server.port))
        except Exception as error:  # noqa: BLE001  (the test looks at it)
            return error

    with ThreadPoolExecutor(world_size) as pool:
        results = list(pool.map(run, range(world_size)))
    gc.collect()  # a client that outlives its server takes 5 s to go, wherever that happens
    return results
