"""What a stack consists of: its folders, its pools, and the variables that point a process at it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prefect_torch_elastic.errors import ElasticError, SpecError

POOLS: Mapping[str, str] = {"driver": "process", "data": "process", "train": "process"}
"""The pools of a stack and their types, unless somebody asks for others."""

DRIVER_POOL = "driver"
"""Where the flows of `dev run` run."""

MARK = "PREFECT_TORCH_ELASTIC_STACK"
"""Environment variable that all processes of a stack carry, so that whoever is left can find them."""

HOST = "127.0.0.1"
"""All that listens, listens here."""

_STORE = "PREFECT_INTEGRATIONS_TORCH_ELASTIC_STORE"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_KEPT = ("PREFECT_LOGGING_", "PREFECT_INTEGRATIONS_")

# What holds in every process of a stack, whatever the person who starts it has set for other servers.
_SETTINGS: Mapping[str, str] = {
    "PREFECT_SERVER_APIHOST": HOST,
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",  # a second server would hide that the stack has gone
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    "PREFECT_CLI_PROMPT": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "true",  # `dev run` prints what a flow in another process returned
    # One machine with one user: a run starts, and a dead worker is seen, soon.
    "PREFECT_WORKER_QUERY_SECONDS": "1",
    "PREFECT_WORKER_PREFETCH_SECONDS": "1",
    "PREFECT_WORKER_HEARTBEAT_SECONDS": "10",
    "PREFECT_SERVER_SERVICES_FOREMAN_LOOP_SECONDS": "5",
    "PREFECT_LOGGING_TO_API_BATCH_INTERVAL": "0.5",
}


class StackError(ElasticError):
    """A stack did not start, does not run, or runs already."""


@dataclass(frozen=True, kw_only=True)
class StackPlan:
    """What to start.

    Attributes:
        home: Folder of everything that the stack keeps: database, store, results, logs.
        pools: Name and type of each work pool; each gets one worker, `<pool>-worker`.
        port: Port of the server on 127.0.0.1; 0 takes a free one.
        start_seconds: How long the start may take before it is given up, with the log of what did not start.
    """

    home: Path
    pools: Mapping[str, str] = field(default_factory=lambda: dict(POOLS))
    port: int = 0
    start_seconds: float = 120.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "home", Path(os.path.abspath(self.home.expanduser())))
        for name, kind in self.pools.items():
            if not _NAME.fullmatch(name):
                raise SpecError(f"`{name}` is no name for a pool. Use letters, digits, `-`, `_` and `.`.")
            if not kind:
                raise SpecError(f"the pool `{name}` has no type. Write `{name}=process`.")
        if not 0 <= self.port <= 65535:
            raise SpecError(f"`port={self.port}` is not accepted. Pass 0 (a free port) to 65535.")

    @property
    def logs(self) -> Path:
        """The folder with a log file for each part."""
        return self.home / "logs"

    @property
    def store_url(self) -> str:
        """The store of all runs."""
        return (self.home / "store").as_uri()

    @property
    def state_file(self) -> Path:
        """Where a running stack says what it is."""
        return self.home / "stack.json"

    @property
    def parts(self) -> list[str]:
        """What has to be ready before the stack is."""
        return ["server", *map(name_worker, self.pools)]

    def set_logs_aside(self) -> None:
        """Keep the logs of the stack before this one under another name, and no older ones."""
        for part in [*self.parts, "workers"]:
            log = self.logs / f"{part}.log"
            if log.exists():
                log.replace(log.with_suffix(".previous.log"))

    def make_folders(self) -> None:
        """Create the folders; nobody else may read the secrets in the database."""
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("prefect", "store", "results", "logs"):
            (self.home / name).mkdir(exist_ok=True)


def name_worker(pool: str) -> str:
    """Return the name of a pool's worker."""
    return f"{pool}-worker"


def render_addresses(port: int) -> tuple[str, str]:
    """Return the address of the API and of the UI."""
    return f"http://{HOST}:{port}/api", f"http://{HOST}:{port}"


def render_environment(plan: StackPlan, port: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that point a process at a stack, given what it has already."""
    python = str(Path(sys.executable).parent)
    folders = [name for name in environment.get("PATH", os.defpath).split(os.pathsep) if name != python]
    direct = [
        name for name in environment.get("no_proxy", environment.get("NO_PROXY", "")).split(",") if name
    ]
    no_proxy = ",".join([*direct, *(name for name in (HOST, "localhost") if name not in direct)])
    return {
        **_SETTINGS,
        "PREFECT_API_URL": render_addresses(port)[0],
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_HOME": str(plan.home / "prefect"),
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(plan.home / "results"),
        _STORE: plan.store_url,
        # A pool's `command` says `python`: it has to be the one that has this package.
        "PATH": os.pathsep.join([python, *folders]),
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }


def add_python_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a copy in which Python finds this package even when it is not installed."""
    parent = Path(__file__).parents[2]
    if parent.name in (
        "site-packages",
        "dist-packages",
    ):  # ahead of the standard library it could hide modules
        return dict(environment)
    known = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return {**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys([*known, str(parent)]))}


def scrub_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a copy without what points at another server: a profile, a key, a home."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith("PREFECT_") or (name.startswith(_KEPT) and name != _STORE)
    }
