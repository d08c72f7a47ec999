"""Artifacts: created once, found again, changed in place; and where their links lead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.exceptions import ObjectNotFound

from prefect_torch_elastic.artifacts.links import fetch_base, render_link
from prefect_torch_elastic.artifacts.publisher import ArtifactKind, Document, Publisher, render_key

FLOW_RUN, TASK_RUN, JOB = str(uuid4()), str(uuid4()), str(uuid4())


class FakeApi:
    """The artifacts of an API, and how it was asked."""

    def __init__(self) -> None:
        self.artifacts: dict[UUID, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.loses_answer = False

    @contextmanager
    def open(self) -> Iterator[Any]:
        yield self

    def create_artifact(self, body: Any) -> Any:
        self.requests.append("create")
        new = SimpleNamespace(id=uuid4())
        self.artifacts[new.id] = body.model_dump()
        if self.loses_answer:
            raise httpx.ReadTimeout("no answer")
        return new

    def read_artifacts(self, *, artifact_filter: Any, sort: Any, limit: int) -> list[Any]:
        self.requests.append("find")
        where = {
            "key": artifact_filter.key,
            "task_run_id": artifact_filter.task_run_id,
            "flow_run_id": artifact_filter.flow_run_id,
        }
        return [
            SimpleNamespace(id=known)
            for known, body in self.artifacts.items()
            if all(body[name] in wanted.any_ for name, wanted in where.items() if wanted)
        ]

    def request(self, method: str, path: str, *, json: Any, path_params: Any) -> None:
        self.requests.append(method)
        if path_params["id"] not in self.artifacts:
            raise ObjectNotFound(Exception("gone"))
        self.artifacts[path_params["id"]].update(json)

    def publisher(self) -> Publisher:
        return Publisher(self.open, flow_run_id=FLOW_RUN, task_run_id=TASK_RUN)


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


def make(text: str = "# Report", **fields: Any) -> Document:
    key = render_key("run-report", "gpt")
    return Document(key=key, kind=ArtifactKind.MARKDOWN, description="short", data=text, **fields)


def test_artifact_is_created_on_the_task_run_and_its_flow_run(api):
    artifact_id = api.publisher().publish(make())
    body = api.artifacts[artifact_id]
    assert (body["key"], body["type"], body["data"]) == ("run-report-gpt", "markdown", "# Report")
    assert (str(body["flow_run_id"]), str(body["task_run_id"])) == (FLOW_RUN, TASK_RUN)


def test_newer_version_takes_the_place_of_the_older(api):
    publisher = api.publisher()
    first = publisher.publish(make())
    assert publisher.publish(make("# Newer")) == first
    assert api.artifacts[first]["data"] == "# Newer"
    assert api.requests == ["find", "create", "PATCH"]


def test_same_version_is_not_sent_again(api):
    publisher = api.publisher()
    publisher.publish(make())
    publisher.publish(make())
    assert api.requests == ["find", "create"]


def test_another_process_goes_on_with_the_same_artifact(api):
    first = api.publisher().publish(make())
    assert api.publisher().publish(make("# Newer")) == first
    assert len(api.artifacts) == 1


def test_artifact_whose_creation_got_no_answer_is_not_created_twice(api):
    publisher, api.loses_answer = api.publisher(), True
    with pytest.raises(httpx.ReadTimeout):
        publisher.publish(make())
    api.loses_answer = False
    publisher.publish(make())
    assert len(api.artifacts) == 1


def test_artifact_that_somebody_deleted_is_created_again(api):
    publisher = api.publisher()
    api.artifacts.pop(publisher.publish(make()))
    again = publisher.publish(make("# Newer"))
    assert api.artifacts[again]["data"] == "# Newer"


def test_text_that_no_database_holds_is_replaced(api):
    artifact_id = api.publisher().publish(make("a\0b\ud83d"))
    assert api.artifacts[artifact_id]["data"] == "a\ufffdb\ufffd"


def test_page_of_a_job_is_apart_from_that_of_the_task_with_the_same_key(api):
    publisher = api.publisher()
    assert publisher.publish(make()) != publisher.publish(make("see there", flow_run_id=JOB))
    of_job = next(body for body in api.artifacts.values() if str(body["flow_run_id"]) == JOB)
    assert of_job["task_run_id"] is None


@pytest.mark.parametrize(
    ("name", "number", "key"),
    [
        pytest.param("gpt-small", None, "metrics-gpt-small", id="as it is"),
        pytest.param("gpt-small", 2, "metrics-gpt-small-2", id="numbered"),
        pytest.param("GPT small", None, "metrics-gpt-small-7c5ee1e5", id="changed"),
        pytest.param("模型", None, "metrics-fdfaf6a2", id="nothing left"),
        pytest.param("gpt\ud83d", None, "metrics-gpt-00000000", id="half a letter"),
    ],
)
def test_key_has_only_what_the_api_accepts(name, number, key):
    found = render_key("metrics", name, number)
    assert found.rpartition("-")[0] == key.rpartition("-")[0]
    assert set(found) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_keys_of_names_that_look_alike_are_apart():
    assert render_key("metrics", "a b") != render_key("metrics", "a_b")


def answer(code: int, body: Any) -> httpx.MockTransport:
    return httpx.MockTransport(lambda request: httpx.Response(code, json=body))


@pytest.mark.parametrize(
    ("transport", "base"),
    [
        pytest.param(answer(200, {"v2_base_url": "/v2"}), "http://ui:4200/v2", id="both"),
        pytest.param(answer(200, {"v2_base_url": None}), "http://ui:4200", id="first only"),
        pytest.param(answer(404, {}), "http://ui:4200", id="old server"),
        pytest.param(answer(200, ["page"]), "http://ui:4200", id="something else"),
    ],
)
def test_link_leads_to_the_newer_ui_if_there_is_one(transport, base):
    found = fetch_base("http://ui:4200/", transport=transport)
    assert found == base
    artifact_id = uuid4()
    assert render_link(found, artifact_id) == f"{base}/artifacts/artifact/{artifact_id}"


def test_there_is_no_link_without_a_ui():
    assert render_link(fetch_base(""), uuid4()) == ""
