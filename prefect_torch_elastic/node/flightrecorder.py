"""Inside a rank: a thread that writes down the rank's collectives when the agent asks, and now and then.

torch records the newest collectives of every process group, of gloo as of NCCL. The thread needs Python's
lock: a rank that holds it in C code writes nothing. Its stacks come from a signal handler, which needs none.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect_torch_elastic import compat
from prefect_torch_elastic.arrivals import KEPT, LOOK_SECONDS, Arrivals
from prefect_torch_elastic.observations import LastCollective
from prefect_torch_elastic.rankstate import RankState

_GPU_SECONDS = 5.0
_KEPT = 50  # entries of each process group that go into the file
_FRAMES = 5
_SIZES_CHARACTERS = 200
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

Entry = Mapping[str, Any]


def start_listening(news: int, prefix: str, state: RankState) -> None:
    """Start the thread of this rank; it ends with the agent, or with the rank.

    Args:
        news: Both ways: numbers of requests come in, `evidence NUMBER` goes out when the file is whole.
        prefix: Path and file name start of what the rank writes.
        state: The rank's page, for the memory of its GPUs.
    """
    threading.Thread(
        target=_listen, args=(news, Path(f"{prefix}.collectives.json"), state), name="evidence", daemon=True
    ).start()


def _listen(news: int, target: Path, state: RankState) -> None:
    poll = select.poll()
    poll.register(news, select.POLLIN)
    look = int(time.time() // LOOK_SECONDS) + 1
    with suppress(OSError, ValueError):  # the agent is gone, or user code has closed all files
        while True:
            wait = min(_GPU_SECONDS, look * LOOK_SECONDS - time.time())
            if poll.poll(max(0.0, wait) * 1000):
                lines = os.read(news, 4096).split()
                if not lines:
                    return
                _write(target, int(lines[-1]))
                os.write(news, b"evidence %s\n" % lines[-1])
            if time.time() >= look * LOOK_SECONDS:
                _note_arrivals(state, look)
                look = int(time.time() // LOOK_SECONDS) + 1
            _note_gpu_memory(state)


def _write(target: Path, number: int) -> None:
    written: dict[str, Any] = {"number": number, "last": [], "entries": []}
    try:
        entries = compat.read_flight_recorder()
        written["last"] = [asdict(one) for one in find_last(entries)]
        written["entries"] = keep_newest(entries)
    except Exception as error:  # noqa: BLE001  (the rank must not suffer from being looked at)
        written["problem"] = f"{type(error).__name__}: {error}"
    temporary = target.with_suffix(".tmp")
    with suppress(OSError):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as file:
            json.dump(written, file, default=str)
        temporary.replace(target)


def find_last(entries: Sequence[Entry]) -> list[LastCollective]:
    """Return the newest collective of each process group; sends and receives between two ranks are none.

    The newest is the one that was recorded last: a group that is made again counts from 1. A group that has
    gloo for CPUs and NCCL for GPUs counts the collectives of each by themselves: it has two.
    """
    last: dict[tuple[str, str], Entry] = {}
    for entry in entries:
        if not entry.get("is_p2p"):
            last[_name_counter(entry)] = entry
    return [
        LastCollective(
            group=group,
            sequence=int(entry["collective_seq_id"]),
            operation=str(entry["profiling_name"]),
            # gloo leaves its state at `scheduled`
            is_done=bool(entry.get("retired")) or entry.get("state") == "completed",
            sizes=str(entry.get("input_sizes", ""))[:_SIZES_CHARACTERS],
            frames=render_frames(entry.get("frames", [])),
        )
        for (group, _), entry in sorted(last.items())
    ]


def keep_newest(entries: Sequence[Entry]) -> list[Entry]:
    """Return the newest entries of each process group, in the order in which they came."""
    kept: list[Entry] = []
    counts: dict[tuple[str, str], int] = {}
    for entry in reversed(entries):
        counter = _name_counter(entry)
        counts[counter] = counts.get(counter, 0) + 1
        if counts[counter] <= _KEPT:
            kept.append(entry)
    return kept[::-1]


def _note_arrivals(state: RankState, look: int) -> None:
    with suppress(Exception):  # the rank must not suffer from being looked at
        if (arrivals := find_arrivals(compat.read_flight_recorder(), look=look)) is not None:
            state.note_arrivals(arrivals)


def find_arrivals(entries: Sequence[Entry], *, look: int) -> Arrivals | None:
    """Return when the rank came to its newest collectives in the group of all ranks; None without any.

    Of its two counters (gloo and NCCL) the one counts that was used last.

    Args:
        entries: As torch records them.
        look: The number of this look.
    """
    mine = [entry for entry in entries if not entry.get("is_p2p") and _is_of_all(entry)]
    if not mine:
        return None
    newest = max(mine, key=lambda entry: entry["time_created_ns"])
    moment = look * int(LOOK_SECONDS) * 1_000_000
    first, offsets = int(newest["collective_seq_id"]) + 1, list[int]()
    for entry in reversed(mine):
        if _name_counter(entry) != _name_counter(newest):
            continue
        if int(entry["collective_seq_id"]) != first - 1 or len(offsets) == KEPT:
            break
        first -= 1
        offsets.insert(0, int(entry["time_created_ns"]) // 1000 - moment)
    return Arrivals(look=look, first=first, offsets_us=offsets) if offsets else None


def _is_of_all(entry: Entry) -> bool:
    return "default_pg" in entry.get("process_group", ())


def render_frames(frames: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return where user code called a collective, innermost first; torch's own if there is no other."""
    theirs = [frame for frame in frames if _is_of_user(str(frame.get("filename", "")))]
    return [
        f"{frame.get('name', '?')} ({frame.get('filename', '?')}:{frame.get('line', '?')})"
        for frame in (theirs or frames)[:_FRAMES]
    ]


def _is_of_user(filename: str) -> bool:
    return not filename.startswith(_OURS) and f"{os.sep}torch{os.sep}" not in filename


def _name_group(entry: Entry) -> str:
    name, description = (*entry.get("process_group", ("?", "")), "")[:2]
    return f"{name} ({description})" if description not in ("", "undefined") else str(name)


def _name_counter(entry: Entry) -> tuple[str, str]:
    return _name_group(entry), str(entry["profiling_name"]).partition(":")[0]


def _note_gpu_memory(state: RankState) -> None:
    cuda = sys.modules.get("torch.cuda")
    with suppress(Exception):  # torch may be half imported, and other allocators do not count
        if cuda is not None and cuda.is_initialized():
            sizes = [cuda.max_memory_reserved(device) for device in range(cuda.device_count())]
            state.note_gpu_memory(sum(sizes))
