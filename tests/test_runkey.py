"""Which run a call belongs to: found again by retries and restarts, never shared by accident."""

from __future__ import annotations

import gc
import hashlib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_elastic import keysinuse, runkey
from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.runkey import (
    CalledTask,
    CallIdentity,
    identify_call,
    mapping,
    name_folder,
    render_run_key,
)

UNHASHABLE = {}.keys()


@dataclass
class FakeFlowRun:
    id: str = "flow-run-1"
    parent_task_run_id: str | None = None


class FakeFlow:
    """Prefect's context of a flow run, as much as is looked at."""

    def __init__(self, flow_run: FakeFlowRun | None = None, *, detached: bool = False) -> None:
        self.flow_run = flow_run or FakeFlowRun()
        self.detached = detached


def train(x: Any = 0) -> None: ...


def called(x: Any = 0, *, run: str = "task-run-1", **changes: Any) -> CalledTask:
    fields: dict[str, Any] = {
        "name": "train",
        "function": train,
        "source": "def train(x): ...",
        "arguments": {"x": x},
        "run_key": None,
        "task_run_id": run,
        **changes,
    }
    return CalledTask(**fields)


def identify(call: CalledTask, flow: FakeFlow | None) -> CallIdentity:
    with identify_call(call, flow) as identity:
        return identity


def identify_all(calls: list[CalledTask], flow: FakeFlow) -> list[CallIdentity]:
    """Identify calls that run at the same time."""
    with ExitStack() as stack:
        return [stack.enter_context(identify_call(call, flow)) for call in calls]


# ---------------------------------------------------------------- identity


def test_run_key_is_the_task_and_a_short_hash():
    identity = identify(called(name="train a model"), FakeFlow())
    name, _, digest = identity.run_key.rpartition("-")
    assert name == "train-a-model"
    assert len(digest) == 16
    assert int(digest, 16)
    assert identity.folder == identity.run_key
    assert identity.root == "flow-run-1"
    assert len(identity.digest) == 32


def test_call_is_found_again_by_another_process_of_the_same_flow_run():
    one = [identify(called(x, run=f"a{i}"), FakeFlow()) for i, x in enumerate([1, 1, 2])]
    first, second = FakeFlow(), FakeFlow()
    assert [identify(called(x, run=f"b{i}"), first) for i, x in enumerate([1, 1, 2])] == [
        identify(called(x, run=f"c{i}"), second) for i, x in enumerate([1, 1, 2])
    ]
    assert one[0] == one[1]  # each in a context of its own: the first call of a flow run that starts again


def test_equal_calls_of_one_flow_run_get_runs_of_their_own():
    flow = FakeFlow()
    identities = [identify(called(1, run=f"t{i}"), flow) for i in range(5)]
    assert len({one.run_key for one in identities}) == len({one.digest for one in identities}) == 5


def test_retry_of_a_task_run_keeps_its_run():
    flow = FakeFlow()
    first = identify(called(1, run="a"), flow)
    other = identify(called(1, run="b"), flow)
    assert identify(called(1, run="a"), flow) == first != other


def test_call_in_a_task_keeps_its_run_over_the_retries_of_that_task():
    flow = FakeFlow()
    first = [identify(called(1, run=f"a{i}", within=("outer", 1)), flow) for i in range(2)]
    other = identify(called(1, run="b", within=("other", 1)), flow)
    again = [identify(called(1, run=f"c{i}", within=("outer", 2)), flow) for i in range(3)]
    assert again[:2] == first
    assert len({one.run_key for one in [*first, other, again[2]]}) == 4


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"name": "other"}, id="task"),
        pytest.param({"arguments": {"x": 2}}, id="arguments"),
        pytest.param({"function": identify}, id="function"),
        pytest.param({"env": {"LR": "1"}}, id="environment"),
    ],
)
def test_other_call_is_another_run(changes):
    plain, other = identify(called(1), FakeFlow()), identify(called(1, **changes), FakeFlow())
    assert plain.run_key != other.run_key
    assert plain.digest != other.digest


def test_other_flow_run_is_another_run():
    one, other = (identify(called(1), FakeFlow(FakeFlowRun(id=name))) for name in ("a", "b"))
    assert one.run_key != other.run_key
    assert one.digest != other.digest


def test_edited_function_is_another_call_of_the_same_run():
    plain, edited = identify(called(1), FakeFlow()), identify(called(1, source="def train(x): 1"), FakeFlow())
    assert plain.run_key == edited.run_key
    assert plain.digest != edited.digest


def make(value: Any) -> Any:
    def train(x: Any = 0) -> Any:
        return value

    return train


def test_calls_that_differ_by_what_they_close_over_keep_their_runs_when_they_come_in_another_order():
    first, second = FakeFlow(), FakeFlow()
    one, other = (identify(called(function=make(value), run=f"a{value}"), first) for value in (1, 2))
    swapped = [identify(called(function=make(value), run=f"b{value}"), second) for value in (2, 1)]
    assert swapped == [other, one]
    assert one.run_key != other.run_key


def test_refreshed_call_has_a_run_of_its_own():
    """In the run of the call that it repeats there is nothing left to train."""
    flow = FakeFlow()
    plain = identify(called(1), flow)
    again = identify(called(1, again=True), flow)
    assert plain.run_key != again.run_key
    assert plain.digest != again.digest
    assert again == identify(called(1, again=True), FakeFlow())  # but its own retries find it
    named = [identify(called(1, again=again, run_key="7b"), FakeFlow()) for again in (True, False)]
    assert named[0].run_key == named[1].run_key == "7b"
    assert named[0].digest != named[1].digest


def test_given_run_key_is_shared_over_flow_runs_and_its_calls_are_not():
    one, other = (identify(called(1, run_key="7b"), FakeFlow(FakeFlowRun(id=name))) for name in ("a", "b"))
    assert one.run_key == other.run_key == one.folder == "7b"
    assert one.digest != other.digest
    flow = FakeFlow()
    first, second = (identify(called(1, run_key="7b", run=name), flow) for name in ("a", "b"))
    assert first.digest != second.digest


def test_task_without_a_flow_is_named_by_its_task_run():
    identity = identify(called(1, run="0198f2c3"), None)
    assert (identity.run_key, identity.root) == ("0198f2c3", "0198f2c3")
    assert identify(called(1, run="0198f2c3"), None) == identity
    assert identify(called(1, run="0198f2c3", run_key="7b"), None).run_key == "7b"


def test_task_in_another_process_than_its_flow_is_named_by_its_task_run():
    one, other = (identify(called(1, run=name), FakeFlow(detached=True)) for name in ("a", "b"))
    assert one.run_key != other.run_key
    assert one == identify(called(1, run="a"), FakeFlow(detached=True))


def test_calls_are_forgotten_with_their_flow_run():
    before = len(runkey._all_calls)
    flow = FakeFlow()
    identify(called(1), flow)
    assert len(runkey._all_calls) == before + 1
    del flow
    gc.collect()
    assert len(runkey._all_calls) == before


# ---------------------------------------------------------------- subflows


class FakeClient:
    """Two levels: the flow run `root` has a subflow `middle`, which has the subflow `inner`."""

    task_runs = {  # noqa: RUF012  (a constant)
        "00000000-0000-0000-0000-000000000001": ("sub", "3", "middle"),
        "00000000-0000-0000-0000-000000000002": ("mid", "0", "root"),
    }
    flow_runs = {"middle": "00000000-0000-0000-0000-000000000002", "root": None}  # noqa: RUF012

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None: ...

    def read_task_run(self, task_run_id: Any) -> Any:
        from types import SimpleNamespace

        key, dynamic, flow = self.task_runs[str(task_run_id)]
        return SimpleNamespace(id=task_run_id, task_key=key, dynamic_key=dynamic, flow_run_id=flow)

    def read_flow_run(self, flow_run_id: Any) -> FakeFlowRun:
        return FakeFlowRun(id=flow_run_id, parent_task_run_id=self.flow_runs[flow_run_id])


def test_call_in_a_subflow_belongs_to_the_outermost_flow_run(monkeypatch):
    monkeypatch.setattr("prefect.client.orchestration.get_client", lambda **_: FakeClient())
    runkey.find_lineage.cache_clear()
    inner = FakeFlowRun(id="inner", parent_task_run_id="00000000-0000-0000-0000-000000000001")
    assert runkey.find_lineage("inner", inner.parent_task_run_id or "") == ("root", ("mid-0", "sub-3"))
    identity = identify(called(1), FakeFlow(inner))
    assert identity.root == "root"
    again = FakeFlowRun(id="inner, run again", parent_task_run_id=inner.parent_task_run_id)
    assert identify(called(1), FakeFlow(again)) == identity
    assert identify(called(1), FakeFlow(FakeFlowRun(id="root"))).run_key != identity.run_key


@pytest.mark.parametrize(
    ("task_runs", "is_same"),
    [
        pytest.param(
            [("prefect_torch_elastic.child.step", f"c0ffee-{number}") for number in (0, 1)],
            True,
            id="sent-again",
        ),
        pytest.param(
            [("prefect_torch_elastic.child.step", f"{call}-0") for call in ("c0", "ff")],
            False,
            id="other-call",
        ),
        pytest.param([("step-1", f"{number}") for number in (0, 1)], False, id="no-work-pool"),
    ],
)
def test_call_in_a_work_pool_keeps_its_run_when_it_is_sent_again(monkeypatch, task_runs, is_same):
    client = FakeClient()
    ids = [f"00000000-0000-0000-0000-00000000001{number}" for number in (0, 1)]
    known = {one: (*facts, "root") for one, facts in zip(ids, task_runs, strict=True)}
    monkeypatch.setattr(client, "task_runs", known, raising=False)
    monkeypatch.setattr("prefect.client.orchestration.get_client", lambda **_: client)
    runkey.find_lineage.cache_clear()
    flow_runs = [FakeFlowRun(id=f"child-{one}", parent_task_run_id=one) for one in ids]
    first, second = (identify(called(1), FakeFlow(one)) for one in flow_runs)
    assert (first == second) is is_same


# ---------------------------------------------------------------- what cannot be hashed


UNCLEAR = [
    pytest.param({"arguments": {"x": UNHASHABLE}}, id="arguments"),
    pytest.param({"function": make(UNHASHABLE)}, id="closure"),
]


@pytest.mark.parametrize("changes", UNCLEAR)
def test_calls_that_cannot_be_hashed_share_their_outcome_with_their_own_retries_only(changes):
    first, again = FakeFlow(), FakeFlow()
    one, two = (identify(called(run=name, **changes), first) for name in ("a", "b"))
    assert one.run_key != two.run_key
    assert identify(called(run="a", **changes), first) == one
    restarted = [identify(called(run=name, **changes), again) for name in ("c", "d")]
    assert [call.run_key for call in restarted] == [one.run_key, two.run_key]  # by their order
    assert len({call.digest for call in [one, two, *restarted]}) == 4  # and an order may change


def test_map_over_what_cannot_be_hashed_asks_for_a_run_key():
    with mapping(), pytest.raises(SpecError) as refused:
        identify(called(UNHASHABLE), FakeFlow())
    message = str(refused.value)
    assert "`train` is called several times at once, and `x` cannot be hashed" in message
    assert "Pass `run_key=`" in message


@pytest.mark.parametrize("changes", UNCLEAR)
def test_calls_at_the_same_time_that_cannot_be_hashed_ask_for_a_run_key(changes):
    with pytest.raises(SpecError, match="cannot be hashed"):
        identify_all([called(run=name, **changes) for name in ("a", "b")], FakeFlow())


def test_calls_at_the_same_time_that_cannot_be_hashed_share_no_outcome_under_a_run_key():
    calls = [called(UNHASHABLE, run=name, run_key=name) for name in ("a", "b")]
    one, two = identify_all(calls, FakeFlow())
    assert (one.run_key, two.run_key) == ("a", "b")
    assert one.digest != two.digest
    swapped = identify_all([calls[1], calls[0]], FakeFlow())
    assert swapped[1].digest != two.digest


def test_map_over_plain_arguments_needs_no_run_key():
    with mapping():
        identities = identify_all([called(x, run=str(x)) for x in range(3)], FakeFlow())
    assert len({one.run_key for one in identities}) == 3


def test_map_whose_calls_have_one_run_key_is_refused():
    flow = FakeFlow()
    with mapping(), pytest.raises(SpecError) as refused:
        identify_all([called(x, run=str(x), run_key="7b") for x in range(2)], flow)
    assert "`run_key='7b'` is the key of two calls of one `map` of `train`" in str(refused.value)
    assert 'such as `run_key="train-{lr}"`' in str(refused.value)


def test_retry_in_a_map_and_the_next_map_may_have_the_same_run_key():
    flow = FakeFlow()
    for _ in range(2):
        with mapping():
            identities = [identify(called(1, run="a", run_key="7b"), flow) for _ in range(2)]
        assert identities[0] == identities[1]
    for x in range(2):  # no map: one after the other
        identify(called(x, run=f"t{x}", run_key="7b"), flow)


# ---------------------------------------------------------------- keys in use


FLOWS = [pytest.param(FakeFlow(), id="same-flow"), pytest.param(None, id="no-flow")]


@pytest.mark.parametrize("flow", FLOWS)
def test_run_key_that_another_task_run_uses_is_refused(flow: FakeFlow | None):
    with (
        identify_call(called(1, name="pretrain", run="a", run_key="7b"), FakeFlow()),
        pytest.raises(SpecError) as refused,
    ):
        identify(called(2, name="tune", run="b", run_key="7b"), flow)
    message = str(refused.value)
    assert "`run_key='7b'` of `tune` is in use: `pretrain` (task run a)" in message
    assert "Call one after the other, or give each a key of its own" in message


def test_run_key_is_free_again_when_its_task_run_has_ended():
    flow = FakeFlow()
    with pytest.raises(KeyError), identify_call(called(1, run="a", run_key="7b"), flow):
        raise KeyError
    identify(called(2, run="b", run_key="7b"), flow)
    assert keysinuse._keys_in_use == {}


def test_run_key_stays_in_use_after_somebody_was_refused():
    flow = FakeFlow()
    with identify_call(called(1, run="a", run_key="7b"), flow):
        for other in ("b", "c"):
            with pytest.raises(SpecError, match=r"task run a\)"):
                identify(called(2, run=other, run_key="7b"), flow)


def test_task_run_may_use_its_own_run_key_again():
    call = called(1, run="a", run_key="7b")
    with identify_call(call, FakeFlow()) as first, identify_call(call, FakeFlow()) as again:
        assert first == again
    identify(called(2, run="b", run_key="7b"), FakeFlow())


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"run_key": "13b"}, id="other-key"),
        pytest.param({"run_key": "7b", "store": "s3://other"}, id="other-store"),
        pytest.param({"run_key": None}, id="no-key"),
    ],
)
def test_task_runs_in_other_folders_run_at_once(changes: dict[str, Any]):
    one, other = identify_all(
        [called(1, run="a", run_key="7b", store="s3://one"), called(2, run="b", **changes)], FakeFlow()
    )
    assert one.digest != other.digest


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("key", ["pretrain-7b", "a.b_c=1", "0198f2c3-5d1e-7c39-8f5a-0a6f1f3b2c4d"])
def test_plain_run_key_is_the_folder_name(key):
    assert name_folder(key) == key


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a/b", "a-b"),
        ("a/b", "a b"),
        ("a", " a"),
        (".a", "a"),
        ("x" * 101, "x" * 102),
        ("x" * 100, "x" * 101),
        ("ä", "ö"),
        ("..", "."),
        ("", "run"),
    ],
)
def test_run_keys_that_look_alike_get_folders_of_their_own(one, other):
    assert name_folder(one) != name_folder(other)


@given(st.text(max_size=300))
def test_folder_name_is_one_short_component_that_hides_nothing(key):
    name = name_folder(key)
    assert name == Path(name).name
    assert not name.startswith(".")
    assert len(name) <= 110
    assert name == name_folder(key)


def test_folder_name_is_stable_over_versions():
    digest = hashlib.sha256(b"flow/train 1").hexdigest()[:8]
    assert name_folder("flow/train 1") == f"flow-train-1-{digest}"


# ---------------------------------------------------------------- run keys


@pytest.mark.parametrize(
    ("run_key", "name"),
    [
        pytest.param(None, None, id="none"),
        pytest.param("pretrain", "pretrain", id="text"),
        pytest.param("{size}-{lr:.0e}", "7b-3e-04", id="template"),
        pytest.param(lambda size, lr: f"{size}x", "7bx", id="callable"),
    ],
)
def test_run_key_is_made_of_the_parameters(run_key, name):
    assert render_run_key(run_key, {"size": "7b", "lr": 3e-4}) == name


def raise_key_error(**_):
    raise KeyError("size")


@pytest.mark.parametrize(
    "run_key",
    [
        pytest.param("{sise}", id="unknown-parameter"),
        pytest.param("{}", id="no-name"),
        pytest.param("{0}", id="number"),
        pytest.param("{size", id="open-bracket"),
        pytest.param("{size!z}", id="unknown-conversion"),
        pytest.param("{size:d}", id="wrong-format"),
        pytest.param("{size.width}", id="no-such-attribute"),
        pytest.param("{steps[0]}", id="no-such-item"),
        pytest.param("{nothing:>8}", id="format-of-none"),
        pytest.param("  ", id="blank"),
        pytest.param("{empty}", id="empty"),
        pytest.param("{nothing}", id="none"),
        pytest.param(lambda **_: None, id="callable-gives-none"),
        pytest.param(raise_key_error, id="callable-raises"),
        pytest.param(lambda: "x", id="callable-takes-nothing"),
    ],
)
def test_run_key_that_cannot_be_made_is_refused(run_key):
    with pytest.raises(SpecError, match="`run_key"):
        render_run_key(run_key, {"size": "7b", "steps": 3, "nothing": None, "empty": ""})


def test_run_key_that_does_not_fit_names_the_parameters():
    with pytest.raises(SpecError) as refused:
        render_run_key("{sise}", {"size": "7b", "lr": 1.0})
    assert "`run_key='{sise}'` does not fit the task's parameters: KeyError: 'sise'." in str(refused.value)
    assert "Use `{size}`, `{lr}`." in str(refused.value)
