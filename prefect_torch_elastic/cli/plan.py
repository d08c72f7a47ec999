"""`prefect-torch-elastic plan`: what tasks would create in a cluster, which need not be there."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Annotated, Any, cast

import cyclopts
from prefect.exceptions import ScriptError
from prefect.utilities.importtools import load_script_as_module

from prefect_torch_elastic.cli import UsageError
from prefect_torch_elastic.cli.deploy import parse_pairs
from prefect_torch_elastic.cli.rendering import print_lines
from prefect_torch_elastic.dispatch.gangsizes import check_fixed_size
from prefect_torch_elastic.dispatch.order import CallKind
from prefect_torch_elastic.dispatch.pools import ELASTIC_TYPE, Pool, build_job_variables
from prefect_torch_elastic.errors import SpecError
from prefect_torch_elastic.launched import LaunchedTask
from prefect_torch_elastic.spec import Spec

_Many = Annotated[tuple[str, ...], cyclopts.Parameter(negative="", show_default=False)]

# What only a run knows; capitals, so that nobody takes them for real.
_COMMAND = "python -m prefect_torch_elastic.node --store STORE --call CALL --root ROOT-FLOW-RUN-ID"
_IMAGE = "IMAGE-OF-THE-WORK-POOL"


def plan(
    place: Annotated[str, cyclopts.Parameter(help="FILE.py or MODULE; with :TASK for one of its tasks.")],
    /,
    *,
    pool: Annotated[_Many, cyclopts.Parameter(help="Only tasks of this work pool.")] = (),
    variable: Annotated[
        _Many,
        cyclopts.Parameter(("--variable", "-v"), help="NAME=VALUE of the work pool's form; JSON, or text."),
    ] = (),
) -> int:
    """Print the Kubernetes objects that tasks would create in a work pool of type `torch-elastic`."""
    form = parse_pairs(variable, "--variable")
    tasks = find_tasks(place, pools=pool)
    documents = [render_plan(name, task.resolve_spec(), task.kind, form=form) for name, task in tasks.items()]
    print_lines(["\n---\n".join(documents)])
    return 0


def find_tasks(place: str, *, pools: tuple[str, ...] = ()) -> dict[str, LaunchedTask[Any, Any]]:
    """Return the elastic tasks and pool tasks at the top of a module, by name.

    Args:
        place: `FILE.py` or `package.module`, with `:TASK` for one task alone.
        pools: Work pools; tasks of others are left out.

    Raises:
        SpecError: If the module cannot be loaded.
        UsageError: If it has no such task.
    """
    source, _, wanted = place.partition(":")
    found: dict[str, LaunchedTask[Any, Any]] = {
        name: cast("LaunchedTask[Any, Any]", value)
        for name, value in vars(_load(source)).items()
        if isinstance(value, LaunchedTask)
    }
    tasks: dict[str, LaunchedTask[Any, Any]] = {}
    for name, task in found.items():
        is_wanted = not wanted or wanted in (name, task.name)
        if is_wanted and (not pools or task.resolve_spec().work_pool in pools) and task not in tasks.values():
            tasks[name] = task
    if not tasks:
        has = ", ".join(f"`{name}`" for name in found) or "none"
        of = f" of work pool {' or '.join(f'`{one}`' for one in pools)}" if pools else ""
        what = f"no task `{wanted}`{of}" if wanted else f"no elastic task or pool task{of}"
        raise UsageError(f"`{source}` has {what} at its top; it has {has}.")
    return tasks


def render_plan(name: str, spec: Spec, kind: CallKind, *, form: Mapping[str, Any]) -> str:
    """Return the objects of one task as YAML.

    Raises:
        SpecError: If a value cannot be kept in a cluster.
    """
    import yaml

    from prefect_torch_elastic.kubernetes.manifest import render_jobset
    from prefect_torch_elastic.kubernetes.variables import TorchElasticVariables, fill_form, request_gang

    words = tuple(_COMMAND.split())
    if kind is CallKind.GANG:
        check_fixed_size(spec.nnodes, pool=spec.work_pool or "WORK-POOL")
        words = (*words, "--nproc-per-node", str(spec.nproc_per_node))
    pool = Pool(
        name=spec.work_pool or "WORK-POOL",
        type=ELASTIC_TYPE,
        variables=frozenset(TorchElasticVariables.model_fields),
    )
    sent = build_job_variables(pool, command=words, spec=spec, kind=kind)
    configuration = fill_form({"image": _IMAGE, **form}, sent.values)
    request = request_gang(
        configuration,
        flow_run_id="FLOW-RUN-ID",
        flow_run_name=name,
        pool_id="WORK-POOL-ID",
        worker_name="WORKER",
    )
    manifest = json.loads(json.dumps(render_jobset(request)))  # no object is in it twice: no YAML anchors
    head = f"# {name}, work pool {spec.work_pool or 'not set'}. What only a run knows is in capitals."
    if sent.ignored:
        head += f"\n# A pool of type torch-elastic does not know {', '.join(sent.ignored)}."
    return f"{head}\n{yaml.safe_dump(manifest, sort_keys=False, width=110)}".rstrip()


def _load(source: str) -> ModuleType:
    """Return the module, loaded as a worker would load it."""
    try:
        if source.endswith(".py"):
            return load_script_as_module(source)
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        return importlib.import_module(source)
    except ScriptError as error:
        cause: BaseException = error.user_exc
    except Exception as error:  # noqa: BLE001  (whatever the code of the user raises)
        cause = error
    raise SpecError(
        f"`{source}` cannot be loaded: {type(cause).__name__}: {cause}. Write `FILE.py` or `package.module`, "
        "and run it with `python` to see where it fails."
    ) from cause
