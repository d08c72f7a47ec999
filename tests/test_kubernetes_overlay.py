"""`pod_template`: what of a user's template reaches the pods, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.kubernetes.overlay import apply_pod_template

BASE: dict[str, Any] = {
    "metadata": {"labels": {"app.kubernetes.io/managed-by": "prefect-torch-elastic", "team": "x"}},
    "spec": {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 90,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "containers": [
            {
                "name": "trainer",
                "image": "train:1",
                "command": ["python", "-m", "prefect_torch_elastic.node"],
                "env": [
                    {"name": "PREFECT_TORCH_ELASTIC_NNODES", "value": "4"},
                    {"name": "HF_HOME", "value": "/hf"},
                ],
                "volumeMounts": [{"name": "dshm", "mountPath": "/dev/shm"}],
            }
        ],
        "volumes": [{"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}],
    },
}


def lay(spec: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    overlay: dict[str, Any] = {"metadata": metadata} if metadata else {}
    return apply_pod_template(BASE, {**overlay, "spec": spec} if spec else overlay)


def trainer(**fields: Any) -> dict[str, Any]:
    return {"containers": [{"name": "trainer", **fields}]}


def test_nothing_changes_nothing():
    assert apply_pod_template(BASE, {}) == BASE


def test_neither_argument_is_changed():
    overlay = {"spec": trainer(env=[{"name": "A", "value": "1"}])}
    before = copy.deepcopy((BASE, overlay))
    merged = apply_pod_template(BASE, overlay)
    merged["spec"]["containers"][0]["env"].clear()
    assert (BASE, overlay) == before


def test_fields_of_objects_are_joined():
    merged = lay({"securityContext": {"runAsUser": 1000, "fsGroup": 1000}, "priorityClassName": "high"})
    assert merged["spec"]["securityContext"] == {
        **BASE["spec"]["securityContext"],
        "runAsUser": 1000,
        "fsGroup": 1000,
    }
    assert merged["spec"]["priorityClassName"] == "high"


def test_null_removes():
    assert "securityContext" not in lay({"securityContext": None})["spec"]


def test_container_is_joined_by_name():
    container = lay(trainer(imagePullPolicy="Always"))["spec"]["containers"][0]
    assert container == {**BASE["spec"]["containers"][0], "imagePullPolicy": "Always"}


def test_variable_is_replaced_by_name_and_as_a_whole():
    reference = {"name": "HF_HOME", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}
    env = lay(trainer(env=[reference, {"name": "A", "value": "1"}]))["spec"]["containers"][0]["env"]
    assert env == [BASE["spec"]["containers"][0]["env"][0], reference, {"name": "A", "value": "1"}]


def test_volume_is_replaced_by_name_and_as_a_whole():
    disk = {"name": "dshm", "hostPath": {"path": "/dev/shm"}}
    assert lay({"volumes": [disk]})["spec"]["volumes"] == [disk]


def test_mount_is_added():
    merged = lay(
        {
            **trainer(volumeMounts=[{"name": "d", "mountPath": "/d"}]),
            "volumes": [{"name": "d", "emptyDir": {}}],
        }
    )
    assert [one["mountPath"] for one in merged["spec"]["containers"][0]["volumeMounts"]] == ["/dev/shm", "/d"]
    assert [one["name"] for one in merged["spec"]["volumes"]] == ["dshm", "d"]


@pytest.mark.parametrize("path", ["/dev/shm", "/dev/shm/"])
def test_own_mount_at_dev_shm_wins_without_a_duplicate_c044(path):
    mount, volume = {"name": "mine", "mountPath": path}, {"name": "mine", "emptyDir": {"medium": "Memory"}}
    merged = lay({**trainer(volumeMounts=[mount]), "volumes": [volume]})
    assert merged["spec"]["containers"][0]["volumeMounts"] == [mount]
    assert merged["spec"]["volumes"] == [volume]


def test_tolerations_are_added_to_ours():
    mine = {"key": "spot", "operator": "Exists"}
    assert lay({"tolerations": [mine]})["spec"]["tolerations"] == [*BASE["spec"]["tolerations"], mine]


def test_init_containers_and_sidecars_are_added():
    sidecar = {"name": "proxy", "image": "proxy:1", "restartPolicy": "Always"}
    assert lay({"initContainers": [sidecar]})["spec"]["initContainers"] == [sidecar]


def test_labels_and_annotations_are_joined():
    metadata = lay(labels={"team": "y", "cost": "1"}, annotations={"a": "b"})["metadata"]
    assert metadata["labels"] == {**BASE["metadata"]["labels"], "team": "y", "cost": "1"}
    assert metadata["annotations"] == {"a": "b"}


def test_longer_grace_and_a_token_are_allowed():
    spec = lay({"terminationGracePeriodSeconds": 600, "automountServiceAccountToken": True})["spec"]
    assert (spec["terminationGracePeriodSeconds"], spec["automountServiceAccountToken"]) == (600, True)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ({"restartPolicy": "OnFailure"}, "spec.restartPolicy"),
        ({"restartPolicy": None}, "spec.restartPolicy"),
        ({"hostname": "leader"}, "spec.hostname"),
        ({"subdomain": "gang"}, "spec.subdomain"),
        ({"terminationGracePeriodSeconds": 30}, "spec.terminationGracePeriodSeconds=30"),
        ({"terminationGracePeriodSeconds": None}, "spec.terminationGracePeriodSeconds=None"),
        ({"containers": None}, "spec.containers"),
        (trainer(command=["bash"]), r"spec.containers\[trainer\].command"),
        (trainer(command=None), r"spec.containers\[trainer\].command"),
        (trainer(args=["-x"]), r"spec.containers\[trainer\].args"),
        (trainer(terminationMessagePath="/x"), r"spec.containers\[trainer\].terminationMessagePath"),
        (
            trainer(env=[{"name": "PREFECT_TORCH_ELASTIC_NNODES", "value": "2"}]),
            "PREFECT_TORCH_ELASTIC_NNODES",
        ),
        (trainer(env=[{"name": "JOB_COMPLETION_INDEX", "value": "0"}]), "JOB_COMPLETION_INDEX"),
        (trainer(env=None), "PREFECT_TORCH_ELASTIC_NNODES"),
        ({"containers": [{"name": "logger", "image": "l:1"}]}, "`logger` beside `trainer`"),
        ({"containers": [{"image": "x"}]}, "a `name` each"),
        ({"containers": {"name": "trainer"}}, "a list, as Kubernetes has it"),
        ({"securityContext": "none"}, "an object, as Kubernetes has it"),
    ],
)
def test_what_the_gang_depends_on_is_refused_by_name(spec, name):
    with pytest.raises(SpecError, match=name):
        lay(spec)


def test_label_by_which_pods_are_found_is_refused():
    with pytest.raises(SpecError, match="managed-by"):
        lay(labels={"app.kubernetes.io/managed-by": "me"})


def test_template_of_another_form_is_refused():
    with pytest.raises(SpecError, match=r"`pod_template.template=.*`metadata` and `spec`"):
        apply_pod_template(BASE, {"template": {"spec": {}}})


@pytest.mark.parametrize("kind", ["containers", "initContainers"])
@pytest.mark.parametrize("variable", [("HF_TOKEN", "hf_abc"), ("PLACE", "https://tok@host/x")])
def test_secret_in_plain_sight_is_refused_with_its_cure(kind: str, variable: tuple[str, str]):
    name, value = variable
    with pytest.raises(SpecError) as error:
        lay({kind: [{"name": "trainer", "env": [{"name": name, "value": value}]}]})
    assert f"`pod_template.spec.{kind}[trainer].env[{name}]`" in str(error.value)
    assert f"`secret_env={{'{name}': 'SECRET/KEY'}}`" in str(error.value)
    assert value not in str(error.value)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param({"valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}, id="secret"),
        pytest.param({"value": "$(OTHER)"}, id="other-variable"),
        pytest.param({"value": ""}, id="empty"),
    ],
)
def test_secret_that_is_only_named_is_laid_over(source: dict[str, Any]):
    merged = lay(trainer(env=[{"name": "HF_TOKEN", **source}]))
    assert {"name": "HF_TOKEN", **source} in merged["spec"]["containers"][0]["env"]
