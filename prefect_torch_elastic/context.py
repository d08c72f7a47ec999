"""What user code sees inside a rank: who it is, and how it tells the outside what it does.

Outside a rank there is a context too, of one rank, so that a function can be tested by calling it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from prefect_torch_elastic.errors import MissingExtraError

if TYPE_CHECKING:
    from torch import device as torch_device
    from torch.nn import Module
    from torch.utils.data import DataLoader

    from prefect_torch_elastic.checkpoint.session import CheckpointSession
    from prefect_torch_elastic.rankstate import RankState

RUN_KEY = "PTE_RUN_KEY"
ATTEMPT = "PTE_ATTEMPT"
RESTART_COUNT = "PTE_RESTART_COUNT"
PREEMPTION_COUNT = "PTE_PREEMPTION_COUNT"
FLOW_RUN_ID = "PTE_FLOW_RUN_ID"
TASK_RUN_ID = "PTE_TASK_RUN_ID"

_LOADER_OPTIONS = (
    *("batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor", "persistent_workers", "pin_memory_device"),
    "in_order",
)
_SPLIT_YOURSELF = "Split a stream, a sampler or batches of your own by `get_context().rank` and `world_size`."

_state: RankState | None = None
_storage: Mapping[str, Any] = {}
_announce: Callable[[dict[str, Any]], None] | None = None
_session: CheckpointSession | None = None


@dataclass(frozen=True, kw_only=True)
class ElasticContext:
    """This rank's place in the gang and its line to the outside.

    Attributes:
        rank: Index of this process in the gang, in [0, world_size).
        local_rank: Index on its node, in [0, local_world_size).
        world_size: Processes in the gang now; it changes when nodes come or go.
        local_world_size: Processes on this node.
        node_rank: Index of the node, from 0; node 0 is the leader.
        nnodes: Nodes in the gang now.
        master_addr: Where `torch.distributed` meets; "" outside a gang.
        master_port: Its port; 0 outside a gang.
        restart_count: Times that the ranks were started again in this attempt, from 0.
        attempt: This gang's number in the run, from 1; a task retry is a new attempt.
        preemption_count: Times that the run was preempted, from 0.
        run_key: Stable name of the run over restarts, attempts and retries.
        flow_run_id: The Prefect flow run, "" without one.
        task_run_id: The Prefect task run, "" without one.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    nnodes: int
    master_addr: str
    master_port: int
    restart_count: int
    attempt: int
    preemption_count: int
    run_key: str
    flow_run_id: str
    task_run_id: str

    @property
    def device(self) -> torch_device:
        """The device of this rank: `cuda:<local_rank>` where there are GPUs, else the CPU."""
        torch = _load_torch()
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())  # ranks may share devices

    def report(self, metrics: Mapping[str, Any], *, step: int, total_steps: int | None = None) -> None:
        """Tell the outside that `step` optimizer steps are done; call it at every step.

        It writes to shared memory (microseconds), never to the network, and does not raise when nobody
        listens. Rank 0's numbers reach the task run's log; every rank's step is part of a failure report.

        Args:
            metrics: Names and numbers, such as `{"loss": 2.31}`; reading a tensor waits for its GPU.
            step: Completed steps, from 1.
            total_steps: Steps in the whole run, when it is known.
        """
        if _state is not None:
            _state.report(dict(metrics), step=step, total_steps=total_steps)

    @contextmanager
    def phase(self, name: str) -> Generator[None, None, None]:
        """Say what the rank does besides training steps: `evaluate`, `compile`, `load data`."""
        if _state is None:
            yield
            return
        before = _state.enter_phase(name)
        try:
            yield
        finally:
            _state.enter_phase(before)

    @property
    def checkpoint(self) -> CheckpointSession:
        """The run's checkpoints: `load`, `save`, `save_if_due`.

        Outside a gang they go to a store that is thrown away.
        """
        global _session
        if _session is None:
            _load_torch()  # a missing extra is named as such
            from prefect_torch_elastic.checkpoint.session import CheckpointSession

            _session = CheckpointSession.open(self, _storage, _state, announce=_announce)
        return _session

    def should_stop(self, *, step: int) -> bool:
        """Whether all ranks agree to leave the training now, because the gang was asked to stop.

        Call it on all ranks, after each step. Once it was True, the function's value is no result: save what
        is worth saving, within the grace, and return. `checkpoint.save_if_due` does all of this by itself.

        Args:
            step: Completed optimizer steps, the same on all ranks.
        """
        return self.checkpoint.should_stop(step=step)

    def init_process_group(self, backend: str | None = None, **options: Any) -> None:
        """Call `torch.distributed.init_process_group` once; `nccl` where there are GPUs, else `gloo`.

        Args:
            backend: A backend to use instead.
            options: Passed on to torch.
        """
        torch = _load_torch()
        if torch.distributed.is_initialized():
            return
        if torch.cuda.is_available():
            torch.cuda.set_device(self.device)
            options.setdefault("device_id", self.device)
        if not self.master_addr:  # outside a gang: a group of one, without a port
            options.setdefault("store", torch.distributed.HashStore())
            options.update(rank=0, world_size=1)
        torch.distributed.init_process_group(backend or _default_backend(torch), **options)

    def prepare_model(self, model: Module, **options: Any) -> Module:
        """Move `model` to this rank's device and wrap it in DistributedDataParallel.

        Args:
            model: The model; all ranks build the same one.
            options: Passed on to DistributedDataParallel.

        Returns:
            The wrapped model; the model itself in a gang of one.
        """
        torch = _load_torch()
        model = model.to(self.device)
        if self.world_size == 1:
            return model
        self.init_process_group()
        devices = [self.device.index] if self.device.type == "cuda" else None
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=devices, **options)

    def prepare_data_loader(self, loader: DataLoader[Any], *, seed: int = 0) -> Any:
        """Return a loader over this rank's share of the samples, shuffled if `loader` is.

        It knows its position: put it into the `state` of `checkpoint.save` and `checkpoint.load`, and a
        resumed run goes on behind the last batch that was used, on any number of ranks. Each run over it is
        the next epoch, with another order; `loader.set_epoch(epoch)` may be called but need not be.

        Args:
            loader: Goes over a whole dataset, in order or shuffled, or over an `ElasticShards`.
            seed: What the orders are drawn from, the same on all ranks; an `ElasticShards` has its own.

        Returns:
            An `ElasticDataLoader` or `ElasticShardLoader`; in a gang of one, `loader` itself if it reads
            another stream or chooses its samples itself: it has no position then.

        Raises:
            TypeError: If `loader` reads another stream or chooses its samples itself in a larger gang: only
                you can split these.
        """
        data = _load_torch().utils.data
        from prefect_torch_elastic.checkpoint.data import ElasticDataLoader
        from prefect_torch_elastic.checkpoint.shard_loader import ElasticShardLoader
        from prefect_torch_elastic.checkpoint.shards import ElasticShards

        source = cast("Any", loader)
        if isinstance(source, ElasticDataLoader | ElasticShardLoader):
            return source
        place = {"rank": self.rank, "world_size": self.world_size}
        kept = {name: getattr(source, name) for name in _LOADER_OPTIONS}
        if isinstance(source.dataset, ElasticShards):
            return ElasticShardLoader(source.dataset, **place, **kept)
        if _goes_over_all(source, data):
            shuffle = type(source.sampler) is data.RandomSampler
            return ElasticDataLoader(source.dataset, **place, shuffle=shuffle, seed=seed, **kept)
        if self.world_size == 1:
            return source
        if isinstance(source.dataset, data.IterableDataset):
            raise TypeError(
                f"`{type(source.dataset).__name__}` is a stream, and only you know its parts. Give them as "
                f"`ElasticShards(names, read)` to the loader. Or: {_SPLIT_YOURSELF}"
            )
        raise TypeError(
            "`prepare_data_loader` splits loaders that go over a whole dataset, in order or shuffled. "
            + _SPLIT_YOURSELF
        )


def get_context() -> ElasticContext:
    """Return this rank's context; outside a gang, a context of one rank."""
    if _state is None:
        environment: Mapping[str, str] = {}
    else:
        environment = os.environ
    return ElasticContext(
        rank=int(environment.get("RANK", 0)),
        local_rank=int(environment.get("LOCAL_RANK", 0)),
        world_size=int(environment.get("WORLD_SIZE", 1)),
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", 1)),
        node_rank=int(environment.get("GROUP_RANK", 0)),
        nnodes=int(environment.get("GROUP_WORLD_SIZE", 1)),
        master_addr=environment.get("MASTER_ADDR", ""),
        master_port=int(environment.get("MASTER_PORT", 0)),
        restart_count=int(environment.get(RESTART_COUNT, 0)),
        attempt=int(environment.get(ATTEMPT, 1)),
        preemption_count=int(environment.get(PREEMPTION_COUNT, 0)),
        run_key=environment.get(RUN_KEY, "local"),
        flow_run_id=environment.get(FLOW_RUN_ID, ""),
        task_run_id=environment.get(TASK_RUN_ID, ""),
    )


def in_rank() -> bool:
    """Whether this process is a rank of a gang."""
    return _state is not None


def bind(
    state: RankState,
    storage: Mapping[str, Any],
    *,
    announce: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Called once by the rank's main: from now on this process is a rank with this page.

    Args:
        state: The rank's page.
        storage: Where the run's checkpoints are; empty when there is no run folder.
        announce: Called with the fields of a `CheckpointSaved` when a checkpoint exists, in any thread.
    """
    global _state, _storage, _announce
    _state, _storage, _announce = state, storage, announce


@contextmanager
def own_checkpoints() -> Generator[None, None, None]:
    """Outside a gang, give one call of a body checkpoints of its own: tests must not see each other's."""
    global _session
    if in_rank():
        yield
        return
    before, _session = _session, None
    try:
        yield
        close_checkpoints()
    finally:
        _session = before


def close_checkpoints() -> None:
    """Wait, together with the other ranks, for the last upload of a function that has ended well.

    It does nothing if there were no checkpoints, or if a peer is lost: nobody would answer.

    Raises:
        CheckpointError: If the upload failed.
    """
    request = _state.stop_request if _state is not None else None
    if _session is not None and (request is None or request.reason.lets_ranks_save):
        _session.close()


def stop_was_requested() -> bool:
    """Whether this rank was asked to stop, by its own page or by the vote of all ranks."""
    asked = _state is not None and _state.stop_request is not None
    return asked or stop_was_carried_out()


def stop_was_carried_out() -> bool:
    """Whether the ranks agreed to stop: what the function returns after that is no result."""
    return _session is not None and _session.stop_seen


def _goes_over_all(loader: Any, data: Any) -> bool:
    """Whether `loader` gives each item of its dataset once, in batches of its own making."""
    if loader.batch_sampler is not None and loader.batch_size is None:
        return False
    sampler = loader.sampler
    if type(sampler) is not data.RandomSampler:
        return type(sampler) is data.SequentialSampler
    return not sampler.replacement and sampler.num_samples == len(loader.dataset)


def _default_backend(torch: Any) -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def _load_torch() -> Any:
    try:
        import torch
    except ModuleNotFoundError as error:
        cure = "pip install 'prefect-torch-elastic[torch]'"
        raise MissingExtraError(f"A rank needs `torch`. Run `{cure}` where the gang runs.") from error
    return torch
