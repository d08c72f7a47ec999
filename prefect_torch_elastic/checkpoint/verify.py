"""Whether a checkpoint is what was committed: every manifest and block, by size and checksum. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from crc32c import crc32c

from prefect_torch_elastic.checkpoint.coverage import find_contradiction, find_gaps, parse_item_size
from prefect_torch_elastic.checkpoint.manifest import (
    DamagedError,
    Manifest,
    RankManifest,
    Signed,
    parse_manifest,
    parse_rank_manifest,
    render_block_key,
    render_folder,
    render_manifest_key,
    render_rank_key,
)
from prefect_torch_elastic.errors import ObjectMissing
from prefect_torch_elastic.runlog import Commit
from prefect_torch_elastic.store import Store

_READERS = 16  # each holds a whole block of 8 MiB; a load holds pieces of theirs, and has twice as many
_AT_ONCE = 64  # tasks that wait for a reader: an interrupt ends after these
_Place: TypeAlias = tuple[int, str, int, int]  # rank, key, size and checksum of a block
Progress: TypeAlias = Callable[[int], None]  # called with the bytes that were read since the last call


@dataclass(frozen=True, kw_only=True)
class Damage:
    """An object that is not what was written.

    Attributes:
        rank: Whose it is; None for the manifest of the whole checkpoint.
        key: Its key in the store.
        expected: What was committed.
        found: What is there now.
    """

    rank: int | None
    key: str
    expected: str
    found: str

    def __str__(self) -> str:
        whose = f"rank {self.rank}'s " if self.rank is not None else ""
        return f"{whose}`{self.key}`: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What `verify` found.

    Attributes:
        commit: The checkpoint.
        damages: Everything that is wrong with it; empty for a whole one.
        size_bytes: How many bytes were read.
    """

    commit: Commit
    damages: tuple[Damage, ...]
    size_bytes: int


def verify(store: Store, run_folder: str, commit: Commit, *, progress: Progress | None = None) -> Findings:
    """Read a whole checkpoint and return all that is damaged; nothing is written.

    Args:
        store: Where it is.
        run_folder: The run's folder there.
        commit: The checkpoint, from the run's log.
        progress: Gets the bytes that were read, now and then.

    Raises:
        StoreError: If the store cannot be read, which says nothing about the checkpoint.
    """
    check = _Check(store, progress or _ignore)
    manifest = check.read_manifest(run_folder, commit)
    if manifest is not None:
        folder = f"{run_folder}/{render_folder(commit.step, commit.uuid)}"
        ranks = [check.read_rank(folder, rank, signed) for rank, signed in enumerate(manifest.ranks)]
        check.compare(manifest, folder, [rank for rank in ranks if rank is not None])
        check.read_blocks(folder, [rank for rank in ranks if rank is not None])
    return Findings(commit=commit, damages=tuple(check.damages), size_bytes=check.size_bytes)


def fetch_manifest(store: Store, run_folder: str, commit: Commit) -> Manifest:
    """Return what a checkpoint says about itself.

    Raises:
        DamagedError: If its manifest is missing, or is not what was committed.
        StoreError: If the store cannot be read.
    """
    check = _Check(store, _ignore)
    manifest = check.read_manifest(run_folder, commit)
    if manifest is None:
        raise DamagedError(f"the checkpoint of step {commit.step} is damaged: {check.damages[0]}.")
    return manifest


class _Check:
    """One reading of a checkpoint."""

    def __init__(self, store: Store, progress: Progress) -> None:
        self._store, self._progress = store, progress
        self.damages: list[Damage] = []
        self.size_bytes = 0

    def read_manifest(self, run_folder: str, commit: Commit) -> Manifest | None:
        key = render_manifest_key(f"{run_folder}/{render_folder(commit.step, commit.uuid)}")
        expected = f"crc32c {commit.manifest_crc32c:08x}"
        data = self._fetch(key, rank=None, expected=expected)
        if data is None:
            return None
        self._count(len(data))
        if (found := crc32c(data)) != commit.manifest_crc32c:
            self._note(None, key, expected, f"crc32c {found:08x}")
            return None
        try:
            return parse_manifest(data, key=key)
        except DamagedError as error:
            self._note(None, key, "a manifest", str(error))
            return None

    def read_rank(self, folder: str, rank: int, signed: Signed) -> RankManifest | None:
        key = render_rank_key(folder, rank)
        expected = _render(signed.size, signed.crc32c)
        data = self._fetch(key, rank=rank, expected=expected)
        if data is None:
            return None
        self._count(len(data))
        if (len(data), crc32c(data)) != (signed.size, signed.crc32c):
            self._note(rank, key, expected, _render(len(data), crc32c(data)))
            return None
        try:
            return parse_rank_manifest(data, key=key, rank=rank)
        except DamagedError as error:
            self._note(rank, key, "a manifest", str(error))
            return None

    def compare(self, manifest: Manifest, folder: str, ranks: list[RankManifest]) -> None:
        """See that the chunks of all ranks make up each tensor, by the rules of a load."""
        key, before = render_manifest_key(folder), len(self.damages)
        item_sizes: dict[str, int] = {}
        for name, entry in manifest.tensors.items():
            if (size := parse_item_size(entry.dtype)) is None:
                self._note(None, key, f"a dtype for `{name}`", f"`{entry.dtype}`")
            else:
                item_sizes[entry.dtype] = size
        for saved in ranks:
            for chunk in saved.chunks:
                entry = manifest.tensors.get(chunk.name)
                if entry is not None and entry.dtype not in item_sizes:
                    continue
                if problem := find_contradiction(chunk, manifest, item_sizes=item_sizes):
                    place = render_rank_key(folder, saved.rank)
                    self._note(saved.rank, place, f"a part of `{chunk.name}`", f"one that {problem}")
        if len(self.damages) == before and len(ranks) == manifest.world_size:
            for problem in find_gaps(manifest, ranks):
                self._note(None, key, "each element of each tensor once", problem)

    def read_blocks(self, folder: str, ranks: list[RankManifest]) -> None:
        with ThreadPoolExecutor(_READERS, thread_name_prefix="checkpoint-verify") as pool:
            try:
                for damage, size in _map_bounded(pool, self._read_block, _blocks(folder, ranks)):
                    self._count(size)
                    if damage is not None:
                        self.damages.append(damage)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _read_block(self, place: _Place) -> tuple[Damage | None, int]:
        rank, key, size, checksum = place
        expected, found, length = _render(size, checksum), "", 0
        for _ in range(2):  # what was changed on the way is read once more
            try:
                data = self._store.get(key)
            except ObjectMissing:
                return Damage(rank=rank, key=key, expected=expected, found="no object"), 0
            length = len(data)
            found = _render(length, crc32c(data))
            if found == expected:
                return None, length
        return Damage(rank=rank, key=key, expected=expected, found=found), length

    def _fetch(self, key: str, *, rank: int | None, expected: str) -> memoryview | None:
        try:
            return self._store.get(key)
        except ObjectMissing:
            self._note(rank, key, expected, "no object")
            return None

    def _note(self, rank: int | None, key: str, expected: str, found: str) -> None:
        self.damages.append(Damage(rank=rank, key=key, expected=expected, found=found))

    def _count(self, size: int) -> None:
        self.size_bytes += size
        self._progress(size)


def _blocks(folder: str, ranks: list[RankManifest]) -> Generator[_Place]:
    for saved in ranks:
        for index, block in enumerate(saved.blocks):
            yield saved.rank, render_block_key(folder, saved.rank, index), block.size, block.crc32c


def _map_bounded(
    pool: ThreadPoolExecutor,
    work: Callable[[_Place], tuple[Damage | None, int]],
    places: Generator[_Place],
) -> Generator[tuple[Damage | None, int]]:
    """Yield results in order, with few tasks waiting: a checkpoint may have a hundred thousand blocks."""
    tasks = deque(pool.submit(work, place) for place in islice(places, _AT_ONCE))
    while tasks:
        yield tasks.popleft().result()
        tasks.extend(pool.submit(work, place) for place in islice(places, 1))


def _render(size: int, checksum: int) -> str:
    return f"{size} bytes with crc32c {checksum:08x}"


def _ignore(_: int) -> None: ...
