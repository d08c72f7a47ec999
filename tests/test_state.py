"""The state of a training loop: taken without touching it, compared before it is filled, filled exactly."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from torch import nn  # noqa: E402

from prefect_torch_elastic.checkpoint.state import per_rank, plan_restore, take_snapshot  # noqa: E402
from prefect_torch_elastic.errors import CheckpointError, CheckpointMismatch, NonRetryable  # noqa: E402
from tests.checkpoint_memory import MemoryCheckpoint  # noqa: E402


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


class Net(nn.Module):
    """Tied weights, buffers of both kinds, extra state, a frozen parameter, a name with dots of its own."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.embed = nn.Linear(width, width, bias=False)
        self.body: Any = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("cache", torch.randn(3), persistent=False)
        self.calls = {"forward": 0}

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, state):
        self.calls = state

    def forward(self, x: Any) -> Any:
        self.calls["forward"] += 1
        self.seen += 1
        return self.head(self.body(self.embed(x))) + self.frozen


def make_adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)


def train(model, optimizer, steps, *others):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 4)).square().mean() * (1 + random.random() + np.random.rand())
        loss.backward()
        optimizer.step()
        for other in others:
            other.step()
        losses.append(loss.item())
    return losses


def assert_equal(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------- saving


def test_snapshot_names_tensors_after_key_and_parameter_and_copies_none():
    model = Net()
    snapshot = take_snapshot({"model": model, "best": 1.5})
    assert snapshot.tensors["model/body.0.weight"].data_ptr() == model.body[0].weight.data_ptr()
    assert "model/cache" not in snapshot.tensors
    assert "model/head.weight" not in snapshot.tensors  # tied: it is there once
    assert snapshot.values["best"] == 1.5


def test_snapshot_lets_rank_0_write_what_training_does_not_keep_equal():
    model = Net()
    optimizer = make_adamw(model.parameters())
    train(model, optimizer, 1)
    snapshot = take_snapshot({"model": model, "optimizer": optimizer, "mean": torch.ones(3)})
    assert snapshot.leader_only == {
        *("mean", "model/seen", "model/body.2.running_mean", "model/body.2.running_var"),
        "model/body.2.num_batches_tracked",
    }


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make_adamw, id="adamw"),
        pytest.param(lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), weight_decay=0.1), id="lr-tensor"),
        pytest.param(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), id="sgd"),
        pytest.param(lambda p: torch.optim.AdamW(p, fused=True), id="fused"),
    ],
)
def test_snapshot_before_the_first_step_changes_nothing(make):
    model = Net()
    optimizer = make(model.parameters())
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    random_state = torch.get_rng_state()
    snapshot = take_snapshot({"model": model, "optimizer": optimizer})
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not optimizer.state
    assert_equal(dict(model.state_dict()), dict(before[0]))
    assert optimizer.state_dict() == before[1]
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not [name for name in snapshot.tensors if name.startswith("optimizer/state")]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        pytest.param({}, ["nothing to save"], id="empty"),
        pytest.param({"fn": print}, ["`fn`", "Accepted are", "state_dict"], id="function"),
        pytest.param({3: 1}, ["the key 3"], id="key-is-a-number"),
        pytest.param({"__random__": 1}, ["'__random__'"], id="reserved-key"),
        pytest.param({"m": nn.Linear(2, 2, device="meta")}, ["`m/weight`", "to_empty"], id="meta"),
        pytest.param({"w": torch.ones(3).to_sparse()}, ["`w`", "sparse"], id="sparse"),
        pytest.param({"w": per_rank(torch.zeros(2**19))}, ["`w`", "1048576"], id="large-value-of-a-rank"),
    ],
)
def test_state_that_cannot_be_saved_is_named(state, words):
    with pytest.raises(CheckpointError) as caught:
        take_snapshot(state)
    assert all(word in str(caught.value) for word in words)


# ---------------------------------------------------------------- resuming


def sgd_with_groups(parameters):
    first, *rest = parameters
    return torch.optim.SGD([{"params": rest, "momentum": 0.9}, {"params": [first], "lr": 0.01}], lr=0.1)


OPTIMIZERS = [
    pytest.param(make_adamw, id="adamw"),
    pytest.param(lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)), id="lr-tensor"),
    pytest.param(lambda p: torch.optim.AdamW(p, lr=0.1, fused=True), id="fused"),
    pytest.param(lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True), id="amsgrad"),
    pytest.param(lambda p: torch.optim.SGD(p, lr=0.1), id="sgd"),
    pytest.param(sgd_with_groups, id="sgd-groups"),
    pytest.param(lambda p: torch.optim.NAdam(p, lr=0.1), id="nadam"),
    pytest.param(lambda p: torch.optim.Adafactor(p, lr=0.1), id="adafactor"),
    pytest.param(lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.1, centered=True), id="rmsprop"),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("into_used", [pytest.param(False, id="fresh"), pytest.param(True, id="used")])
def test_resumed_training_equals_the_undisturbed(make, into_used):
    def build():
        model = Net()
        optimizer = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"scheduler": scheduler, "optimizer": optimizer, "model": model, "best": 0.0}

    state = build()
    train(state["model"], state["optimizer"], 3, state["scheduler"])
    state["best"] = 7.0
    checkpoint = MemoryCheckpoint.take(state)
    expected = train(state["model"], state["optimizer"], 3, state["scheduler"])

    again = build()
    if into_used:
        train(again["model"], again["optimizer"], 2, again["scheduler"])
    assert checkpoint.load(again) == []
    assert train(again["model"], again["optimizer"], 3, again["scheduler"]) == expected
    assert again["best"] == 7.0
    assert again["model"].calls == state["model"].calls
    assert again["model"].head.weight is again["model"].embed.weight


def test_optimizer_saved_before_its_first_step_comes_back_empty():
    model = Net()
    optimizer = make_adamw(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    checkpoint = MemoryCheckpoint.take(state)
    expected = train(model, optimizer, 2)
    checkpoint.load(state)
    assert not any(optimizer.state.values())
    assert train(model, optimizer, 2) == expected


def test_learning_rate_tensor_stays_the_same_object():
    model = Net()
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    checkpoint = MemoryCheckpoint.take({"model": model, "optimizer": optimizer})
    rate.fill_(0.5)
    checkpoint.load({"model": model, "optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.1)


def test_moments_of_a_bfloat16_model_keep_their_dtype():
    model = nn.Linear(2, 2).to(torch.bfloat16)
    optimizer = make_adamw(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for kept in optimizer.state.values():
        kept["master"] = torch.randn(kept["exp_avg"].shape)
    checkpoint = MemoryCheckpoint.take({"model": model, "optimizer": optimizer})
    masters = [kept["master"].clone() for kept in optimizer.state.values()]
    fresh = make_adamw(model.parameters())
    checkpoint.load({"model": model, "optimizer": fresh})
    assert_equal([kept["master"] for kept in fresh.state.values()], masters)


def test_parameters_in_another_order_get_their_own_state():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters(), "lr": 0.25}]
    )
    train(model, optimizer, 2)
    checkpoint = MemoryCheckpoint.take({"model": model, "optimizer": optimizer})
    other = torch.optim.AdamW(
        [{"params": list(model[1].parameters())[::-1]}, {"params": list(model[0].parameters())[::-1]}]
    )
    checkpoint.load({"model": model, "optimizer": other})
    assert [group["lr"] for group in other.param_groups] == [0.25, 0.5]
    for parameter in model.parameters():
        assert torch.equal(other.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_one_optimizer_over_two_modules_and_two_over_one():
    def build():
        one, two = nn.Linear(4, 4), nn.Linear(4, 4)
        both = make_adamw([*one.parameters(), *two.parameters()])
        weights, biases = make_adamw([one.weight]), torch.optim.SGD([one.bias], lr=0.1, momentum=0.9)
        return {"both": both, "weights": weights, "biases": biases, "one": one, "two.0": two}

    def step(state):
        model = nn.Sequential(state["one"], state["two.0"])
        for _ in range(2):
            model(torch.randn(3, 4)).square().sum().backward()
            for key in ("both", "weights", "biases"):
                state[key].step()
            model.zero_grad()
        return model(torch.ones(1, 4)).tolist()

    state = build()
    step(state)
    checkpoint = MemoryCheckpoint.take(state)
    expected = step(state)
    again = build()
    checkpoint.load(again)
    assert step(again) == expected


def test_optimizer_without_its_module_is_matched_by_order():
    model = Net()
    optimizer = make_adamw(model.parameters())
    train(model, optimizer, 2)
    checkpoint = MemoryCheckpoint.take({"optimizer": optimizer})
    fresh = make_adamw(model.parameters())
    checkpoint.load({"optimizer": fresh})
    for parameter, kept in optimizer.state.items():
        assert torch.equal(fresh.state[parameter]["exp_avg"], kept["exp_avg"])


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda model: torch.compile(model, backend="eager"), id="compiled"),
        pytest.param(nn.DataParallel, id="data-parallel"),
    ],
)
def test_wrapped_and_plain_module_have_the_same_names(wrap):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain = take_snapshot({"model": model})
    wrapped = take_snapshot({"model": wrap(model)})
    assert list(wrapped.tensors) == list(plain.tensors)
    other = wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    MemoryCheckpoint.of(plain).load({"model": other})
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_activation_checkpointing_changes_no_name():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(nn.Linear(4, 4), checkpoint_wrapper(nn.Linear(4, 4)))
    optimizer = make_adamw(model.parameters())
    train(model, optimizer, 1)
    state = {"model": model, "optimizer": optimizer}
    checkpoint = MemoryCheckpoint.take(state)
    assert "optimizer/state/model/1.weight/exp_avg" in checkpoint.tensors
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    checkpoint.load({"model": plain, "optimizer": make_adamw(plain.parameters())})
    checkpoint.load(state)


def test_weights_tied_now_or_then_are_filled():
    tied, untied = Net(), Net()
    untied.head.weight = nn.Parameter(torch.randn(4, 4))
    MemoryCheckpoint.take({"model": tied}).load({"model": untied})
    assert torch.equal(untied.head.weight, tied.embed.weight)
    assert untied.head.weight is not untied.embed.weight
    MemoryCheckpoint.take({"model": untied}).load({"model": tied})
    assert torch.equal(tied.embed.weight, untied.embed.weight)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), id="channels-last"
        ),
        pytest.param(lambda: torch.randn(3, dtype=torch.complex64).conj(), id="conjugate"),
        pytest.param(lambda: torch.randn(4, 3).t(), id="transposed"),
        pytest.param(lambda: torch.zeros(0, 5), id="no-elements"),
        pytest.param(lambda: torch.tensor(3), id="no-dimension"),
        pytest.param(lambda: torch.tensor([True, False]), id="bool"),
        pytest.param(lambda: torch.randn(3).to(torch.float8_e5m2), id="float8"),
        pytest.param(lambda: torch.randn(3).to(torch.bfloat16), id="bfloat16"),
        pytest.param(lambda: torch.randn(3, requires_grad=True), id="leaf"),
        pytest.param(lambda: torch.randn(100)[10:12], id="view"),
    ],
)
def test_tensor_is_filled_in_place(make):
    saved, live = make(), make()
    expected = saved.detach().clone()
    pointer = live.data_ptr()
    state = {"w": live}
    MemoryCheckpoint.take({"w": saved}).load(state)
    assert state["w"] is live
    assert live.data_ptr() == pointer
    assert_equal(live.detach().to(torch.complex128), expected.to(torch.complex128))


def test_plain_values_are_replaced_and_tensors_in_them_filled():
    live = torch.zeros(3)
    state = {"cfg": {"lr": 1, "ema": {"w.0": live}}, "history": [], "done": False}
    saved = {
        "cfg": {"lr": 2, "ema": {"w.0": torch.ones(3)}, "new": torch.ones(1)},
        "history": [1, 2],
        "done": None,
    }
    MemoryCheckpoint.take(saved).load(state)
    assert state["cfg"]["ema"]["w.0"].data_ptr() == live.data_ptr()
    assert live.tolist() == [1, 1, 1]
    assert (state["cfg"]["lr"], state["cfg"]["new"].tolist()) == (2, [1])
    assert (state["history"], state["done"]) == ([1, 2], None)


@pytest.mark.parametrize("first", ["model", "best"])
def test_placeholder_that_shares_its_memory_with_the_model_gets_its_own(first):
    model = nn.Linear(2, 2)
    saved = {"model": model, "best": {"loss": 0.5, "weights": copy.deepcopy(model.state_dict())}}
    with torch.no_grad():
        model.weight.fill_(2.0)
        saved["best"]["weights"]["weight"].fill_(1.0)
    fresh = nn.Linear(2, 2)
    entries: dict[str, Any] = {"model": fresh, "best": {"loss": math.inf, "weights": fresh.state_dict()}}
    state = {key: entries[key] for key in sorted(entries, key=lambda key: key != first)}
    MemoryCheckpoint.take(saved).load(state)
    assert fresh.weight.eq(2.0).all()
    assert state["best"]["weights"]["weight"].eq(1.0).all()
    assert state["best"]["loss"] == 0.5


def test_module_under_two_names_is_filled_once_for_each():
    model = Net()
    fresh = Net()
    MemoryCheckpoint.take({"model": model, "same": model}).load({"model": fresh, "same": fresh})
    assert torch.equal(fresh.embed.weight, model.embed.weight)
    assert torch.equal(fresh.frozen, model.frozen)


def test_plain_value_needs_a_state_that_can_be_changed():
    from types import MappingProxyType

    checkpoint = MemoryCheckpoint.take({"best": 1})
    with pytest.raises(CheckpointError, match="Pass the state as a `dict`"):
        checkpoint.load(MappingProxyType({"best": 0}))


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        pytest.param(
            lambda: torch.Generator().manual_seed(1),
            lambda g: torch.rand(2, generator=g).tolist(),
            id="torch",
        ),
        pytest.param(lambda: np.random.default_rng(1), lambda g: g.random(2).tolist(), id="numpy"),
        pytest.param(lambda: random.Random(1), lambda g: g.random(), id="python"),
    ],
)
@pytest.mark.parametrize(
    "mark", [pytest.param(lambda g: g, id="shared"), pytest.param(per_rank, id="per-rank")]
)
def test_generator_that_others_hold_is_set_in_place(make, draw, mark):
    generator = make()
    checkpoint = MemoryCheckpoint.take({"g": mark(generator)})
    expected = draw(generator)
    checkpoint.load({"g": mark(generator)})
    assert draw(generator) == expected


class Loader:
    """Any object with the two methods."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_object_gets_its_state_with_tensors_and_number_keys():
    saved = {1: {"a.b": torch.ones(2)}, "1": (1, [torch.zeros(0)]), "n": np.arange(3), "none": None}
    loader: Any = Loader({1: {"a.b": torch.zeros(2)}})
    MemoryCheckpoint.take({"loader": Loader(saved)}).load({"loader": loader})
    assert list(loader.state) == list(saved)
    assert torch.equal(loader.state[1]["a.b"], torch.ones(2))
    assert loader.state["1"][1][0].shape == (0,)
    assert (loader.state["n"] == np.arange(3)).all()


def test_object_without_tensors_is_not_asked_for_its_state_before_loading():
    class Lazy(Loader):
        def state_dict(self):
            raise AssertionError("this would start workers")

    checkpoint = MemoryCheckpoint.take({"loader": Loader({"epoch": 3})})
    lazy = Lazy(None)
    checkpoint.load({"loader": lazy})
    assert lazy.state == {"epoch": 3}


def test_object_that_refuses_its_state_is_named():
    class Picky(Loader):
        def load_state_dict(self, state):
            raise KeyError("epoch")

    checkpoint = MemoryCheckpoint.take({"loader": Loader({})})
    with pytest.raises(CheckpointMismatch, match=r"`loader` refused its state.*KeyError"):
        checkpoint.load({"loader": Picky({})})


def test_grad_scaler_comes_back():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1, requires_grad=True))
    checkpoint = MemoryCheckpoint.take({"scaler": scaler})
    fresh = torch.amp.GradScaler("cpu")
    checkpoint.load({"scaler": fresh})
    assert fresh.get_scale() == 8.0


SCHEDULERS = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    "rate", [pytest.param(0.1, id="number"), pytest.param(torch.tensor(0.1), id="tensor")]
)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda o: SCHEDULERS.LambdaLR(o, lambda step: 0.9**step), id="lambda"),
        pytest.param(lambda o: SCHEDULERS.OneCycleLR(o, 0.5, total_steps=30), id="one-cycle"),
        pytest.param(lambda o: SCHEDULERS.CosineAnnealingWarmRestarts(o, 3), id="warm-restarts"),
        pytest.param(lambda o: SCHEDULERS.MultiStepLR(o, [2, 4]), id="multi-step"),
        pytest.param(
            lambda o: SCHEDULERS.SequentialLR(
                o, [SCHEDULERS.LinearLR(o, 0.1), SCHEDULERS.CosineAnnealingLR(o, 9)], milestones=[2]
            ),
            id="sequential",
        ),
    ],
)
def test_scheduler_goes_on(make, rate):
    def build():
        model = nn.Linear(4, 4)
        own = rate.clone() if isinstance(rate, torch.Tensor) else rate
        optimizer = torch.optim.SGD(model.parameters(), lr=own, momentum=0.9)
        return {"model": model, "optimizer": optimizer, "scheduler": make(optimizer)}

    def rates(state):
        train(state["model"], state["optimizer"], 1)
        state["scheduler"].step()
        return float(state["optimizer"].param_groups[0]["lr"])

    state = build()
    [rates(state) for _ in range(3)]
    checkpoint = MemoryCheckpoint.take(state)
    expected = [rates(state) for _ in range(4)]
    again = build()
    checkpoint.load(again)
    assert [rates(again) for _ in range(4)] == expected


def test_partial_state_loads_only_what_it_names():
    model = Net()
    optimizer = make_adamw(model.parameters())
    train(model, optimizer, 1)
    checkpoint = MemoryCheckpoint.take({"model": model, "optimizer": optimizer, "best": 1})
    fresh = Net()
    restore = plan_restore({"model": fresh}, checkpoint.saved)
    assert all(name.startswith("model/") for name in restore.tensors)
    checkpoint.load({"model": fresh})
    assert torch.equal(fresh.embed.weight, model.embed.weight)


# ---------------------------------------------------------------- what does not fit


def frozen_part():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return {"model": model, "optimizer": make_adamw(model[1].parameters())}


def other_groups():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return {"model": model, "optimizer": make_adamw(list(model.parameters()))}


def with_model(model):
    return {"model": model, "optimizer": make_adamw(model.parameters())}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(
            lambda: with_model(nn.Sequential(nn.Linear(3, 3), nn.Linear(2, 2))),
            ["`model/0.weight`", "[2, 2]", "[3, 3]"],
            id="other-size",
        ),
        pytest.param(
            lambda: with_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))),
            ["`model/2.weight` is not in the checkpoint"],
            id="extra-layer",
        ),
        pytest.param(
            lambda: with_model(nn.Sequential(nn.Linear(2, 2))),
            ["`model/1.weight` is in the checkpoint and not in `model` now"],
            id="layer-less",
        ),
        pytest.param(
            lambda: with_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(torch.bfloat16)),
            ["float32 [2, 2]", "bfloat16 [2, 2]"],
            id="other-dtype",
        ),
        pytest.param(
            frozen_part,
            ["`optimizer` has 2 parameters now and 4", "`model/0.weight` is missing"],
            id="frozen",
        ),
        pytest.param(other_groups, ["group 0", "[0, 1]", "[2, 2]"], id="other-groups"),
        pytest.param(
            lambda: {"ema": torch.ones(1)}, ["`ema` is not in the checkpoint", "`model`"], id="new-entry"
        ),
        pytest.param(lambda: {"model": 3}, ["`model` is a module", "plain value now"], id="other-kind"),
    ],
)
def test_changed_model_is_named_and_nothing_is_changed_c055(make, words):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [
        {"params": list(model[0].parameters())},
        {"params": list(model[1].parameters()), "weight_decay": 0.0},
    ]
    optimizer = make_adamw(groups)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    checkpoint = MemoryCheckpoint.take({"model": model, "optimizer": optimizer})

    state = make()
    objects = {key: value for key, value in state.items() if hasattr(value, "state_dict")}
    before = copy.deepcopy({key: value.state_dict() for key, value in objects.items()})
    random_state = torch.get_rng_state()
    with pytest.raises(CheckpointMismatch) as caught:
        checkpoint.load(state)
    assert isinstance(caught.value, NonRetryable)
    message = str(caught.value)
    assert "the checkpoint of step 10" in message.splitlines()[0]
    assert all(word in message for word in words), message
    assert '`load({"model": model})`' in message
    for key, content in before.items():
        assert str(state[key].state_dict()) == str(content)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_optimizer_alone_is_compared_by_shapes_c055():
    model = nn.Linear(2, 2)
    checkpoint = MemoryCheckpoint.take({"optimizer": make_adamw(model.parameters())})
    with pytest.raises(CheckpointMismatch, match=r"`optimizer`: `#/0` is \[2, 2\].*\[3, 3\]"):
        checkpoint.load({"optimizer": make_adamw(nn.Linear(3, 3).parameters())})


# ---------------------------------------------------------------- single ranks


def draws():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_random_state_comes_back_exactly_without_being_asked():
    draws()
    checkpoint = MemoryCheckpoint.take({"x": 1})
    expected = [draws() for _ in range(3)]
    assert checkpoint.load({"x": 0}) == []
    assert [draws() for _ in range(3)] == expected


def test_new_rank_gets_random_state_from_the_seed_and_says_so_c052():
    checkpoint = MemoryCheckpoint.take({"x": 1}, ranks=2)
    said = checkpoint.load({"x": 0}, rank=2, world_size=4)
    assert said == ["Rank 2 is new: its random state was made from the seed of the checkpoint."]
    first = draws()
    checkpoint.load({"x": 0}, rank=2, world_size=4)
    assert draws() == first
    checkpoint.load({"x": 0}, rank=3, world_size=4)
    assert draws() != first


def test_damaged_random_state_is_an_error_before_anything_is_changed():
    checkpoint = MemoryCheckpoint.take({"w": torch.ones(3, 2).t()})
    saved = checkpoint.saved
    saved.rank_values[0]["__random__"]["v"][1][1]["v"][1]["v"].pop()  # one of Python's 625 numbers
    live = torch.zeros(3, 2).t()
    restore = plan_restore({"w": live}, saved)
    checkpoint.read_into(restore)
    before = (random.getstate(), torch.get_rng_state())
    with pytest.raises(CheckpointError, match="random state of the checkpoint was refused"):
        restore.apply(0, 1)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert not live.any()


def test_values_of_single_ranks_come_back():
    state = {
        "seen": per_rank({"a": torch.ones(2)}),
        "loader": per_rank(Loader({"at": 4})),
        "w": per_rank(torch.ones(2)),
    }
    checkpoint = MemoryCheckpoint.take(state)
    live = torch.zeros(2)
    again = {"seen": per_rank(None), "loader": per_rank(Loader(None)), "w": per_rank(live)}
    checkpoint.load(again)
    assert torch.equal(again["seen"].value["a"], torch.ones(2))
    assert again["loader"].value.state == {"at": 4}
    assert live.tolist() == [1, 1]


@pytest.mark.parametrize("world_size", [1, 3])
def test_values_of_single_ranks_refuse_another_world_size_c052(world_size):
    checkpoint = MemoryCheckpoint.take({"seen": per_rank([1])}, ranks=2)
    state = {"seen": per_rank([0])}
    words = f"`seen` belongs to single ranks: saved with world size 2, now {world_size}"
    with pytest.raises(CheckpointMismatch, match=words):
        plan_restore(state, checkpoint.saved, world_size=world_size)
    with pytest.raises(CheckpointMismatch, match=words):
        checkpoint.load(state, rank=0, world_size=world_size)
    assert state["seen"].value == [0]


def test_values_of_single_ranks_may_be_kept_at_another_world_size():
    checkpoint = MemoryCheckpoint.take({"seen": per_rank([1])}, ranks=2)
    states = [{"seen": per_rank([0], on_resize="keep")} for _ in range(3)]
    said = [checkpoint.load(state, rank=rank, world_size=3) for rank, state in enumerate(states)]
    assert [state["seen"].value for state in states] == [[1], [1], [0]]
    assert said[2][0] == "Rank 2 is new: `seen` was left as it is."


def test_object_that_merges_gets_the_states_of_all_ranks():
    class Shards(Loader):
        def load_rank_states(self, states):
            self.state = states

    checkpoint = MemoryCheckpoint.take({"shards": Shards({"at": 1})}, ranks=3)
    shards = Shards(None)
    checkpoint.load({"shards": shards}, rank=0, world_size=1)
    assert shards.state == [{"at": 1}] * 3


def test_step_counts_that_differ_come_back_as_tensors_of_their_own():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = make_adamw(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    model[0].zero_grad()
    optimizer.step()
    checkpoint = MemoryCheckpoint.take({"model": model, "optimizer": optimizer})
    fresh = make_adamw(model.parameters())
    checkpoint.load({"model": model, "optimizer": fresh})
    steps = [kept["step"] for kept in fresh.state.values()]
    assert [step.item() for step in steps] == [1, 1, 2, 2]
    assert len({step.data_ptr() for step in steps}) == 4


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: content.pop("numbers"), id="part-missing"),
        pytest.param(lambda content: content["stateful"].append(77), id="unknown-parameter"),
        pytest.param(lambda content: content.update(groups=3), id="other-type"),
    ],
)
def test_damaged_optimizer_state_is_refused(damage):
    model = nn.Linear(2, 2)
    checkpoint = MemoryCheckpoint.take({"model": model, "optimizer": make_adamw(model.parameters())})
    saved = checkpoint.saved
    damage(saved.values["optimizer"])
    with pytest.raises(CheckpointError, match="damaged"):
        plan_restore({"model": model, "optimizer": make_adamw(model.parameters())}, saved)
