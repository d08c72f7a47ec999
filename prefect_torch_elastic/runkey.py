"""Which run a call belongs to: its run key, the name of its folder, and the digest of the call itself.

A restarted driver and a retry have to find the run of the same call again, and two calls must never share one
by accident. So a run is named by where in the flow its call stands and by what it was given, not by ids that
Prefect makes anew each time.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.fingerprint import hash_arguments, hash_closure, hash_source
from prefect_torch_elastic.keysinuse import KeyUser, use_key

TRACKING_KEY = "prefect_torch_elastic.child"
"""What the keys of the task runs begin with that stand in the graph for a call in a work pool."""

_SAFE = re.compile(r"[^A-Za-z0-9._=-]+")
_NAME_CHARACTERS = 100
_TASK_CHARACTERS = 40
_KEY_CHARACTERS = 16
_DIGEST_CHARACTERS = 32

# The calls of the `map` that is being submitted: which task run has which run key.
_mapped: ContextVar[dict[str, str] | None] = ContextVar("prefect_torch_elastic_mapped", default=None)


@dataclass(frozen=True, kw_only=True)
class CallIdentity:
    """One call of one flow run, the same in every process that makes it again.

    Attributes:
        root: Id of the outermost flow run, or of the task run when there is no flow.
        run_key: Name of the run that the call belongs to.
        digest: Name of the call in the run: another function, other arguments or another flow run differ.
    """

    root: str
    run_key: str
    digest: str

    @property
    def folder(self) -> str:
        """Name of the run folder in the store."""
        return name_folder(self.run_key)


@dataclass(frozen=True, kw_only=True)
class CalledTask:
    """What the identity of a call is made of.

    Attributes:
        name: Name of the Prefect task.
        function: The user's function.
        source: Its code without decorators, None where it cannot be read.
        arguments: Its parameters by name.
        env: Environment variables of its ranks.
        run_key: The name that the user gave, or None.
        store: Where the folder of that name is.
        task_run_id: The task run, the same over its retries.
        within: The task run that made the call and the number of its try, empty when the flow itself did.
        again: Whether an outcome that exists already does not count (`refresh_cache`).
    """

    name: str
    function: Callable[..., Any]
    source: str | None
    arguments: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    run_key: str | None
    store: str = ""
    task_run_id: str
    within: tuple[str, int] | None = None
    again: bool = False


@contextmanager
def mapping() -> Generator[None, None, None]:
    """While this is open, tasks are submitted by `map`: calls differ by their arguments only."""
    token = _mapped.set({})
    try:
        yield
    finally:
        _mapped.reset(token)


@contextmanager
def identify_call(call: CalledTask, flow: Any | None) -> Generator[CallIdentity, None, None]:
    """Give the identity of a call while it runs.

    Args:
        call: The call.
        flow: Prefect's context of the flow run that makes it, None without a flow.

    Raises:
        SpecError: If nothing tells this call from another one that runs at the same time, or if two calls
            that run at the same time, or that one `map` makes, have the same run key.
    """
    with _use_key(call), _identify(call, flow) as identity:
        yield identity


@contextmanager
def _identify(call: CalledTask, flow: Any | None) -> Generator[CallIdentity, None, None]:
    if flow is None or flow.flow_run is None:
        yield _identity(call, root=call.task_run_id, place=[call.task_run_id], short=call.task_run_id)
        return
    root, path = find_lineage(str(flow.flow_run.id), _parent_of(flow.flow_run))
    hashes = [hash_arguments(call.arguments), hash_closure(call.function), hash_arguments(call.env)]
    code: Any = getattr(inspect.unwrap(call.function), "__code__", None)
    # A flow file has another module name in each process that loads it, and its folder may move.
    file = os.path.basename(code.co_filename) if code else ""
    place = [root, *path, call.name, call.function.__qualname__, file, *(one or "?" for one in hashes)]
    if call.again:  # the checkpoints of the finished one would leave nothing to do
        place.append(call.task_run_id)
    if flow.detached:  # in another process than the flow's: nobody counts equal calls
        yield _identity(call, root=root, place=[*place, call.task_run_id])
        return
    # Where a part has no hash, an outcome that only retries find is better than somebody else's.
    hidden = call.task_run_id if None in hashes else ""
    with _calls_of(flow).claim(_hash(place), call, hashed=not hidden) as occurrence:
        yield _identity(call, root=root, place=[*place, occurrence], hidden=hidden)


def _identity(
    call: CalledTask, *, root: str, place: list[str], short: str = "", hidden: str = ""
) -> CallIdentity:
    key = call.run_key or short
    if not key:
        task = _SAFE.sub("-", call.name).strip("-.")[:_TASK_CHARACTERS]
        key = f"{task or 'run'}-{_hash(place)[:_KEY_CHARACTERS]}"
    content = [*place, hash_source(call.source, call.function), hidden]
    return CallIdentity(root=root, run_key=key, digest=_hash(content)[:_DIGEST_CHARACTERS])


def _hash(parts: list[str]) -> str:
    return hashlib.sha256("".join(f"{len(part)}:{part}" for part in parts).encode()).hexdigest()


@dataclass
class _Calls:
    """The calls that one flow run has made in this process, counted from 0 each time it starts."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    seen: Counter[str] = field(default_factory=Counter[str])
    given: dict[tuple[str, ...], str] = field(default_factory=dict[tuple[str, ...], str])
    turns: Counter[tuple[str, str, int]] = field(default_factory=Counter[tuple[str, str, int]])
    running: Counter[str] = field(default_factory=Counter[str])

    @contextmanager
    def claim(self, place: str, call: CalledTask, *, hashed: bool) -> Generator[str, None, None]:
        """Give the number of this call among equal ones; a retry of a task run keeps its own."""
        with self.lock:
            at_once = self.running[place] > 0 or _mapped.get() is not None
            if at_once and not hashed and call.run_key is None:
                raise SpecError(_unclear(call))
            occurrence = self._number(place, call)
            self.running[place] += 1
        try:
            yield occurrence
        finally:
            with self.lock:
                self.running[place] -= 1

    def _number(self, place: str, call: CalledTask) -> str:
        mine = (place, call.task_run_id)
        if mine in self.given:
            return self.given[mine]
        number = str(self.seen[place])
        if call.within is not None:  # the n-th equal call of a task stays that over the task's retries
            turn = (place, *call.within)
            number = self.given.setdefault((place, call.within[0], str(self.turns[turn])), number)
            self.turns[turn] += 1
        if number == str(self.seen[place]):
            self.seen[place] += 1
        self.given[mine] = number
        return number


_all_calls: dict[int, _Calls] = {}
_all_calls_lock = threading.Lock()


def _calls_of(flow: Any) -> _Calls:
    """Return the calls of a flow run's context, which is a new one when the flow is retried."""
    with _all_calls_lock:
        if id(flow) not in _all_calls:
            _all_calls[id(flow)] = _Calls()
            weakref.finalize(flow, _all_calls.pop, id(flow), None).atexit = False
        return _all_calls[id(flow)]


def _use_key(call: CalledTask) -> AbstractContextManager[None]:
    if call.run_key is None:
        return nullcontext()
    user = KeyUser(task_name=call.name, task_run_id=call.task_run_id)
    return use_key(call.run_key, user, store=call.store, mapped=_mapped.get())


def _unclear(call: CalledTask) -> str:
    culprits = [name for name, value in call.arguments.items() if hash_arguments({name: value}) is None]
    names = ", ".join(f"`{name}`" for name in culprits) or "what the function closes over"
    return (
        f"`{call.name}` is called several times at once, and {names} cannot be hashed: nothing says which "
        'run belongs to which call. Pass `run_key=`, such as `run_key="train-{name}"` over a parameter that '
        "differs, or pass plain data."
    )


def _parent_of(flow_run: Any) -> str:
    return str(flow_run.parent_task_run_id or "")


@lru_cache(maxsize=256)
def find_lineage(flow_run_id: str, parent_task_run_id: str) -> tuple[str, tuple[str, ...]]:
    """Return the outermost flow run, and the way from it down to this one.

    A subflow that is run again by its parent may be another flow run, at the same place in the parent.
    """
    if not parent_task_run_id:
        return flow_run_id, ()
    from uuid import UUID

    from prefect.client.orchestration import get_client

    path: list[str] = []
    with get_client(sync_client=True) as client:
        while parent_task_run_id:
            parent = client.read_task_run(UUID(parent_task_run_id))
            path.insert(0, _place_of(parent))
            if parent.flow_run_id is None:
                return str(parent.id), tuple(path)
            above = client.read_flow_run(parent.flow_run_id)
            flow_run_id, parent_task_run_id = str(above.id), _parent_of(above)
    return flow_run_id, tuple(path)


def _place_of(task_run: Any) -> str:
    """Return where a task run stands in its flow run, the same when its flow makes it again."""
    place = f"{task_run.task_key}-{task_run.dynamic_key}"
    if task_run.task_key.startswith(f"{TRACKING_KEY}."):
        return place.rpartition("-")[0]  # each time a call is sent counts up, and it is still that call
    return place


def name_folder(run_key: str) -> str:
    """Return the run key as the name of one folder; keys that look alike afterwards stay apart."""
    safe = _SAFE.sub("-", run_key).strip("-.")[:_NAME_CHARACTERS]
    if safe == run_key:
        return safe
    return f"{safe or 'run'}-{hashlib.sha256(run_key.encode()).hexdigest()[:8]}"


def render_run_key(run_key: str | Callable[..., str] | None, arguments: Mapping[str, object]) -> str | None:
    """Return the run's own name, None if it has none.

    Args:
        run_key: A text, a template over the parameters, or a callable that gets them.
        arguments: The parameters of this call.

    Raises:
        SpecError: If the template does not fit the parameters, the callable raises, or the name is empty.
    """
    if run_key is None:
        return None
    if callable(run_key):
        try:
            name = str(run_key(**arguments))
        except Exception as error:
            raise SpecError(
                f"`run_key` (`{getattr(run_key, '__name__', run_key)}`) raised "
                f"{type(error).__name__}: {error}. It gets the parameters of the task by name."
            ) from error
    else:
        try:
            name = str(run_key).format(**arguments)
        except Exception as error:  # a parameter's own formatting may raise anything
            parameters = ", ".join(f"`{{{parameter}}}`" for parameter in arguments)
            raise SpecError(
                f"`run_key={run_key!r}` does not fit the task's parameters: {type(error).__name__}: {error}. "
                f"Use {parameters or 'plain text'}."
            ) from error
    if name.strip() in ("", "None"):
        raise SpecError(
            f"`run_key={run_key!r}` gives the name {name!r} for this call: an empty value names no run. "
            "Pass a name, or leave `run_key` out."
        )
    return name
