"""How functions, closures and tensors become bytes, and how what cannot is named."""

from __future__ import annotations

import decimal
import gc
import json
import pickle
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from prefect_torch_elastic import pickles
from prefect_torch_elastic.compat import untyped_storage
from prefect_torch_elastic.errors import TransferError

LOCK = threading.Lock()


def round_trip(value):
    data, buffers = pickles.dump(value)
    return pickles.load(data, [bytearray(buffer.raw()) for buffer in buffers])


def shared_module(name: str, source: str, monkeypatch) -> types.ModuleType:
    """Return a module that only this process can import, as Prefect loads a flow file."""
    module = types.ModuleType(name)
    exec(compile(source, f"{name}.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def run_elsewhere(value, *, preamble: str = "") -> str:
    """Load the pickle in a fresh interpreter, call it, and return what it printed."""
    data, buffers = pickles.dump(value)
    assert not buffers
    script = f"{preamble}\nimport pickle, sys\nprint(pickle.loads(sys.stdin.buffer.read())())"
    done = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


# ---------------------------------------------------------------- tensors and arrays


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def test_tensor_is_handed_out_without_a_copy(torch):
    tensor = torch.arange(1000)
    data, buffers = pickles.dump(tensor)
    assert len(data) < 500
    (buffer,) = buffers
    view = memoryview(buffer)
    tensor[0] = 77
    assert view.nbytes == 8000
    assert view.cast("B")[0] == 77


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda t: t.arange(6).reshape(2, 3), id="matrix"),
        pytest.param(lambda t: t.arange(12)[::3], id="strided"),
        pytest.param(lambda t: t.empty(0), id="empty"),
        pytest.param(lambda t: t.empty(0, 5), id="empty-matrix"),
        pytest.param(lambda t: t.tensor(2.5), id="scalar"),
        pytest.param(lambda t: t.tensor([True, False]), id="bool"),
        pytest.param(lambda t: t.ones(3, dtype=t.bfloat16), id="bfloat16"),
        pytest.param(lambda t: t.complex(t.ones(2), t.ones(2)), id="complex"),
        pytest.param(lambda t: t.ones(2, 2).to_sparse(), id="sparse"),
    ],
)
def test_tensor_comes_back_equal(torch, make):
    tensor = make(torch)
    back = round_trip(tensor)
    assert (back.dtype, back.shape, back.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert torch.equal(back.to_dense(), tensor.to_dense())


def test_tensor_keeps_whether_it_needs_a_gradient(torch):
    assert round_trip(torch.ones(2, requires_grad=True)).requires_grad
    assert isinstance(round_trip(torch.nn.Parameter(torch.ones(2))), torch.nn.Parameter)


def test_tied_weights_stay_tied_and_travel_once(torch):
    embedding = torch.nn.Embedding(50, 8)
    head = torch.nn.Linear(8, 50, bias=False)
    head.weight = embedding.weight
    data, buffers = pickles.dump((embedding, head))
    assert sum(buffer.raw().nbytes for buffer in buffers) == 50 * 8 * 4
    again, head_again = pickles.load(data, [bytearray(buffer.raw()) for buffer in buffers])
    assert head_again.weight is again.weight


def test_two_views_of_one_storage_stay_views_of_one(torch):
    base = torch.zeros(10)
    left, right = round_trip((base[:6], base[4:]))
    left[5] = 7.0
    assert right[1].item() == 7.0


def test_typed_storage_comes_back(torch):
    back = round_trip(torch.tensor([1.5, 2.5])._typed_storage())
    assert back.dtype is torch.float32
    assert torch.tensor([], dtype=back.dtype).set_(untyped_storage(back)).tolist() == [1.5, 2.5]


def test_tensors_that_live_only_while_they_are_pickled_arrive_intact(torch):
    class Fresh:
        def __init__(self, number: int) -> None:
            self.number = number

        def __getstate__(self):
            return {"weights": torch.full((4096,), float(self.number)), "number": self.number}

    for _ in range(5):
        data, buffers = pickles.dump([Fresh(number) for number in range(40)])
        gc.collect()
        noise = [torch.full((4096,), -1.0) for _ in range(40)]  # takes the memory of what was freed
        back = pickles.load(data, [bytearray(buffer.raw()) for buffer in buffers])
        assert [fresh.number for fresh in back] == list(range(40))
        assert all(bool((fresh.weights == fresh.number).all()) for fresh in back)
        del noise


def test_array_travels_as_a_buffer():
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(1000)
    data, buffers = pickles.dump({"x": array, "y": array})
    assert len(data) < 500
    assert [buffer.raw().nbytes for buffer in buffers] == [8000]
    assert (round_trip(array) == array).all()


# ---------------------------------------------------------------- functions


def test_closure_and_lambda_travel_by_value_c007():
    width = 8

    def train():
        return (lambda: width * 2)()

    assert round_trip(train)() == 16


def test_function_of_the_running_script_travels_by_value_c007(run_script):
    result = run_script(
        """
import subprocess, sys
from dataclasses import dataclass
from prefect_torch_elastic import pickles

@dataclass
class Config:
    lr: float

def scale(config):
    return config.lr * 2

def train():
    return scale(Config(lr=0.5))

data, _ = pickles.dump(train)
load = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read())())"
subprocess.run([sys.executable, "-c", load], input=data, check=True)
"""
    )
    assert result.stdout.strip() == "1.0", result.stderr


NOTEBOOK = """
import json
class Config:
    lr = 0.5
def helper():
    return Config.lr
def train():
    return json.dumps([helper(), __name__])
"""


@pytest.mark.parametrize("name", ["__prefect_loader_4711__", "my_notebook_helpers"])
def test_module_that_only_this_process_can_import_travels_by_value_c007(name, monkeypatch):
    module = shared_module(name, NOTEBOOK, monkeypatch)
    assert json.loads(run_elsewhere(module.train)) == [0.5, name]


def test_module_of_an_editable_install_travels_by_reference(monkeypatch):
    """Such an install brings a finder of its own, in every process; classes of the module stay themselves."""
    from importlib.machinery import ModuleSpec

    class Finder:
        @staticmethod
        def find_spec(name: str, _path: object, _target: object = None) -> ModuleSpec | None:
            return ModuleSpec(name, None) if name == "installed_for_editing" else None

    module = shared_module("installed_for_editing", NOTEBOOK, monkeypatch)
    by_value = pickles.dump(module.train)[0]
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    by_reference = pickles.dump(module.train)[0]
    assert len(by_reference) < 100 < len(by_value)


def test_module_travels_by_value_only_during_the_dump(monkeypatch):
    import cloudpickle

    module = shared_module("__prefect_loader_4712__", NOTEBOOK, monkeypatch)
    pickles.dump((module.train, (), {}))
    assert module.__name__ not in cloudpickle.list_registry_pickle_by_value()
    with pytest.raises(TransferError):
        pickles.dump((module.train, (LOCK,), {}))
    assert module.__name__ not in cloudpickle.list_registry_pickle_by_value()


class Slow:
    """Pickling it takes a moment, so that dumps of several threads overlap."""

    def __reduce__(self):
        time.sleep(0.002)
        return Slow, ()


def test_module_travels_by_value_in_every_thread_that_pickles_it(monkeypatch):
    import cloudpickle

    source = (
        NOTEBOOK + "def wait_and_train():\n    return slow, train()\n"
    )  # its globals travel in this order
    module = shared_module("__prefect_loader_4715__", source, monkeypatch)
    module.slow = Slow()  # pyright: ignore[reportAttributeAccessIssue]
    start = threading.Barrier(4)

    def dump(_: int) -> list[bytes]:
        start.wait(10)
        return [pickles.dump((module.wait_and_train, (), {}))[0] for _ in range(10)]

    with ThreadPoolExecutor(4) as threads:
        dumps = [data for some in threads.map(dump, range(4)) for data in some]
    assert module.__name__ not in cloudpickle.list_registry_pickle_by_value()
    monkeypatch.delitem(sys.modules, module.__name__)  # as in a rank
    assert {json.loads(pickle.loads(data)[0]()[1])[0] for data in dumps} == {0.5}


def test_module_that_the_user_registered_stays_registered(monkeypatch):
    import cloudpickle

    module = shared_module("__prefect_loader_4716__", NOTEBOOK, monkeypatch)
    cloudpickle.register_pickle_by_value(module)
    try:
        pickles.dump((module.train, (), {}))
        assert module.__name__ in cloudpickle.list_registry_pickle_by_value()
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def test_module_that_everybody_can_import_travels_by_name():
    data, _ = pickles.dump(json.dumps)
    assert len(data) < 100


def test_traceback_of_a_function_that_travelled_shows_its_file():
    def fail():
        raise ValueError("lr must be > 0")

    with pytest.raises(ValueError, match="lr must be") as raised:
        round_trip(fail)()
    frame = traceback.extract_tb(raised.tb)[-1]
    assert frame.filename == __file__
    assert "lr must be > 0" in (frame.line or "")


# ---------------------------------------------------------------- modules that a node imports ahead


def test_list_modules_names_what_the_pickle_imports():
    import yaml

    assert pickles.list_modules(pickles.dump(yaml.safe_load)[0]) == ["yaml"]
    assert pickles.list_modules(pickles.dump({"a": yaml.safe_load, "b": yaml.safe_dump})[0]) == ["yaml"]


def test_list_modules_finds_modules_that_a_function_by_value_uses():
    import jinja2.sandbox
    import yaml

    def train():
        return yaml, jinja2.sandbox

    found = pickles.list_modules(pickles.dump((train, (), {}))[0])
    assert {"yaml", "jinja2", "jinja2.sandbox"} == set(found)


def test_list_modules_leaves_out_what_every_node_has():
    def train():
        return json, decimal.Decimal, pickles, threading

    assert pickles.list_modules(pickles.dump((train, (), {}))[0]) == []


def test_list_modules_takes_no_text_for_a_module():
    def train(name="yaml", other="subimport"):
        return name, "yaml", other

    assert pickles.list_modules(pickles.dump((train, ("yaml",), {"subimport": "yaml"}))[0]) == []


def test_list_modules_of_a_module_by_value_has_what_it_imports_but_not_itself(monkeypatch):
    source = "import yaml\ndef train():\n    return yaml.safe_load('1')\n"
    module = shared_module("__prefect_loader_4713__", source, monkeypatch)
    assert pickles.list_modules(pickles.dump((module.train, (), {}))[0]) == ["yaml"]


def test_list_modules_reads_strings_from_the_memo():
    import yaml

    # the name of the module is written once, and fetched from the memo for every further use
    value = [yaml.safe_load, yaml.YAMLError, yaml.safe_dump, "yaml", yaml.dump]
    assert pickles.list_modules(pickles.dump(value)[0]) == ["yaml", "yaml.error"]


# ---------------------------------------------------------------- what cannot travel


def test_dump_says_what_cannot_be_pickled():
    with pytest.raises(TransferError, match=r"cannot pickle '_thread.lock' object"):
        pickles.dump({"a": [LOCK]})


def test_error_text_is_one_short_line():
    class Long:
        def __reduce__(self):
            raise ValueError("line one\nline two " + "x" * 500)

    with pytest.raises(TransferError) as refused:
        pickles.dump(Long())
    assert str(refused.value).startswith("line one line two xxx")
    assert len(str(refused.value)) < 130
    assert isinstance(refused.value.__cause__, ValueError)


def test_lack_of_memory_is_not_blamed_on_the_value():
    class Large:
        def __reduce__(self):
            raise MemoryError

    with pytest.raises(MemoryError):
        pickles.dump([Large()])


def test_culprit_among_arguments_is_named():
    def train(steps, lock):
        return steps, lock

    error = pickles.name_culprit(train, {"steps": 3, "lock": LOCK})
    assert str(error).startswith(
        "argument `lock` (_thread.lock) cannot be sent to where the function runs: cannot pickle"
    )
    assert "Pass plain data, a path or a URL" in str(error)


def test_culprit_in_a_closure_is_named_c007():
    with socket.socket() as connection:

        def train():
            return connection

        error = pickles.name_culprit(train, {"steps": 3})
    assert str(error).startswith("variable `connection` (socket.socket), which `train` uses, cannot be sent")
    assert "Create it inside the function" in str(error)


def test_culprit_among_globals_is_named(monkeypatch):
    source = "import threading\nguard = threading.Lock()\ndef train():\n    return guard\n"
    module = shared_module("__prefect_loader_4714__", source, monkeypatch)
    error = pickles.name_culprit(module.train, {})
    assert str(error).startswith("variable `guard` (_thread.lock), which `train` uses")


def test_culprit_that_nobody_can_point_at_still_has_a_reason():
    def train(values=(LOCK,)):
        return values

    error = pickles.name_culprit(train, {})
    assert str(error).startswith(
        "`train` cannot be sent to where the function runs: cannot pickle '_thread.lock' object."
    )


@pytest.mark.parametrize(
    ("value", "name"), [(LOCK, "_thread.lock"), ({}, "dict"), (decimal.Decimal(1), "decimal.Decimal")]
)
def test_type_name_is_what_people_write(value, name):
    assert pickles.type_name(value) == name


def test_cuda_arguments_are_named(torch):
    class OnGpu(torch.Tensor):
        device = torch.device("cuda", 0)

    model = torch.nn.Linear(2, 2)
    model.register_buffer("mask", OnGpu(2))
    elsewhere = torch.ones(2, device="meta")
    arguments = {"x": OnGpu(2), "model": model, "cpu": torch.ones(1), "meta": elsewhere, "steps": 3}
    assert pickles.find_cuda_arguments(arguments) == ["x", "model"]


def test_cuda_arguments_of_a_driver_without_torch_are_none(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert pickles.find_cuda_arguments({"x": 1}) == []
    assert "torch" not in sys.modules


def test_pickle_is_protocol_5():
    assert pickles.dump(1)[0][:2] == pickle.PROTO + b"\x05"
