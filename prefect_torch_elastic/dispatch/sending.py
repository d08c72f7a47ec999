"""How a call goes to a work pool: its parcel, its code and its order, written to the run folder."""

from __future__ import annotations

import hashlib
import inspect
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from prefect_torch_elastic.calls import Call
from prefect_torch_elastic.dispatch.code import pack_code
from prefect_torch_elastic.dispatch.order import CallKind, CallOrder, CallReference, render_order
from prefect_torch_elastic.dispatch.versions import collect_versions
from prefect_torch_elastic.logentries import StoredPart
from prefect_torch_elastic.parts import put_file, put_part
from prefect_torch_elastic.payload import PythonPayload

# What only the job of one dispatch reads; results and endings stay.
_PASSING = ("call-", "code-", "order-", "alive-")


def send_call(call: Call, payload: PythonPayload, *, kind: CallKind, max_attempts: int) -> CallReference:
    """Write a call where the pool's job finds it, and return what that job needs to be told.

    Args:
        call: The call.
        payload: Its function and arguments.
        kind: What runs in the pool.
        max_attempts: What is left of the budget: the job forms gangs again out of it too.

    Raises:
        TransferError: If function or arguments cannot travel.
        SpecError: If a file to include cannot be found.
        StoreError: If the store cannot be written.
    """
    record, folder = call.record, call.identity.folder
    # beside nothing of the user's: a flow may run where only the temporary folder can be written
    with tempfile.TemporaryDirectory(prefix="torch-elastic-") as temporary:
        path = Path(temporary) / "call"
        modules = payload.write(path, key=record.key)
        code = pack_code(
            payload.function,
            include_files=call.spec.include_files,
            base=_folder_of(payload),
            modules=modules,
            warn=call.log.warning,
        )
        parcel = call.patience.wait_for(
            lambda: put_file(record.store, folder, record.name_part("call"), path)
        )
    order = CallOrder(
        kind=kind,
        task_name=call.task_name,
        root=call.identity.root,
        run_key=call.identity.run_key,
        call=call.identity.digest,
        parcel=parcel,
        code=_put_code(call, code),
        code_sha256=hashlib.sha256(code).hexdigest() if code is not None else "",
        modules=modules,
        fields=asdict(replace(call.spec, max_attempts=max_attempts)),
        flow_run_id=call.flow_run_id,
        task_run_id=call.task_run_id,
        task_run_name=call.task_run_name,
        retries=call.retries,
        log_prints=call.log_prints,
        versions=collect_versions(),
    )
    data = render_order(order, key=record.key)
    part = call.patience.wait_for(lambda: put_part(record.store, folder, record.name_part("order"), data))
    return CallReference(
        store=record.store.url,
        order=f"{folder}/{part.key}",
        root=call.identity.root,
        store_credentials=call.spec.store_credentials or "",
    )


def _put_code(call: Call, code: bytes | None) -> StoredPart | None:
    if code is None:
        return None
    record, name = call.record, call.record.name_part("code")
    return call.patience.wait_for(lambda: put_part(record.store, record.folder, name, code))


def forget_call(call: Call) -> None:
    """Remove what was only on its way to the pool, arguments above all.

    Raises:
        StoreError: If the store cannot be written.
    """
    store, prefix = call.record.store, f"{call.identity.folder}/calls/{call.identity.digest}"
    passing = [one.key for one in store.list(prefix) if one.key.rpartition("/")[2].startswith(_PASSING)]
    store.delete(passing)


def _folder_of(payload: PythonPayload) -> Path:
    """Return the folder that `include_files` starts from: of the function's file, or where the flow runs."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(payload.function))
    except TypeError:
        file = None
    return Path(file).resolve().parent if file and Path(file).exists() else Path.cwd()
