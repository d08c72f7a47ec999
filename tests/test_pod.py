"""What a pod reads of its place in a gang, and what it leaves behind for whoever reads its status."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.pod import MOST_MESSAGE_BYTES, LastWords, Why, read_pod, render_last_words

# As the manifest sets them, and the Job controller adds.
ENVIRONMENT = {
    "PREFECT_TORCH_ELASTIC_CONTRACT": "1",
    "PREFECT_TORCH_ELASTIC_NNODES": "4",
    "PREFECT_TORCH_ELASTIC_LEADER": "train-node-0-0.train:29400",
    "PREFECT_TORCH_ELASTIC_GANG": "train",
    "PREFECT_TORCH_ELASTIC_GRACE_SECONDS": "60.0",
    "PREFECT_TORCH_ELASTIC_ATTEMPT": "2",
    "PREFECT_TORCH_ELASTIC_POD": "train-node-0-3-abcde",
    "PREFECT_TORCH_ELASTIC_POD_IP": "10.0.0.7",
    "PREFECT_TORCH_ELASTIC_NODE_NAME": "gpu-17",
    "PREFECT_TORCH_ELASTIC_TERMINATION_LOG": "/dev/termination-log",
    "JOB_COMPLETION_INDEX": "3",
}


def test_pod_reads_its_place():
    pod = read_pod(ENVIRONMENT)
    assert pod
    assert (pod.node, pod.nnodes, pod.is_leader) == (3, 4, False)
    assert (pod.leader_host, pod.leader_port) == ("train-node-0-0.train", 29400)
    assert (pod.attempt, pod.name, pod.address, pod.machine) == (
        2,
        "train-node-0-3-abcde",
        "10.0.0.7",
        "gpu-17",
    )
    assert pod.hold_seconds == 70


def test_pods_of_two_attempts_belong_to_two_gangs():
    pods = [read_pod({**ENVIRONMENT, "PREFECT_TORCH_ELASTIC_ATTEMPT": attempt}) for attempt in ("0", "1")]
    assert [pod and pod.gang for pod in pods] == ["train-0", "train-1"]


def test_first_node_leads():
    pod = read_pod({**ENVIRONMENT, "JOB_COMPLETION_INDEX": "0"})
    assert pod
    assert pod.is_leader


def test_process_outside_of_a_gang_has_no_place():
    assert read_pod({"JOB_COMPLETION_INDEX": "0", "PATH": "/bin"}) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"PREFECT_TORCH_ELASTIC_LEADER": None}, "KeyError", id="missing"),
        pytest.param({"PREFECT_TORCH_ELASTIC_NNODES": "four"}, "ValueError", id="no-number"),
        pytest.param({"PREFECT_TORCH_ELASTIC_GRACE_SECONDS": ""}, "ValueError", id="empty"),
        pytest.param(
            {"JOB_COMPLETION_INDEX": "4"}, "`JOB_COMPLETION_INDEX=4` is not in a gang", id="outside"
        ),
        pytest.param({"PREFECT_TORCH_ELASTIC_CONTRACT": None}, "different versions", id="older-worker"),
        pytest.param({"PREFECT_TORCH_ELASTIC_CONTRACT": "2"}, "different versions", id="newer-worker"),
    ],
)
def test_place_that_contradicts_itself_is_refused(change: dict[str, Any], said: str):
    environment = {name: value for name, value in {**ENVIRONMENT, **change}.items() if value is not None}
    with pytest.raises(SpecError, match=said):
        read_pod(environment)


def test_last_words_are_json_without_what_is_not_known():
    words = LastWords(exit_code=65, why=Why.FAILED, message="rank 3 failed", node=0, rank=3)
    assert json.loads(render_last_words(words)) == {
        "exit_code": 65,
        "why": "failed",
        "message": "rank 3 failed",
        "node": 0,
        "rank": 3,
    }


@pytest.mark.parametrize("character", ["x", "é", "\n", '"', "\N{PILE OF POO}"])
def test_last_words_stay_whole_json_within_what_a_kubelet_keeps(character: str):
    words = LastWords(exit_code=65, why=Why.FAILED, message=character * 10_000, node=0, step=120)
    text = render_last_words(words)
    kept = json.loads(text)
    assert MOST_MESSAGE_BYTES * 0.8 < len(text.encode()) <= MOST_MESSAGE_BYTES
    assert kept["step"] == 120
    assert set(kept["message"]) == {character}
