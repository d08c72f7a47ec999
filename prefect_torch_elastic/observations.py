"""What is seen of ranks while they run: samples of their steps, where they stand, what they saved. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from prefect_torch_elastic.arrivals import Arrivals


@dataclass(frozen=True, kw_only=True)
class RankSample:
    """What a rank does at one moment of its round.

    Attributes:
        rank: The rank.
        step: Completed optimizer steps as it reported them; None before its first report.
        total_steps: Steps of the whole run, if it said so.
        idle_seconds: Since its last report; before the first one, since it started.
        phase: What user code called it, empty in training steps.
        busy: What the library does for it now: `load` or `save`; empty when it does nothing.
        steps: Reports in this round.
        step_seconds: Median time between two reports of this round; 0 before the second one.
        step_p95_seconds: The same for the slowest of 20.
        longest_seconds: The longest of them.
        save_seconds, load_seconds, phase_seconds: Sums over the round.
        memory_bytes: Resident memory at its highest so far.
        gpu_memory_bytes: Of its GPU, the same; 0 without one.
        arrivals: When it came to its newest collectives, in the first sample after a look.
    """

    rank: int
    step: int | None = None
    total_steps: int | None = None
    idle_seconds: float = 0.0
    phase: str = ""
    busy: str = ""
    steps: int = 0
    step_seconds: float = 0.0
    step_p95_seconds: float = 0.0
    longest_seconds: float = 0.0
    save_seconds: float = 0.0
    load_seconds: float = 0.0
    phase_seconds: float = 0.0
    memory_bytes: int = 0
    gpu_memory_bytes: int = 0
    arrivals: Arrivals | None = None


@dataclass(frozen=True, kw_only=True)
class NodeSample:
    """Upwards, at most once a second: what the ranks of a node do."""

    node: int
    round: int
    ranks: list[RankSample]


@dataclass(frozen=True, kw_only=True)
class LastCollective:
    """The newest collective of a rank in one process group, as the flight recorder has it.

    Attributes:
        group: Name of the process group.
        sequence: Its number there, from 1.
        operation: Such as `gloo:all_reduce`.
        is_done: Whether it has ended on this rank.
        sizes: Shapes of its inputs, as text.
        frames: Where user code called it, innermost first.
    """

    group: str
    sequence: int
    operation: str
    is_done: bool
    sizes: str = ""
    frames: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, kw_only=True)
class RankSnapshot:
    """Where a rank was when evidence was taken.

    Attributes:
        rank: The rank.
        is_alive: Whether its process lived.
        is_stopped: Whether it was held by SIGSTOP or a debugger.
        step, phase, busy, idle_seconds: As in `RankSample`.
        efforts: Of each of its processes by pid: seconds computed, bytes read and written, and how often its
            main thread has gone to sleep. What grows here does not stand still.
        is_in_disk: Whether one of them waited in the kernel for a disk or a file server.
        look_bytes: That it wrote because it was looked at, after its efforts were read.
        stacks: Of all its threads, cut.
        files: Where the whole evidence lies, on the machine of the rank.
        collectives: The newest one of each process group.
        has_answered: Whether it has said what they are; one that holds Python's lock in C code does not.
    """

    rank: int
    is_alive: bool
    is_stopped: bool = False
    step: int | None = None
    phase: str = ""
    busy: str = ""
    idle_seconds: float = 0.0
    efforts: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    is_in_disk: bool = False
    look_bytes: int = 0
    stacks: str = ""
    files: list[str] = field(default_factory=list[str])
    collectives: list[LastCollective] = field(default_factory=list[LastCollective])
    has_answered: bool = True


@dataclass(frozen=True, kw_only=True)
class EvidenceTaken:
    """Agent to launcher: the answer to `TakeEvidence`."""

    node: int
    number: int
    ranks: list[RankSnapshot]


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved:
    """Upwards: a checkpoint exists.

    Attributes:
        step, uuid: Which one.
        key: Its folder below the run folder.
        size_bytes: Of all ranks.
        seconds: From its begin until it existed.
        stall_seconds: How long training stood still for it on rank 0.
        metrics: That were given with it.
    """

    step: int
    uuid: str
    key: str
    size_bytes: int
    seconds: float
    stall_seconds: float
    metrics: dict[str, float] = field(default_factory=dict[str, float])
