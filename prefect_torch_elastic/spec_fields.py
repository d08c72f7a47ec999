"""Which fields a gang has, the type of each as a keyword argument, and the check that its value passes.

Pure. The decorator and the block both call `check_field`, so a wrong value reads the same from either.
What the fields mean is said once, in the descriptions of `block.TorchElastic`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypedDict, TypeVar, cast

from prefect_torch_elastic import spec_values as values
from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.spec_checks import (
    Check,
    any_text,
    flag,
    list_of,
    mapping_of,
    optional,
    plain_mapping,
    plain_scalar,
    positive_number,
    refusal,
    text,
    variable_value,
    whole_number,
    word,
)

T = TypeVar("T")

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def _described(title: str, description: str, default: T) -> T:
    """Return a dataclass field that Prefect's form can show."""
    return field(default=default, metadata={"title": title, "description": description})


@dataclass(frozen=True, kw_only=True)
class CheckpointPolicy:
    """When checkpoints are saved, and which ones stay."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"title": "Checkpoints"}  # the form's heading

    every_steps: int | None = _described("Every steps", "Save after this many optimizer steps.", None)
    every_seconds: float | None = _described("Every seconds", "Save after this much time.", None)
    keep_last: int = _described("Keep last", "How many of the newest checkpoints stay.", 3)
    keep_best: int = _described("Keep best", "How many with the best metric stay besides.", 0)
    metric: str | None = _described("Metric", "The metric that says which checkpoint is best.", None)
    mode: Literal["min", "max"] = _described("Mode", "Whether a small or a large metric is good.", "min")
    keep_every_steps: int | None = _described(
        "Keep every steps", "Checkpoints of this many steps and its multiples stay besides.", None
    )
    when_busy: Literal["skip", "wait"] = _described(
        "When busy",
        "What a save that is due does while the one before is on its way: it is left out, or training waits.",
        "skip",
    )
    meeting_timeout_seconds: float = _described(
        "Meeting timeout",
        "How long the ranks wait for each other before a save or a load, until the missing one is named.",
        600.0,
    )
    max_failures: int = _described("Most failures", "The run ends when this many saves in a row fail.", 3)


class SpecOptions(TypedDict, total=False):
    """The fields of `Spec` as keyword arguments, for editors and type checkers."""

    nnodes: int | str
    nproc_per_node: int | str
    rdzv_backend: str | None
    rdzv_timeout_seconds: float
    rdzv_configs: dict[str, str | int | float | bool]
    monitor_interval_seconds: float
    start_method: Literal["warm", "spawn"]
    preload: list[str]
    max_restarts: int
    max_attempts: int
    resume_after_preemption: bool
    non_retryable: list[str]
    grace_seconds: float
    run_timeout_seconds: float | None
    progress_timeout_seconds: float | None
    inadmissible_grace_seconds: float | None
    active_deadline_seconds: int | None
    ttl_seconds_after_finished: int | None
    work_pool: str | None
    namespace: str | None
    queue: str | None
    queue_priority: str | None
    topology: str | None
    image: str | None
    cpu: str | None
    memory: str | None
    gpu: int | str | None
    shm_size: str | None
    env: dict[str, str]
    secret_env: dict[str, str]
    volumes: list[dict[str, Any]]
    node_selector: dict[str, str]
    tolerations: list[dict[str, Any]]
    service_account: str | None
    labels: dict[str, str]
    annotations: dict[str, str]
    pod_template: dict[str, Any]
    nccl_collective_timeout_seconds: float | None
    nccl_heartbeat_timeout_seconds: float | None
    nccl_async_error_handling: bool | None
    nccl_enable_monitoring: bool | None
    store: str | None
    store_credentials: Any  # the name of a saved block, or the block
    checkpoint: CheckpointPolicy | dict[str, Any]
    log_level_all_ranks: str
    log_level_leader: str
    price_per_node_hour: float | None
    job_variables: dict[str, Any]
    include_files: list[str]


FIELD_NAMES: tuple[str, ...] = tuple(SpecOptions.__annotations__)


def check_name(name: str, known: Iterable[str] = FIELD_NAMES, *, of: str = "TorchElastic") -> None:
    """Raise a `SpecError` unless `name` is one of `known`; the message offers the nearest of them."""
    names = tuple(known)
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    cure = f"Did you mean `{near[0]}`?" if near else f"Its fields are {', '.join(names)}."
    raise SpecError(f"`{name}` is not a field of `{of}`. {cure}")


def check_field(name: str, value: object) -> object:
    """Return the value of one field in its normal form.

    Raises:
        SpecError: If there is no such field, or if the value is not accepted.
    """
    check_name(name)
    return _CHECKS[name](name, value)


def _nnodes(_name: str, value: object) -> object:
    smallest, largest = values.parse_nnodes(value)
    is_range = isinstance(value, str) and ":" in value
    return f"{smallest}:{largest}" if is_range else smallest


def _gpu(_name: str, value: object) -> object:
    accelerator, count = values.parse_gpu(value)
    return f"{accelerator}:{count}" if accelerator else count


def _topology(_name: str, value: object) -> object:
    mode, label = values.parse_topology(value)
    return f"{mode}:{label}" if label else mode


def _checkpoint(name: str, value: object) -> object:
    if isinstance(value, CheckpointPolicy):
        given: Mapping[str, object] = dataclasses.asdict(value)
    elif isinstance(value, Mapping):
        given = cast("Mapping[str, object]", value)
    else:
        raise refusal(name, value, "a `CheckpointPolicy`, or a dictionary such as `{'every_steps': 100}`")
    for key in given:
        check_name(key, _CHECKPOINT_CHECKS, of=name)
    checked = {key: _CHECKPOINT_CHECKS[key](f"{name}.{key}", item) for key, item in given.items()}
    policy = CheckpointPolicy(**cast("dict[str, Any]", checked))
    if policy.keep_best and not policy.metric:
        why = "nothing says which checkpoint is best"
        raise refusal(f"{name}.keep_best", policy.keep_best, "`metric` too, such as `metric='loss'`", why=why)
    return policy


_DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
_DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_SECRET_KEY = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-\w.]+", re.ASCII)
_ONE_WORD = re.compile(r"\S+")

_seconds = positive_number(example=600)
_seconds_or_zero = positive_number(example=60, or_zero=True)
_some_text = text("text that is not empty", re.compile(r".*\S.*"))
_kubernetes_name = optional(text("a Kubernetes name: small letters, digits, `-` and `.`", _DNS_NAME))
_label_key = text("a label name, such as `example.com/team`", values.LABEL_KEY)
_label_value = text("at most 63 letters, digits, `-`, `_` and `.`", _LABEL_VALUE)
_labels = mapping_of(_label_key, _label_value)
_module = text("the dotted name of a module, such as `transformers`", _DOTTED_NAME)
_exception = text("the dotted name of an exception, such as `builtins.ValueError`", _DOTTED_NAME)
_secret_key = text("`SECRET/KEY`: the name of a Kubernetes Secret and a key in it", _SECRET_KEY)

_CHECKPOINT_CHECKS: dict[str, Check] = {
    "every_steps": optional(whole_number(minimum=1, example=100)),
    "every_seconds": optional(_seconds),
    "keep_last": whole_number(minimum=1, example=3),
    "keep_best": whole_number(minimum=0, example=1),
    "metric": optional(_some_text),
    "mode": word("min", "max"),
    "keep_every_steps": optional(whole_number(minimum=1, example=10_000)),
    "meeting_timeout_seconds": _seconds,
    "when_busy": word("skip", "wait"),
    "max_failures": whole_number(minimum=1, example=3),
}

_CHECKS: dict[str, Check] = {
    "nnodes": _nnodes,
    "nproc_per_node": lambda _name, value: values.parse_nproc_per_node(value),
    "rdzv_backend": optional(word("static", "c10d")),
    "rdzv_timeout_seconds": _seconds,
    "rdzv_configs": mapping_of(any_text, plain_scalar),
    "monitor_interval_seconds": positive_number(example=0.5),
    "start_method": values.parse_start_method,
    "preload": list_of(_module),
    "max_restarts": whole_number(minimum=0, example=1),
    "max_attempts": whole_number(minimum=1, example=3),
    "resume_after_preemption": flag,
    "non_retryable": list_of(_exception),
    "grace_seconds": _seconds_or_zero,
    "run_timeout_seconds": optional(_seconds),
    "progress_timeout_seconds": optional(_seconds),
    "inadmissible_grace_seconds": optional(_seconds_or_zero),
    "active_deadline_seconds": optional(whole_number(minimum=1, example=86400)),
    "ttl_seconds_after_finished": optional(whole_number(minimum=0, example=3600)),
    "work_pool": optional(_some_text),
    "namespace": _kubernetes_name,
    "queue": _kubernetes_name,
    "queue_priority": _kubernetes_name,
    "topology": optional(_topology),
    "image": optional(text("the name of an image without spaces", _ONE_WORD)),
    "cpu": optional(values.parse_cpu),
    "memory": optional(values.parse_memory),
    "gpu": optional(_gpu),
    "shm_size": optional(values.parse_shm_size),
    "env": mapping_of(values.parse_variable_name, variable_value),
    "secret_env": mapping_of(values.parse_variable_name, _secret_key),
    "volumes": list_of(values.parse_volume),
    "node_selector": _labels,
    "tolerations": list_of(plain_mapping),
    "service_account": _kubernetes_name,
    "labels": _labels,
    "annotations": mapping_of(_label_key, any_text),
    "pod_template": plain_mapping,
    "nccl_collective_timeout_seconds": optional(_seconds),
    "nccl_heartbeat_timeout_seconds": optional(_seconds),
    "nccl_async_error_handling": optional(flag),
    "nccl_enable_monitoring": optional(flag),
    "store": optional(values.parse_store),
    "store_credentials": optional(values.parse_block_reference),
    "checkpoint": _checkpoint,
    "log_level_all_ranks": word(*LOG_LEVELS),
    "log_level_leader": word(*LOG_LEVELS),
    "price_per_node_hour": optional(positive_number(example=98.3, or_zero=True)),
    "job_variables": plain_mapping,
    "include_files": list_of(_some_text),
}
