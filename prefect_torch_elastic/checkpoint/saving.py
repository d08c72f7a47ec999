"""A save on its way: this rank's blocks to the store and, on rank 0, the commit when all ranks are done.

It may run behind the training, in a thread of its own. Ranks tell rank 0 on the board that they are done, so
nothing here is collective, and a rank that fails or hangs costs the others this save and no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prefect_torch_elastic.checkpoint.manifest import Signed, render_folder
from prefect_torch_elastic.checkpoint.peers import Board, Word, name_ranks
from prefect_torch_elastic.checkpoint.writer import Share, write_rank
from prefect_torch_elastic.errors import CheckpointError, Superseded
from prefect_torch_elastic.store import REQUEST_TIMEOUT_SECONDS, RETRY_SECONDS, Store

_LEAST_PATIENCE_SECONDS = RETRY_SECONDS + REQUEST_TIMEOUT_SECONDS  # a store may be away so long
_PATIENCE = 3.0  # times what rank 0 itself took: shares are of about one size
_LEAST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.005, 0.2
_READ_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class SaveOrder:
    """What all ranks know of one save.

    Attributes:
        number: The meeting that agreed on it; it names the save's words on the board.
        previous: The number of the save before.
        step: Completed optimizer steps.
        uuid: The name of its folder, new for each save.
    """

    number: int
    previous: int
    step: int
    uuid: str


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """How a save ended.

    Attributes:
        step: The save's.
        problem: Why there is no checkpoint; empty if there is one. On other ranks than 0 it is their own.
        superseded: Whether another gang has taken the run over.
        seconds: From the first byte to the commit.
    """

    step: int
    problem: str = ""
    superseded: bool = False
    seconds: float = 0.0


# Makes the checkpoint exist: called on rank 0 with what each rank wrote and the seconds that it took.
Commit = Callable[[Sequence[Signed], float], None]


def carry_out(
    order: SaveOrder,
    share: Share,
    *,
    store: Store,
    run_folder: str,
    rank: int,
    world_size: int,
    board: Board | None,
    commit: Commit,
    beat: Callable[[], None],
) -> SaveResult:
    """Write this rank's share and tell rank 0, which commits when all have told it.

    `beat` is called each time that something has come on.
    """
    started = time.monotonic()
    folder = f"{run_folder}/{render_folder(order.step, order.uuid)}"
    signed, problem = None, ""
    try:
        signed = write_rank(store, folder, share, rank=rank, beat=beat)
    except Exception as error:  # noqa: BLE001  (it is told to all ranks)
        problem = f"rank {rank}: {_render(error)}"
    if rank:
        assert board is not None, "a gang of several ranks has a board"
        word = {"size": signed.size, "crc32c": signed.crc32c} if signed else {"problem": problem}
        board.post(f"saved/{order.number}/{rank}", word)
        return SaveResult(step=order.step, problem=problem)

    def hear(patience_seconds: float) -> list[Signed]:
        return _hear(order, board, world_size, patience_seconds, beat) if board else []

    result = SaveResult(step=order.step, problem=problem)
    if signed:
        result = _commit(order, signed, started, hear=hear, commit=commit)
    if board:
        board.remove(f"result/{order.previous}")
        board.post(f"result/{order.number}", {"problem": result.problem, "superseded": result.superseded})
    return result


def wait_for_result(order: SaveOrder, board: Board, *, timeout_seconds: float) -> SaveResult:
    """Return what rank 0 says about a save, on another rank."""
    words = board.read([f"result/{order.number}"], timeout_seconds=timeout_seconds)
    if words is None:
        problem = (
            f"rank 0 did not say within {timeout_seconds:.0f} s whether the save of step {order.step} is done"
        )
        return SaveResult(step=order.step, problem=problem)
    return SaveResult(step=order.step, problem=words[0]["problem"], superseded=words[0]["superseded"])


def _commit(
    order: SaveOrder,
    signed: Signed,
    started: float,
    *,
    hear: Callable[[float], list[Signed]],
    commit: Commit,
) -> SaveResult:
    try:
        own_seconds = time.monotonic() - started
        others = hear(max(_LEAST_PATIENCE_SECONDS, _PATIENCE * own_seconds))
        commit([signed, *others], time.monotonic() - started)
    except Superseded as error:
        return SaveResult(step=order.step, problem=str(error), superseded=True)
    except Exception as error:  # noqa: BLE001  (it is told to all ranks)
        return SaveResult(step=order.step, problem=_render(error))
    return SaveResult(step=order.step, seconds=time.monotonic() - started)


def _hear(
    order: SaveOrder, board: Board, world_size: int, patience: float, beat: Callable[[], None]
) -> list[Signed]:
    """Wait until all other ranks are done; the first one that failed ends the wait."""
    keys = {f"saved/{order.number}/{rank}": rank for rank in range(1, world_size)}
    heard: dict[str, Word] = {}
    deadline, pause = time.monotonic() + patience, _LEAST_PAUSE_SECONDS
    while len(heard) < len(keys):
        beat()  # the wait has a deadline of its own
        silent = [key for key in keys if key not in heard]
        missing = set(board.missing(silent))
        for key in silent:
            if key not in missing:
                heard |= dict(zip([key], board.read([key], timeout_seconds=_READ_SECONDS) or [], strict=True))
                board.remove(key)
        if problem := next((word["problem"] for word in heard.values() if "problem" in word), None):
            raise CheckpointError(problem)
        if missing and time.monotonic() > deadline:
            names = name_ranks([keys[key] for key in silent if key in missing])
            raise CheckpointError(f"{names} did not write its share within {patience:.0f} s of rank 0")
        if missing:  # not in the board's own wait: torch writes a warning for each one that was too short
            time.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE_SECONDS)
    return [Signed(size=heard[key]["size"], crc32c=heard[key]["crc32c"]) for key in keys]


def _render(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
