"""How a source is kept current: broken watches hide nothing, and nobody is told twice that they broke."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from prefect_torch_elastic.kubernetes.listwatch import (
    LONGEST_DELAY_SECONDS,
    REFUSED_SECONDS,
    STEADY_SECONDS,
    Source,
    SourceWatcher,
)
from prefect_torch_elastic.kubernetes.resources import Kind
from tests.gangobjects import (
    AWAY,
    EXPIRED,
    FORBIDDEN,
    NOT_INSTALLED,
    Clock,
    ScriptedCluster,
    Thing,
    as_cluster,
    jobset,
    workload,
)


class Watched:
    """A watcher of the JobSets of a scripted cluster, and what it handed on."""

    def __init__(self, *things: Thing, kind: Kind = Kind.JOBSET, is_optional: bool = False) -> None:
        self.clock = Clock()
        self.cluster = ScriptedCluster(self.clock, *things)
        self.told: list[tuple[str, list[str]]] = []
        self.warnings: list[str] = []
        self.watcher = SourceWatcher(
            as_cluster(self.cluster),
            Source(kind=kind, namespace="ml", is_optional=is_optional),
            replace=lambda _, items: self.told.append(("all", [one["metadata"]["name"] for one in items])),
            put=lambda _, thing: self.told.append(("put", [thing["metadata"]["name"]])),
            remove=lambda _, thing: self.told.append(("removed", [thing["metadata"]["name"]])),
            warn=self.warnings.append,
            clock=self.clock,
            jitter=lambda: 0.5,
        )


def test_watcher_lists_and_then_passes_on_what_happens():
    watched = Watched(jobset("a"))
    bookmark = ("BOOKMARK", {"metadata": {"resourceVersion": "9"}})
    events = [("ADDED", jobset("b")), bookmark, ("MODIFIED", jobset("a")), ("DELETED", jobset("b"))]
    watched.cluster.scripts[Kind.JOBSET] = [events]
    watched.watcher.run_once()
    assert watched.told == [("all", ["a"]), ("put", ["b"]), ("put", ["a"]), ("removed", ["b"])]


@pytest.mark.parametrize(
    "script",
    [
        pytest.param([], id="end"),
        pytest.param([EXPIRED], id="410"),
        pytest.param([("ADDED", jobset("b")), AWAY], id="drop"),
        pytest.param([("MODIFIED", {"no": "metadata"})], id="garbage"),
        pytest.param([270.0, AWAY], id="silence"),
        pytest.param([RuntimeError("a bug")], id="bug"),
    ],
)
def test_watcher_finds_what_a_watch_missed(script: Sequence[Any]):
    watched = Watched(jobset("a"))
    watched.cluster.scripts[Kind.JOBSET] = [script]
    watched.watcher.run_once()
    watched.cluster.put(jobset("missed"))
    assert watched.watcher.run_once() <= LONGEST_DELAY_SECONDS
    assert watched.told[-1] == ("all", ["a", "missed"])


def test_watcher_waits_longer_when_each_watch_breaks_at_once():
    watched = Watched()
    delays = [watched.watcher.run_once() for _ in range(9)]
    assert delays[0] < delays[1] < delays[2]
    assert delays[-1] == LONGEST_DELAY_SECONDS


def test_watcher_lists_again_soon_after_a_watch_that_lived_long():
    watched = Watched()
    watched.cluster.scripts[Kind.JOBSET] = [[], [], [], [STEADY_SECONDS]]
    delays = [watched.watcher.run_once() for _ in range(4)]
    assert delays[-1] == delays[0]


def test_watcher_warns_once_when_the_api_stays_away_and_when_it_is_back():
    watched = Watched()
    watched.cluster.errors[Kind.JOBSET] = [AWAY] * 5
    for _ in range(2):
        watched.watcher.run_once()
    assert watched.warnings == []
    for _ in range(4):
        watched.watcher.run_once()
    assert len(watched.warnings) == 2
    assert "are seen again" in watched.warnings[-1]


def test_watcher_takes_an_optional_kind_as_empty_when_no_role_allows_it():
    watched = Watched(kind=Kind.WORKLOAD, is_optional=True)
    watched.cluster.errors[Kind.WORKLOAD] = [FORBIDDEN, FORBIDDEN]
    delays = [watched.watcher.run_once() for _ in range(2)]
    assert (watched.told, len(watched.warnings)) == ([("all", [])], 1)
    assert min(delays) >= REFUSED_SECONDS / 2


def test_watcher_says_nothing_when_kueue_is_not_installed():
    watched = Watched(kind=Kind.WORKLOAD, is_optional=True)
    watched.cluster.errors[Kind.WORKLOAD] = [NOT_INSTALLED]
    watched.watcher.run_once()
    assert (watched.told, watched.warnings) == ([("all", [])], [])


def test_watcher_keeps_what_it_knows_when_a_role_is_taken_away():
    watched = Watched(workload(), kind=Kind.WORKLOAD, is_optional=True)
    watched.watcher.run_once()
    watched.cluster.errors[Kind.WORKLOAD] = [FORBIDDEN]
    watched.watcher.run_once()
    assert watched.told == [("all", ["jobset-gang-16d98"])]


def test_watcher_warns_when_no_role_allows_what_is_needed():
    watched = Watched()
    watched.cluster.errors[Kind.JOBSET] = [FORBIDDEN]
    watched.watcher.run_once()
    assert (watched.told, len(watched.warnings)) == ([], 1)


def test_watcher_ends_while_it_waits_for_an_event():
    watched = Watched()
    watched.cluster.scripts[Kind.JOBSET] = [[("ADDED", jobset("a")), math.inf]]
    thread = threading.Thread(target=watched.watcher.run)
    thread.start()
    while not watched.cluster.watches:
        thread.join(0.01)
    watched.watcher.stop()
    thread.join(10)
    assert not thread.is_alive()
