"""How the ranks of a gang agree: meetings on the store that the gang met at, each with a deadline and names.

A process group is not used: it may belong to NCCL, a rank that fails in it takes the others along, and a
time-out there names nobody. In a meeting every rank says what it came for; rank 0 hears all of them, decides,
and answers. A rank that is missing, or came for something else, is named on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from prefect_torch_elastic.errors import CheckpointError, CheckpointMismatch, StoreError, Superseded

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_NAMED = 8  # ranks that one message names
_ANSWER_SECONDS = 5.0  # rank 0 notices a missing rank first; the others wait a little longer for its words

Word = Mapping[str, Any]
Say = Callable[[], Word]
Decide = Callable[[Sequence[Word]], Word | Sequence[Word]]

# Errors that cross between ranks keep their class, because it decides whether the gang starts again.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (CheckpointError, CheckpointMismatch, StoreError, Superseded)
}


class Board(Protocol):
    """Where ranks leave words for each other: keys and bytes that all of them see."""

    def post(self, key: str, word: Word) -> None: ...

    def read(self, keys: Sequence[str], *, timeout_seconds: float) -> list[Any] | None:
        """Return the words at `keys`, None when one of them is not there in time."""
        ...

    def missing(self, keys: Sequence[str]) -> list[str]: ...

    def remove(self, key: str) -> None: ...


class StoreBoard:
    """The gang's TCPStore as a board, by a connection of its own."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @classmethod
    def connect(cls, host: str, port: int) -> StoreBoard:
        """Return a board on the store that torch's own `env://` would use."""
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        client = TCPStore(host, port, is_master=False, wait_for_workers=False)
        return cls(PrefixStore("prefect-torch-elastic/checkpoint", client))

    def post(self, key: str, word: Word) -> None:
        self._store.set(key, json.dumps(word))

    def read(self, keys: Sequence[str], *, timeout_seconds: float) -> list[Any] | None:
        from torch.distributed import DistStoreError

        try:
            self._store.wait(list(keys), timedelta(seconds=timeout_seconds))
        except DistStoreError:  # torch's word for a wait that was too short
            return None
        return [json.loads(self._store.get(key)) for key in keys]

    def missing(self, keys: Sequence[str]) -> list[str]:
        return [key for key in keys if not self._store.check([key])]

    def remove(self, key: str) -> None:
        self._store.delete_key(key)


class Peers:
    """One rank's seat at the meetings; all ranks come to the same ones, in the same order."""

    def __init__(self, *, rank: int, world_size: int, board: Board | None, timeout_seconds: float) -> None:
        self.rank, self.world_size = rank, world_size
        self._board = board
        self._timeout_seconds = timeout_seconds
        self.number = 0

    def meet(self, purpose: str, say: Say, decide: Decide) -> dict[str, Any]:
        """Come to the next meeting and return rank 0's answer.

        Args:
            purpose: What this rank came for, such as `save(step=10)`; it must be the same on all ranks.
            say: Returns what this rank has to say, as JSON. What it raises is raised on all ranks.
            decide: Called on rank 0 with the words of all ranks; returns one answer, or one for each rank.
                What it raises is raised on all ranks.

        Raises:
            CheckpointError: On all ranks: a rank did not come in time, or came for something else.
        """
        self.number += 1
        own: Exception | None = None
        try:
            message: dict[str, Any] = {"purpose": purpose, "word": say()}
        except Exception as error:  # noqa: BLE001  (all ranks raise it, this one as it is)
            own, message = error, {"purpose": purpose, "problem": _render_problem(self.rank, error)}
        answer = self._ask(purpose, message) if self.rank else self._lead(purpose, message, decide)
        if own is not None:
            raise own
        if problem := answer.get("problem"):
            kind = _KINDS.get(problem["kind"], CheckpointError)
            raise kind(problem["text"])
        return answer

    def _ask(self, purpose: str, message: Word) -> dict[str, Any]:
        board, number = self._need_board(), self.number
        board.remove(f"answer/{number - 1}/{self.rank}")
        board.post(f"word/{number}/{self.rank}", message)
        patience = self._timeout_seconds + _ANSWER_SECONDS
        answers = board.read([f"answer/{number}/{self.rank}"], timeout_seconds=patience)
        if answers is None:
            raise CheckpointError(
                f"rank {self.rank} called {purpose}, and rank 0 did not within "
                f"{self._timeout_seconds:.0f} s. All ranks have to call it, at the same step."
            )
        return answers[0]

    def _lead(self, purpose: str, message: Word, decide: Decide) -> dict[str, Any]:
        try:
            answers = self._answer(purpose, message, decide)
        except Exception as error:
            if self.world_size > 1:  # nobody waits for a rank 0 that has raised
                self._post_answers([{"problem": _render_problem(0, error)}] * self.world_size)
            raise
        if self.world_size > 1:
            self._post_answers(answers)
        return dict(answers[0])

    def _answer(self, purpose: str, message: Word, decide: Decide) -> Sequence[Word]:
        messages = [message, *self._hear(purpose)]
        strangers: dict[str, list[int]] = {}
        for rank, entry in enumerate(messages):
            if entry["purpose"] != purpose:
                strangers.setdefault(entry["purpose"], []).append(rank)
        if strangers:
            raise CheckpointError(_name_strangers(purpose, strangers))
        if problem := next((entry["problem"] for entry in messages if "problem" in entry), None):
            return [{"problem": problem}] * self.world_size
        answer = decide([entry["word"] for entry in messages])
        return [answer] * self.world_size if isinstance(answer, Mapping) else answer

    def _hear(self, purpose: str) -> list[Any]:
        if self.world_size == 1:
            return []
        keys = [f"word/{self.number}/{rank}" for rank in range(1, self.world_size)]
        messages = self._need_board().read(keys, timeout_seconds=self._timeout_seconds)
        if messages is not None:
            return messages
        missing = self._need_board().missing(keys)
        names = name_ranks([int(key.rpartition("/")[2]) for key in missing])
        raise CheckpointError(
            f"rank 0 called {purpose}, and {names} did not within {self._timeout_seconds:.0f} s. "
            "All ranks have to call it, at the same step: not inside `if rank == 0:`."
        )

    def _post_answers(self, answers: Sequence[Word]) -> None:
        board = self._need_board()
        for rank in range(1, self.world_size):
            board.post(f"answer/{self.number}/{rank}", answers[rank])
            board.remove(f"word/{self.number}/{rank}")

    def _need_board(self) -> Board:
        assert self._board is not None, "a gang of several ranks has a board"
        return self._board


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 1, rank 2`, for a message; of many ranks the first ones."""
    names = ", ".join(f"rank {rank}" for rank in ranks[:_NAMED])
    return f"{names} and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else names


def _render_problem(rank: int, error: Exception) -> dict[str, str]:
    kind = next((base.__name__ for base in type(error).__mro__ if base.__name__ in _KINDS), "")
    text = str(error) if kind else f"{type(error).__name__}: {error}"
    return {"kind": kind, "text": f"rank {rank}: {text}"}


def _name_strangers(purpose: str, others: Mapping[str, Sequence[int]]) -> str:
    calls: list[str] = []
    for other, ranks in others.items():
        more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
        shown = ", ".join(str(rank) for rank in ranks[:_NAMED])
        calls.append(f"rank{'s' if len(ranks) > 1 else ''} {shown}{more} called {other}")
    names = ", ".join(calls)
    return f"rank 0 called {purpose}, but {names}. All ranks have to make the same calls, in the same order."
