"""How Python objects become bytes: by cloudpickle, tensors as separate buffers, errors that name the culprit.

A function in `__main__`, a closure or a lambda travels by value, and so does what only this process can
import. Tensors and arrays are handed out as buffers (pickle protocol 5), which nobody copies.
"""

from __future__ import annotations

import inspect
import io
import marshal
import os
import pickle
import pickletools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any, cast

from prefect_torch_elastic.compat import untyped_storage
from prefect_torch_elastic.errors import TransferError

_SHOWN = 120
_by_value: Counter[str] = Counter()  # modules that travel by value now, by the calls that need it
_by_value_lock = threading.Lock()
_SUBIMPORT = "cloudpickle.subimport()"  # stands for the function in what follows; no name has brackets
# What a function imports late when its code has this name.
_IMPORTED_BY = {
    "optim": "torch._dynamo",
    "checkpoint": "prefect_torch_elastic.checkpoint.session",
    "should_stop": "prefect_torch_elastic.checkpoint.session",
}
_EVERYWHERE = frozenset({"torch", "numpy", "cloudpickle", "prefect_torch_elastic"})


def dump(value: object) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Return the pickle of `value` and the buffers that belong to it; `load` takes both.

    Raises:
        TransferError: If something in `value` cannot be pickled; it says what in the pickler's words.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    with _private_modules_by_value(value):
        try:
            _make_pickler(stream, buffers.append).dump(value)
        except MemoryError:
            raise
        except Exception as error:
            raise TransferError(_one_line(error)) from error
    return stream.getvalue(), buffers


def load(data: Any, buffers: Sequence[Any]) -> Any:
    """Return the object; its tensors use the memory of `buffers`. The caller has verified the bytes."""
    return pickle.loads(data, buffers=buffers)  # noqa: S301  (see above)


def list_modules(data: bytes) -> list[str]:
    """Return the modules that a pickle imports when it is loaded, without those that every node has."""
    found = dict.fromkeys(_named_modules(data))
    return [name for name in found if name in sys.modules and not _is_everywhere(name)]


def list_hidden_modules(function: Callable[..., Any]) -> list[str]:
    """Return modules that the function's code will import without naming them.

    The first optimizer of a process imports `torch._dynamo`, the first checkpoint torch's sharded tensors:
    seconds each. Once per node, ahead of the ranks, is cheaper than in each rank and after each restart.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return []
    modules = [module for name, module in _IMPORTED_BY.items() if _uses_name(code, name)]
    return list(dict.fromkeys(modules))


def _uses_name(code: CodeType, name: str) -> bool:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return name in code.co_names or any(_uses_name(one, name) for one in inner)


def name_culprit(function: Callable[..., Any], arguments: Mapping[str, Any]) -> TransferError:
    """Return an error that names the argument, or the variable of the function, that cannot be pickled."""
    for name, value in arguments.items():
        if problem := _problem(value):
            return TransferError(
                f"argument `{name}` ({type_name(value)}) cannot be sent to where the function runs: "
                f"{problem}. Pass plain data, a path or a URL, and open it inside the function."
            )
    for name, value in _outer_variables(function).items():
        if problem := _problem(value):
            return TransferError(
                f"variable `{name}` ({type_name(value)}), which `{function.__name__}` uses, cannot be sent "
                f"to where the function runs: {problem}. Create it inside the function, or pass plain data."
            )
    return TransferError(
        f"`{function.__name__}` cannot be sent to where the function runs: "
        f"{_problem((function, dict(arguments)))}. Create what it holds inside the function."
    )


def find_cuda_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of arguments that are CUDA tensors or modules; they travel as CPU tensors."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    found: list[str] = []
    for name, value in arguments.items():
        tensors: Sequence[Any] = ()
        if isinstance(value, torch.Tensor):
            tensors = [value]
        elif isinstance(value, torch.nn.Module):
            tensors = [*value.parameters(), *value.buffers()]
        if any(tensor.device.type == "cuda" for tensor in tensors):
            found.append(name)
    return found


def type_name(value: object) -> str:
    """Return `_thread.lock` for a lock and `dict` for a dict."""
    kind = cast("type[Any]", type(value))
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _make_pickler(stream: io.BytesIO, keep: Callable[[pickle.PickleBuffer], Any]) -> Any:
    import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

    base = cast("Any", cloudpickle).Pickler

    class Pickler(base):
        def reducer_override(self, obj: Any) -> Any:
            if type(obj) is CodeType:  # cloudpickle drops the file name, and a traceback needs it
                return marshal.loads, (marshal.dumps(obj),)
            torch = sys.modules.get("torch")
            if torch is not None:
                if isinstance(obj, torch.Tensor) and obj.device.type == "cuda":
                    return _reduce_cuda(torch, obj)
                if type(obj) is torch.UntypedStorage and obj.device.type == "cpu":
                    return _storage_from, (pickle.PickleBuffer(_view(obj)),)
                if type(obj) is torch.TypedStorage:
                    return _typed_storage_from, (untyped_storage(obj), obj.dtype)
            return base.reducer_override(self, obj)

    return Pickler(stream, protocol=5, buffer_callback=keep)


def _reduce_cuda(torch: Any, tensor: Any) -> Any:
    """A CUDA tensor dies with its process; its values travel as a CPU tensor of the same kind."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter, (tensor.detach().cpu(), tensor.requires_grad)
    return tensor.cpu().__reduce_ex__(5)


def _view(storage: Any) -> Any:
    """A zero-copy view that keeps the storage alive: the buffers are read after the pickler is gone."""
    import ctypes

    if not storage.nbytes():
        return b""
    view: Any = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    view.storage = storage
    return view


def _storage_from(buffer: Any) -> Any:
    import torch

    if not len(buffer):
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _typed_storage_from(untyped: Any, dtype: Any) -> Any:
    import torch

    return torch.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


@contextmanager
def _private_modules_by_value(value: object) -> Generator[None, None, None]:
    """Let the function's module travel inside the pickle if no other process can import it.

    Prefect loads a flow file under a name of its own (`__prefect_loader_…__`), and a notebook's helper may
    have been `exec`ed; cloudpickle would refer to them by name.
    """
    import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

    pickler: Any = cloudpickle
    items = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (value,)
    function: Any = items[0] if items else None
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or _is_importable(module.__name__):
        yield
        return
    name = module.__name__
    with _by_value_lock:
        if name not in _by_value and name in pickler.list_registry_pickle_by_value():
            shared = False  # the user registered it: it stays
        else:
            shared = True
            _by_value[name] += 1
            pickler.register_pickle_by_value(module)
    try:
        yield
    finally:
        with _by_value_lock:
            if shared:
                _by_value[name] -= 1
                if not _by_value[name]:
                    del _by_value[name]
                    pickler.unregister_pickle_by_value(module)


def _is_importable(name: str) -> bool:
    """Whether another process with our `sys.path` can import it; having it in `sys.modules` says nothing."""
    root = name.partition(".")[0]
    if root in sys.builtin_module_names or root in sys.stdlib_module_names:
        return True
    # not the path alone: editable installs bring finders of their own
    return any(_finds(finder, root) for finder in sys.meta_path)


def _finds(finder: Any, root: str) -> bool:
    from importlib.machinery import PathFinder

    if finder is PathFinder:  # `""` is the working directory of now
        return PathFinder.find_spec(root, [entry or os.getcwd() for entry in sys.path]) is not None
    find = getattr(finder, "find_spec", None)
    return find is not None and find(root, None) is not None


def _is_everywhere(module: str) -> bool:
    root = module.partition(".")[0]
    return root in sys.stdlib_module_names or root in _EVERYWHERE or root == "__main__"


def _named_modules(data: bytes) -> Generator[str, None, None]:
    """Yield the module of each `STACK_GLOBAL`, and the argument of each `cloudpickle.subimport`.

    A pickle writes a string or a function once and fetches it from its memo for every further use.
    """
    strings: list[str] = []
    memo: list[str] = []
    top, import_next = "", False
    for opcode, argument, _ in pickletools.genops(data):
        match opcode.name:
            case "SHORT_BINUNICODE" | "BINUNICODE":
                top = cast(str, argument)
            case "BINGET" | "LONG_BINGET":
                top = memo[cast(int, argument)]
            case "MEMOIZE":
                memo.append(top)
                continue
            case "STACK_GLOBAL":
                yield strings[-2]
                top = _SUBIMPORT if strings[-1] == "subimport" else ""
            case _:
                top = ""
                continue
        if import_next and top not in ("", _SUBIMPORT):
            yield top
        import_next = top == _SUBIMPORT
        strings = [*strings[-1:], top]


def _problem(value: object) -> str:
    try:
        dump(value)
    except TransferError as error:
        return str(error)
    return ""


def _outer_variables(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        found = inspect.getclosurevars(function)
    except (TypeError, ValueError):
        return {}
    return {**found.nonlocals, **found.globals}


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
