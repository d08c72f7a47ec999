"""Manifests of gangs: twelve of them word by word, that a server would take them, and what each field does.

`PTE_WRITE_GOLDEN=1` writes the files of `tests/golden` anew; look at the difference before it is committed.
`PTE_TEST_CRDS` names a folder with the CRDs of JobSet, against which the manifests are then checked as well.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.kubernetes.accelerators import Accelerator, parse_accelerators
from prefect_torch_elastic.kubernetes.manifest import (
    render_credentials_secret,
    render_job,
    render_jobset,
    render_pod,
)
from prefect_torch_elastic.kubernetes.request import GangRequest
from tests.simulators.kubernetes.schemas import find_problems

GOLDEN = Path(__file__).parent / "golden"
COMMAND = ("python", "-m", "prefect_torch_elastic.node", "--store", "s3://b/p", "--call", "c", "--root", "r")
DATA = {"name": "data", "mountPath": "/data", "persistentVolumeClaim": {"claimName": "data"}}
H200 = Accelerator(
    resource="nvidia.com/gpu",
    node_selector={"nvidia.com/gpu.product": "NVIDIA-H200"},
    tolerations=[{"key": "reserved", "operator": "Equal", "value": "training", "effect": "NoSchedule"}],
)

CASES: dict[str, dict[str, Any]] = {
    "one-node": {"nnodes": 1},
    "queue": {"queue": "lq", "cpu": "8", "memory": "64Gi", "gpu": 8},
    "priority": {"queue": "lq", "queue_priority": "low"},
    "topology-required": {"queue": "lq", "topology": "required:cloud.provider.com/topology-rack"},
    "topology-unconstrained": {"queue": "lq", "topology": "unconstrained"},
    "accelerator": {"gpu": "H200:8", "accelerators": {"H200": H200}, "node_selector": {"zone": "a"}},
    "secrets": {
        "env": {"HF_HOME": "/hf", "PRICE": "$(X) costs $5"},
        "secret_env": {"HF_TOKEN": "hf/token"},
        "credentials_secret": "gang-1a2b3c4d-credentials",
        "credential_names": ("PREFECT_API_KEY",),
    },
    "volumes": {
        "memory": "100G",
        "volumes": (DATA, {**DATA, "mountPath": "/models", "subPath": "models", "readOnly": True}),
    },
    "no-shared-memory": {"shm_size": "0", "ephemeral_storage": "100Gi"},
    "deadlines": {"active_deadline_seconds": 3600, "ttl_seconds_after_finished": 0, "grace_seconds": 180.5},
    "pod-template": {
        "pod_template": {
            "metadata": {"labels": {"cost-center": "7"}},
            "spec": {
                "securityContext": {"runAsUser": 1000, "fsGroup": 1000},
                "priorityClassName": "training",
                "initContainers": [{"name": "proxy", "image": "proxy:1", "restartPolicy": "Always"}],
                "containers": [
                    {
                        "name": "trainer",
                        "resources": {"limits": {"vpc.amazonaws.com/efa": "32"}},
                        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                    }
                ],
            },
        }
    },
    "many-nodes": {
        "nnodes": 1000,
        "max_attempts": 1,
        "service_account": "trainer",
        "labels": {"team": "llm"},
        "annotations": {"example.com/note": "any text, such as this"},
        "tolerations": ({"key": "spot", "operator": "Exists"},),
    },
}


def request(**fields: Any) -> GangRequest:
    known = {
        "name": "gang-1a2b3c4d",
        "namespace": "ml",
        "nnodes": 4,
        "command": COMMAND,
        "image": "registry.example.com/train:1",
        "pool_id": "0b8b7a4e-3a5f-4c62-9d0a-6c9b8a6f1d20",
        "flow_run_id": "5a1f2c9e-8d43-4d3b-a4a7-0f3c2b1e9d87",
        "flow_run_name": "pretrain / Übung 1",
        "worker_name": "worker 1",
    }
    return GangRequest(**{**known, **fields})


def pod_of(**fields: Any) -> dict[str, Any]:
    return render_pod(render_jobset(request(**fields)))


def trainer_of(**fields: Any) -> dict[str, Any]:
    return pod_of(**fields)["spec"]["containers"][0]


def job_of(**fields: Any) -> dict[str, Any]:
    return render_job(render_jobset(request(**fields)))["spec"]


def variables_of(**fields: Any) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in trainer_of(**fields)["env"]}


# ---------------------------------------------------------------- whole manifests


@pytest.mark.parametrize("case", CASES)
def test_manifest_is_the_one_that_was_reviewed(case):
    manifest = render_jobset(request(**CASES[case]))
    file = GOLDEN / f"{case}.yaml"
    if os.environ.get("PTE_WRITE_GOLDEN"):
        file.write_text(yaml.safe_dump(manifest, sort_keys=False, width=110))
    assert manifest == yaml.safe_load(file.read_text())


@pytest.mark.parametrize("case", CASES)
def test_manifest_job_and_pod_have_only_fields_that_a_server_knows(case):
    manifest = render_jobset(request(**CASES[case]))
    for made in (manifest, render_job(manifest), render_pod(manifest)):
        assert find_problems(made) == []


@pytest.fixture(scope="module")
def crd() -> dict[str, Any]:
    if "PTE_TEST_CRDS" not in os.environ:
        pytest.skip("PTE_TEST_CRDS names no folder of CRDs")
    file = Path(os.environ["PTE_TEST_CRDS"]) / "jobset.x-k8s.io_jobsets.yaml"
    versions = yaml.safe_load(file.read_text())["spec"]["versions"]
    return next(one["schema"]["openAPIV3Schema"] for one in versions if one["name"] == "v1alpha2")


@pytest.mark.parametrize("case", CASES)
def test_manifest_keeps_to_the_crd(crd, case):
    import jsonschema

    manifest = render_jobset(request(**CASES[case]))
    jsonschema.validate(manifest, crd)
    assert list(find_unknown(manifest, crd, "")) == []


def find_unknown(value: Any, schema: dict[str, Any], path: str) -> Iterator[str]:
    """Yield the fields that a strict server would refuse."""
    if isinstance(value, list):
        for item in value:
            yield from find_unknown(item, schema["items"], f"{path}[]")
    elif isinstance(value, dict) and (properties := schema.get("properties")):
        for key, item in value.items():
            if key in properties:
                yield from find_unknown(item, properties[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"


# ---------------------------------------------------------------- the gang


def test_all_nodes_are_one_job():
    [replicated] = render_jobset(request(nnodes=8))["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    assert replicated["replicas"] == 1
    assert (spec["completionMode"], spec["parallelism"], spec["completions"]) == ("Indexed", 8, 8)
    assert (spec["backoffLimit"], spec["podReplacementPolicy"]) == (0, "Failed")


@pytest.mark.parametrize(("queue", "suspended"), [("lq", True), (None, None)], ids=["queue", "no-queue"])
def test_gang_waits_for_its_queue(queue, suspended):
    manifest = render_jobset(request(queue=queue))
    assert manifest["spec"].get("suspend") is suspended
    assert manifest["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") == queue


def test_failure_rules_are_those_that_were_tried():
    """On Kubernetes 1.36.2 with JobSet 0.12.0; with 143 among the codes each preemption was a failure."""
    policy = render_jobset(request(max_attempts=3))["spec"]["failurePolicy"]
    assert policy == {
        "maxRestarts": 2,
        "restartStrategy": "BlockingRecreate",
        "rules": [
            {
                "name": "config",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": ["exit code (64|65|78) "],
            },
            {
                "name": "disruption",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": ["condition DisruptionTarget "],
            },
        ],
    }
    assert job_of()["podFailurePolicy"]["rules"] == [
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": "trainer", "operator": "In", "values": [64, 65, 78]},
        },
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]


def test_deadline_ends_the_gang_and_starts_no_attempt():
    manifest = render_jobset(request(active_deadline_seconds=60))
    assert render_job(manifest)["spec"]["activeDeadlineSeconds"] == 60
    rule = manifest["spec"]["failurePolicy"]["rules"][-1]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["DeadlineExceeded"])


def test_finished_gang_goes_by_itself_when_no_worker_is_left():
    assert render_jobset(request())["spec"]["ttlSecondsAfterFinished"] == 86_400
    assert render_jobset(request(ttl_seconds_after_finished=0))["spec"]["ttlSecondsAfterFinished"] == 0


def test_objects_are_found_by_pool_and_flow_run():
    manifest = render_jobset(request())
    for made in (manifest, render_job(manifest), render_pod(manifest)):
        labels = made["metadata"]["labels"]
        assert labels["app.kubernetes.io/managed-by"] == "prefect-torch-elastic"
        assert labels["prefect-torch-elastic.io/pool"] == request().pool_id
        assert labels["prefect-torch-elastic.io/flow-run"] == request().flow_run_id


def test_only_pods_have_the_label_by_which_prefect_calls_runs_crashed():
    manifest = render_jobset(request())
    has = [
        "prefect.io/flow-run-id" in made["metadata"]["labels"] for made in (manifest, render_job(manifest))
    ]
    assert has == [False, False]
    assert render_pod(manifest)["metadata"]["labels"]["prefect.io/flow-run-id"] == request().flow_run_id


def test_full_names_are_kept_in_annotations_c043():
    annotations = render_jobset(request())["metadata"]["annotations"]
    assert annotations["prefect-torch-elastic.io/flow-run-name"] == "pretrain / Übung 1"
    assert annotations["prefect-torch-elastic.io/worker"] == "worker 1"


@pytest.mark.parametrize(
    ("topology", "annotation"),
    [
        ("required:rack", {"kueue.x-k8s.io/podset-required-topology": "rack"}),
        ("preferred:rack", {"kueue.x-k8s.io/podset-preferred-topology": "rack"}),
        ("unconstrained", {"kueue.x-k8s.io/podset-unconstrained-topology": "true"}),
        (None, {}),
    ],
)
def test_topology_is_an_annotation_of_the_pods(topology, annotation):
    assert pod_of(topology=topology)["metadata"]["annotations"] == annotation


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"name": "a" * 49}, "`name='a"),
        ({"labels": {"kueue.x-k8s.io/queue-name": "lq"}}, "Pass `queue='lq'` instead"),
        ({"labels": {"prefect-torch-elastic.io/pool": "x"}}, "finds it again. Remove it"),
        ({"labels": {"team": "a b"}}, r"`labels\['team'\]='a b'` is not accepted"),
        ({"queue_priority": "low"}, "means nothing without a queue"),
        ({"queue": "q" * 64}, "`queue='qqq"),
        ({"env": {"PREFECT_TORCH_ELASTIC_GANG": "x"}}, "cannot be set in `env`"),
        ({"secret_env": {"JOB_COMPLETION_INDEX": "a/b"}}, "cannot be set in `secret_env`"),
        ({"pod_template": {"spec": {"hostname": "x"}}}, "`pod_template.spec.hostname`"),
        ({"volumes": (DATA, {**DATA, "persistentVolumeClaim": {"claimName": "x"}})}, "of the name `data`"),
        ({"volumes": (DATA, {**DATA, "name": "more"})}, "two volumes at `/data`"),
    ],
)
def test_value_that_cannot_be_kept_is_refused(fields, sentence):
    with pytest.raises(SpecError, match=sentence):
        render_jobset(request(**fields))


# ---------------------------------------------------------------- the pods


def test_python_is_the_process_that_gets_the_signal_c048():
    container = trainer_of()
    assert container["command"] == list(COMMAND)
    assert "args" not in container


@pytest.mark.parametrize(("grace", "termination"), [(0, 30), (0.5, 31), (60, 90), (180, 210)])
def test_pods_are_killed_after_the_grace_and_a_margin_c048(grace, termination):
    pod = pod_of(grace_seconds=grace)
    assert pod["spec"]["terminationGracePeriodSeconds"] == termination
    assert variables_of(grace_seconds=grace)["PREFECT_TORCH_ELASTIC_GRACE_SECONDS"] == f"{grace:g}"


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, "8Gi"),
        ({"memory": "64Gi"}, "32Gi"),
        ({"memory": "900Gi"}, "64Gi"),
        ({"memory": "1.5Gi"}, "768Mi"),
        ({"memory": "1M"}, "1Mi"),
        ({"memory": "64Gi", "shm_size": "16Gi"}, "16Gi"),
    ],
)
def test_memory_to_share_is_mounted_c044(fields, size):
    spec = pod_of(**fields)["spec"]
    assert spec["volumes"] == [{"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}]
    assert spec["containers"][0]["volumeMounts"] == [{"name": "dshm", "mountPath": "/dev/shm"}]


def test_memory_to_share_can_be_switched_off_c044():
    spec = pod_of(shm_size="0")["spec"]
    assert "volumes" not in spec
    assert "volumeMounts" not in spec["containers"][0]


@pytest.mark.parametrize("path", ["/dev/shm", "/dev/shm/"])
def test_own_volume_at_dev_shm_wins_without_a_duplicate_c044(path):
    mine = {"name": "mine", "mountPath": path, "emptyDir": {"medium": "Memory"}}
    spec = pod_of(volumes=(mine,))["spec"]
    assert spec["volumes"] == [{"name": "mine", "emptyDir": {"medium": "Memory"}}]
    assert spec["containers"][0]["volumeMounts"] == [{"name": "mine", "mountPath": path}]


def test_one_volume_may_be_mounted_twice():
    again = {**DATA, "mountPath": "/models", "subPath": "models"}
    spec = pod_of(volumes=(DATA, again), shm_size="0")["spec"]
    assert spec["volumes"] == [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    assert spec["containers"][0]["volumeMounts"] == [
        {"name": "data", "mountPath": "/data"},
        {"name": "data", "mountPath": "/models", "subPath": "models"},
    ]


def test_pod_runs_without_rights():
    spec = pod_of()["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert spec["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


def test_resources_are_limited_but_the_cpu():
    resources = trainer_of(cpu="8", memory="64Gi", gpu=4, ephemeral_storage="9Gi")["resources"]
    limits = {"memory": "64Gi", "nvidia.com/gpu": "4", "ephemeral-storage": "9Gi"}
    assert resources == {"requests": {"cpu": "8", **limits}, "limits": limits}


def test_taint_of_the_accelerator_is_tolerated():
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    spot = {"key": "spot", "operator": "Exists"}
    assert pod_of(gpu=8, tolerations=(taint, spot))["spec"]["tolerations"] == [taint, spot]


@pytest.mark.parametrize("gpu", [None, 0])
def test_nothing_is_said_of_gpus_when_none_is_asked_for(gpu):
    spec = pod_of(gpu=gpu)["spec"]
    assert "tolerations" not in spec
    assert "resources" not in spec["containers"][0]


def test_named_accelerator_chooses_resource_and_machines():
    known = parse_accelerators({"MI300": {"resource": "amd.com/gpu", "node_selector": {"gpu": "mi300"}}})
    spec = pod_of(gpu="MI300:8", accelerators=known)["spec"]
    assert spec["containers"][0]["resources"]["limits"] == {"amd.com/gpu": "8"}
    assert spec["nodeSelector"] == {"gpu": "mi300"}
    assert [one["key"] for one in spec["tolerations"]] == ["amd.com/gpu"]


def test_unknown_accelerator_is_refused_with_those_that_are_known():
    with pytest.raises(SpecError, match=r"`B300` is not known to the work pool; it knows `A100`, `H200`"):
        render_jobset(request(gpu="B300:8", accelerators={"H200": H200, "A100": Accelerator()}))


@pytest.mark.parametrize(
    "value", [[], {"H200": "x"}, {"H200": {"selector": {}}}, {"H200": {"node_selector": {"a": 1}}}]
)
def test_accelerators_of_another_form_are_refused(value):
    with pytest.raises(SpecError, match="`accelerators"):
        parse_accelerators(value)


# ---------------------------------------------------------------- variables


def test_pod_learns_what_it_is():
    variables = variables_of(nnodes=4)
    fields = {
        name: value["fieldRef"]["fieldPath"] for name, value in variables.items() if isinstance(value, dict)
    }
    assert {name: value for name, value in variables.items() if isinstance(value, str)} == {
        "PREFECT_TORCH_ELASTIC_CONTRACT": "1",
        "PREFECT_TORCH_ELASTIC_NNODES": "4",
        "PREFECT_TORCH_ELASTIC_LEADER": "gang-1a2b3c4d-node-0-0.gang-1a2b3c4d:29400",
        "PREFECT_TORCH_ELASTIC_GANG": "gang-1a2b3c4d",
        "PREFECT_TORCH_ELASTIC_GRACE_SECONDS": "60",
        "PREFECT_TORCH_ELASTIC_TERMINATION_LOG": "/dev/termination-log",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    assert fields == {
        "PREFECT_TORCH_ELASTIC_ATTEMPT": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']",
        "PREFECT_TORCH_ELASTIC_POD": "metadata.name",
        "PREFECT_TORCH_ELASTIC_POD_UID": "metadata.uid",
        "PREFECT_TORCH_ELASTIC_POD_IP": "status.podIP",
        "PREFECT_TORCH_ELASTIC_NODE_NAME": "spec.nodeName",
    }


def expand(text: str) -> str:
    """What Kubernetes hands to a container in which no variable is set.

    Source: https://github.com/kubernetes/kubernetes/blob/v1.36.0/third_party/forked/golang/expansion/expand.go
    """
    out, place = "", 0
    while place < len(text):
        rest = text[place:]
        if rest.startswith("$$"):
            out, place = out + "$", place + 2
        elif rest.startswith("$(") and ")" in rest:
            out, place = f"{out}<variable>", place + rest.index(")") + 1
        else:
            step = 2 if rest[0] == "$" else 1
            out, place = out + rest[:step], place + step
    return out


@given(st.text(alphabet="$()Xa", max_size=12))
def test_text_reaches_the_process_as_it_was_written(text):
    container = trainer_of(env={"MINE": text}, command=("python", text))
    [value] = [one["value"] for one in container["env"] if one["name"] == "MINE"]
    assert expand(value) == text
    assert expand(container["command"][1]) == text


def test_secrets_are_named_and_their_values_are_not_there():
    variables = variables_of(
        env={"HF_TOKEN": "from-env", "A": "1"},
        secret_env={"HF_TOKEN": "hf/token"},
        credentials_secret="gang-credentials",
        credential_names=("PREFECT_API_KEY", "HF_TOKEN"),
    )
    assert variables["A"] == "1"
    assert variables["HF_TOKEN"] == {"secretKeyRef": {"name": "hf", "key": "token"}}
    assert variables["PREFECT_API_KEY"] == {
        "secretKeyRef": {"name": "gang-credentials", "key": "PREFECT_API_KEY"}
    }


def test_secret_goes_with_its_gang():
    owner = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "g", "uid": "u"},
    }
    gang = request(credentials_secret="g-credentials", credential_names=("KEY",))
    secret = render_credentials_secret(gang, {"KEY": "ü"}, owner)
    assert find_problems(secret) == []
    assert base64.b64decode(secret["data"]["KEY"]).decode() == "ü"
    assert (secret["metadata"]["name"], secret["metadata"]["namespace"]) == ("g-credentials", "ml")
    assert secret["metadata"]["labels"]["prefect-torch-elastic.io/flow-run"] == gang.flow_run_id
    [reference] = secret["metadata"]["ownerReferences"]
    assert reference == {**{key: owner[key] for key in ("apiVersion", "kind")}, "name": "g", "uid": "u"}


# ---------------------------------------------------------------- what comes of it


def test_job_and_pod_have_the_names_that_jobset_gives():
    manifest = render_jobset(request())
    job, pod = render_job(manifest), render_pod(manifest)
    assert (job["metadata"]["name"], job["spec"]["suspend"]) == ("gang-1a2b3c4d-node-0", True)
    assert pod["metadata"]["name"] == "gang-1a2b3c4d-node-0-0-abcde"
    assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == ("gang-1a2b3c4d-node-0-0", "gang-1a2b3c4d")
    assert job["metadata"]["namespace"] == pod["metadata"]["namespace"] == "ml"


def test_what_is_rendered_shares_nothing_with_its_manifest():
    manifest = render_jobset(request())
    pod = render_pod(manifest)
    pod["spec"]["containers"].clear()
    pod["metadata"]["labels"].clear()
    assert manifest == render_jobset(request())
