"""The collectives of all ranks side by side: who waits for whom, and why that will not end. Pure.

torch numbers the collectives of a process group, on each rank by itself. Ranks that do the same work have the
same number, or differ by what is under way; a rank that waits in number 12 waits for all that are at 11.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum

from prefect_torch_elastic.observations import LastCollective, RankSnapshot
from prefect_torch_elastic.stacks import find_place
from prefect_torch_elastic.standstill import is_blocked

_DEFAULT_GROUPS = ("0", "default_pg", "0 (default_pg)", "")  # names of the group that has all ranks
_DEFAULT = _DEFAULT_GROUPS[0]
_QUEUED = "nccl:"  # of operations that a rank only puts into the queue of its GPU
_SAME_SIZES = ("all_reduce", "broadcast")  # their inputs have as many elements on all ranks
_SHAPE = re.compile(r"\[([\d, ]*)\]")
_NAMED = 8  # ranks that one sentence names


class SplitKind(StrEnum):
    """How ranks are apart.

    `behind`: a rank runs, or stands, outside the collective in which others wait; it may still come.
    The others cannot come together again. `left`: a rank has returned, and all others wait. `different`:
    other operations, or other shapes, at the same number. `passed`: a rank waits in a collective that the
    others have left. `crossed`: ranks wait for each other in different groups. The last two are no proof for
    ranks that have only started a collective, by `async_op=True` or in the queue of a GPU: they go on, and
    may still come to the other one.
    """

    BEHIND = "behind"
    LEFT = "left"
    DIFFERENT = "different"
    PASSED = "passed"
    CROSSED = "crossed"


@dataclass(frozen=True, kw_only=True)
class Split:
    """Ranks that are apart.

    Attributes:
        kind: How.
        ranks: The culprits, in order.
        waiting: Ranks that wait for them.
        sentence: Of it, without a full stop at its end.
        mark: Equal in two looks if the same ranks are apart in the same collectives.
        is_started: Whether collectives may only have been started by their ranks, which says little of them.
    """

    kind: SplitKind
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    sentence: str
    mark: str
    is_started: bool = False

    @property
    def is_final(self) -> bool:
        """Whether the ranks cannot come together again, however long one waits."""
        return self.kind is not SplitKind.BEHIND and not self.is_started


GroupKey = tuple[str, str]
"""What torch numbers collectives in: a process group, and one of its backends, such as `gloo`."""
Memberships = Set[tuple[GroupKey, int]]
"""Who was seen in which groups."""


def find_split(snapshots: Sequence[RankSnapshot], *, memberships: Memberships = frozenset()) -> Split | None:
    """Return how the ranks are apart; None if no rank waits for one that is elsewhere.

    Args:
        snapshots: Of all ranks of the gang; one that is not alive has returned.
        memberships: Who was seen in which groups before, for the ranks that have returned.
    """
    living = {snapshot.rank: snapshot for snapshot in snapshots if snapshot.is_alive}
    left = tuple(sorted(snapshot.rank for snapshot in snapshots if not snapshot.is_alive))
    groups = _by_group(living.values())
    if split := _find_different(groups):
        return split
    waits = {rank: found for rank, snapshot in living.items() if (found := _waits_in(snapshot, groups))}
    if not waits:
        return None
    if left and len(waits) == len(living):  # else one that runs may be what the others wait for
        missed = {key for key, rank in memberships if rank in left}
        if split := _find_left(waits, left, missed):
            return split
    missing = {rank: _missing(collective, groups) for rank, collective in waits.items()}
    if behind := sorted({rank for ranks in missing.values() for rank in ranks} - waits.keys()):
        return _describe_behind(behind, waits, missing, living)
    return _find_tangle(waits, missing, living)


def list_memberships(snapshots: Iterable[RankSnapshot]) -> Memberships:
    """Return which ranks are seen in which groups."""
    return {
        (_key(collective), snapshot.rank) for snapshot in snapshots for collective in snapshot.collectives
    }


def name_operation(operation: str) -> str:
    """Return `all_reduce` for `gloo:all_reduce`."""
    return operation.rpartition(":")[2] or operation


def describe_common_wait(snapshots: Sequence[RankSnapshot]) -> str:
    """Return `all ranks wait in all_reduce #12` if they do, else nothing."""
    groups = _by_group(snapshots)
    waits = [_waits_in(snapshot, groups) for snapshot in snapshots if snapshot.is_alive]
    called = {_describe(collective) if collective else "" for collective in waits}
    return f"all ranks wait in {called.pop()}" if len(called) == 1 and "" not in called else ""


def is_waiting(collective: LastCollective) -> bool:
    """Whether the rank has entered it, and it has not ended."""
    return not collective.is_done


def describe_collective(collective: LastCollective) -> str:
    """Return `all_reduce #12 (waits)`."""
    return f"{_describe(collective)} ({'done' if collective.is_done else 'waits'})"


def say_of_ranks(ranks: Sequence[int], one: str, several: str) -> str:
    """Return the ranks before a verb that fits one of them, or several."""
    return f"{name_ranks(ranks)} {one if len(ranks) == 1 else several}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 1 and 3`, or `ranks 0, 1, 2 ... (64)`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _NAMED:
        return f"ranks {', '.join(map(str, ranks[:3]))} ... ({len(ranks)} ranks)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


Groups = Mapping[GroupKey, Mapping[int, LastCollective]]


def _by_group(snapshots: Iterable[RankSnapshot]) -> Groups:
    """Return each rank's newest collective by group; who has done none is at 0 of the default group."""
    snapshots = list(snapshots)
    groups: dict[GroupKey, dict[int, LastCollective]] = {}
    for snapshot in snapshots:
        for collective in snapshot.collectives:
            if not _is_between_two(collective):
                groups.setdefault(_key(collective), {})[snapshot.rank] = collective
    nothing = LastCollective(group=_DEFAULT, sequence=0, operation="", is_done=True)
    for (group, _), peers in groups.items():
        if group == _DEFAULT:
            for snapshot in snapshots:
                peers.setdefault(snapshot.rank, nothing)
    return groups


def _name_group(collective: LastCollective) -> str:
    return _DEFAULT if collective.group in _DEFAULT_GROUPS else collective.group


def _key(collective: LastCollective) -> GroupKey:
    return _name_group(collective), collective.operation.rpartition(":")[0]


def _is_between_two(collective: LastCollective) -> bool:
    """Whether it is a send or a receive, whose numbers belong to two ranks alone."""
    return name_operation(collective.operation).startswith(("send", "recv"))


def _waits_in(snapshot: RankSnapshot, groups: Groups) -> LastCollective | None:
    """Return the collective that the rank waits in; of several the one that most peers are missing from."""
    undone = [
        collective
        for collective in snapshot.collectives
        if not collective.is_done and not _is_between_two(collective)
    ]
    return max(undone, key=lambda collective: len(_missing(collective, groups)), default=None)


def _missing(collective: LastCollective, groups: Groups) -> set[int]:
    peers = groups[_key(collective)]
    return {rank for rank, other in peers.items() if other.sequence < collective.sequence}


def _find_different(groups: Groups) -> Split | None:
    """Two operations at one number: no collective of that group can end any more."""
    for (group, backend), peers in groups.items():
        for sequence in sorted({collective.sequence for collective in peers.values()}):
            here = {rank: collective for rank, collective in peers.items() if collective.sequence == sequence}
            called = {rank: _call(collective) for rank, collective in here.items()}
            if len(set(called.values())) < 2 or all(collective.is_done for collective in here.values()):
                continue
            counts = Counter(called.values())
            first = called[min(called)]
            usual = max(counts, key=lambda call: (counts[call], call == first))
            odd = tuple(sorted(rank for rank, call in called.items() if call != usual))
            others = tuple(sorted(called.keys() - set(odd)))
            sentence = (
                f"{name_ranks(odd)} called {called[odd[0]]} as number {sequence} of process group {group}, "
                f"where {name_ranks(others)} called {usual}: they wait for each other"
            )
            mark = f"different {group} {backend} {sequence} {sorted(called.items())}"
            return Split(kind=SplitKind.DIFFERENT, ranks=odd, waiting=others, sentence=sentence, mark=mark)
    return None


def _call(collective: LastCollective) -> str:
    """Return what all ranks have to agree about: the operation, and of some how many numbers it is about."""
    operation = name_operation(collective.operation)
    if operation not in _SAME_SIZES or not collective.sizes:
        return operation
    shapes = [
        [int(length) for length in re.findall(r"\d+", shape)] for shape in _SHAPE.findall(collective.sizes)
    ]
    return f"{operation} of {sum(math.prod(shape) for shape in shapes)} elements"


def _find_left(
    waits: Mapping[int, LastCollective], left: tuple[int, ...], missed: Iterable[GroupKey]
) -> Split | None:
    """A rank that has returned enters nothing any more: in the default group, and in those `missed`."""
    waiting = tuple(
        sorted(
            rank
            for rank, collective in waits.items()
            if _name_group(collective) == _DEFAULT or _key(collective) in missed
        )
    )
    if not waiting:
        return None
    where = _describe(waits[waiting[0]])
    gone = f"{say_of_ranks(left, 'has', 'have')} returned already"
    wait = f"{say_of_ranks(waiting, 'waits', 'wait')} in {where}"
    return Split(
        kind=SplitKind.LEFT,
        ranks=left,
        waiting=waiting,
        sentence=f"{gone}, and {wait}, which will never end",
        mark=f"left {left} {[(rank, _mark(waits[rank])) for rank in waiting]}",
    )


def _describe_behind(
    behind: list[int],
    waits: Mapping[int, LastCollective],
    missing: Mapping[int, set[int]],
    living: Mapping[int, RankSnapshot],
) -> Split:
    waiting = tuple(sorted(rank for rank in waits if missing[rank] & set(behind)))
    place = find_place(living[behind[0]].stacks)
    stands = f"; {'it' if len(behind) == 1 else name_ranks(behind[:1])} is in {place}" if place else ""
    sentence = (
        f"{say_of_ranks(behind, 'has', 'have')} not entered {_describe(waits[waiting[0]])}, in which "
        f"{say_of_ranks(waiting, 'waits', 'wait')}{stands}"
    )
    return Split(
        kind=SplitKind.BEHIND,
        ranks=tuple(behind),
        waiting=waiting,
        sentence=sentence,
        mark=f"behind {behind} {[(rank, _mark(waits[rank])) for rank in waiting]}",
    )


def _find_tangle(
    waits: Mapping[int, LastCollective], missing: Mapping[int, set[int]], living: Mapping[int, RankSnapshot]
) -> Split | None:
    """Every rank that others wait for waits too: in a collective that they have left, or in another group."""
    awaited = sorted({rank for ranks in missing.values() for rank in ranks})
    if not awaited:
        return None  # all are in the same collective: it is slow, or the network is
    mark = f"tangle {[(rank, _mark(collective)) for rank, collective in sorted(waits.items())]}"
    is_started = not all(is_blocked(living[rank]) for rank in waits) or any(
        collective.operation.startswith(_QUEUED) for collective in waits.values()
    )
    for rank in awaited:
        key, sequence = _key(waits[rank]), waits[rank].sequence
        ahead = sorted(
            other
            for other, collective in waits.items()
            if _key(collective) == key and collective.sequence > sequence
        )
        if ahead and not missing[rank]:
            return Split(
                kind=SplitKind.PASSED,
                ranks=(rank,),
                waiting=tuple(ahead),
                sentence=_describe_passed(rank, ahead, waits, is_started=is_started),
                mark=mark,
                is_started=is_started,
            )
    first, second = awaited[0], awaited[-1]
    sentence = (
        f"rank {first} waits in {_describe(waits[first])} and rank {second} in {_describe(waits[second])}: "
        "each waits for the other to enter its collective first"
    )
    waiting = tuple(rank for rank in sorted(waits) if rank not in (first, second))
    return Split(
        kind=SplitKind.CROSSED,
        ranks=(first, second),
        waiting=waiting,
        sentence=sentence,
        mark=mark,
        is_started=is_started,
    )


def _describe_passed(
    rank: int, ahead: list[int], waits: Mapping[int, LastCollective], *, is_started: bool
) -> str:
    verb = "waits" if len(ahead) == 1 else "wait"
    there = f"{verb} in {_describe(waits[ahead[0]])}"
    if is_started:
        return (
            f"rank {rank} has called nothing after {_describe(waits[rank])}, and {name_ranks(ahead)} {there}"
        )
    return (
        f"rank {rank} waits in {_describe(waits[rank])}, which {name_ranks(ahead)} already left: "
        f"{'it' if len(ahead) == 1 else 'they'} {there}"
    )


def _describe(collective: LastCollective) -> str:
    group = _name_group(collective)
    where = "" if group == _DEFAULT else f" of process group {group}"
    return f"{name_operation(collective.operation)} #{collective.sequence}{where}"


def _mark(collective: LastCollective) -> str:
    return "/".join((*_key(collective), str(collective.sequence)))
