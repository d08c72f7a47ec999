"""Checkpoints that leave the store and come into it: verified, and as other tools write and read them."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest

from prefect_torch_elastic.checkpoint.verify import verify
from prefect_torch_elastic.errors import CheckpointError, StoreError
from prefect_torch_elastic.runlog import Commit, Pruned, RunLog
from prefect_torch_elastic.store.directory import DirectoryStore

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.filesystem import FileSystemReader  # noqa: E402
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save  # noqa: E402

from prefect_torch_elastic.checkpoint import archive, export  # noqa: E402
from prefect_torch_elastic.checkpoint.consolidate import consolidate  # noqa: E402
from prefect_torch_elastic.checkpoint.dcp_import import import_dcp  # noqa: E402
from prefect_torch_elastic.checkpoint.export import export_dcp  # noqa: E402
from prefect_torch_elastic.checkpoint.manifest import DamagedError  # noqa: E402
from prefect_torch_elastic.checkpoint.session import CheckpointSession  # noqa: E402

RUN = "run"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Net(nn.Module):
    """A tied embedding, a buffer, a bfloat16 and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.middle = nn.Linear(8, 8).to(torch.bfloat16)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        hidden = self.norm(hidden + self.middle(hidden.bfloat16()).float())
        return self.head(hidden) + self.nothing.sum()


@dataclass
class Settings:
    rate: float


def make_state(**more):
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0, **more}


def train(state, count=1):
    losses = []
    for _ in range(count):
        loss = state["model"](torch.randint(0, 50, (16,))).square().mean()
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["optimizer"].zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture
def store(tmp_path) -> DirectoryStore:
    (tmp_path / "store").mkdir()
    return DirectoryStore(tmp_path / "store")


def save(store, state, *, step=5) -> Commit:
    session = CheckpointSession(store, RUN)
    session.save(state, step=step, wait=True)
    session.close()
    return RunLog(store, RUN).refresh().commits[0]


def find_objects(store, suffix) -> list[Path]:
    return sorted(path for path in (store.path / RUN / "checkpoints").rglob(suffix) if path.is_file())


# ---------------------------------------------------------------- verify


def test_verify_finds_a_whole_checkpoint_whole(store):
    commit = save(store, make_state())
    done: list[int] = []
    findings = verify(store, RUN, commit, progress=done.append)
    assert findings.damages == ()
    stored = sum(path.stat().st_size for path in find_objects(store, "*"))
    assert findings.size_bytes == sum(done) == stored


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        pytest.param("manifest.json", None, id="manifest"),
        pytest.param("r00000.json", 0, id="rank-manifest"),
        pytest.param("000000", 0, id="block"),
    ],
)
@pytest.mark.parametrize("harm", [flip, cut, Path.unlink], ids=["flipped", "cut", "missing"])
def test_verify_names_rank_object_expected_and_found(store, name, rank, harm):
    commit = save(store, make_state())
    (path,) = find_objects(store, name)
    harm(path)
    (damage,) = verify(store, RUN, commit).damages
    assert damage.rank == rank
    assert damage.key == str(path.relative_to(store.path))
    assert "crc32c" in damage.expected
    assert damage.found == "no object" if harm is Path.unlink else "crc32c" in damage.found


def test_verify_names_every_damage(store):
    commit = save(store, {"a": torch.ones(3 << 20), "b": torch.ones(3 << 20)})
    blocks = find_objects(store, "00000*")
    assert len(blocks) > 2
    flip(blocks[0])
    blocks[-1].unlink()
    assert len(verify(store, RUN, commit).damages) == 2


def test_verify_raises_when_the_store_cannot_be_read(store, monkeypatch):
    commit = save(store, make_state())

    def fail(self, key):
        raise StoreError("the network is away")

    monkeypatch.setattr(DirectoryStore, "get", fail)
    with pytest.raises(StoreError, match="network"):
        verify(store, RUN, commit)


# ---------------------------------------------------------------- export


def test_exported_directory_is_loaded_by_torch(store, tmp_path):
    state = make_state()
    train(state, 3)
    commit = save(store, state)
    left_out = export_dcp(store, RUN, commit, tmp_path / "dcp")
    assert left_out == ["the random state: it belongs to single ranks"]

    other = make_state()
    plain = {
        "model": get_model_state_dict(other["model"]),
        "optimizer": get_optimizer_state_dict(other["model"], other["optimizer"]),
    }
    dcp_load(plain, checkpoint_id=str(tmp_path / "dcp"))
    other["model"].load_state_dict(plain["model"])
    set_optimizer_state_dict(other["model"], other["optimizer"], plain["optimizer"])
    other["scheduler"].load_state_dict(state["scheduler"].state_dict())
    torch.manual_seed(2)
    expected = train(state, 3)
    torch.manual_seed(2)
    assert train(other, 3) == expected


def test_exported_directory_becomes_one_file_by_torchs_own_tool(store, tmp_path):
    state = make_state()
    train(state, 3)
    export_dcp(store, RUN, save(store, state), tmp_path / "dcp")
    dcp_to_torch_save(tmp_path / "dcp", str(tmp_path / "all.pt"))
    content = torch.load(tmp_path / "all.pt", weights_only=True)
    assert content["scheduler"] == state["scheduler"].state_dict()
    assert (content["step"], content["epoch"]) == (5, 0)
    Net().load_state_dict(content["model"])


def test_export_leaves_out_what_would_be_pickled_code_and_says_so(store, tmp_path):
    state = make_state(settings=Settings(rate=0.5), lists=[1, "two", {"three": 3.0}])
    left_out = export_dcp(store, RUN, save(store, state), tmp_path / "dcp")
    assert any("`settings`" in sentence and "Settings" in sentence for sentence in left_out)
    names = FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    assert "settings" not in names
    assert any(name.startswith("lists") for name in names)


def test_export_reads_each_block_about_once_and_holds_a_batch_at_a_time(store, tmp_path, monkeypatch):
    commit = save(store, {f"t{index:03}": torch.full((1 << 16,), float(index)) for index in range(100)})
    monkeypatch.setattr(archive, "BATCH_BYTES", 4 << 20)
    monkeypatch.setattr(export, "_FILE_BYTES", 4 << 20)
    fetched: list[int] = []
    get_range = DirectoryStore.get_range

    def watch(self, key, start, length):
        fetched.append(length)
        return get_range(self, key, start, length)

    monkeypatch.setattr(DirectoryStore, "get_range", watch)
    done: list[int] = []
    export_dcp(store, RUN, commit, tmp_path / "dcp", progress=done.append)
    assert max(done) <= 4 << 20
    assert sum(done) == 100 << 18
    assert sum(fetched) < 4 * (100 << 18)
    content = {f"t{index:03}": torch.zeros(1 << 16) for index in range(100)}
    dcp_load(content, checkpoint_id=str(tmp_path / "dcp"))
    assert all((tensor == int(name[1:])).all() for name, tensor in content.items())


def test_export_of_a_damaged_checkpoint_leaves_nothing_behind(store, tmp_path):
    commit = save(store, make_state())
    flip(find_objects(store, "000000")[0])
    with pytest.raises(DamagedError, match="rank 0's block"):
        export_dcp(store, RUN, commit, tmp_path / "out" / "dcp")
    assert list((tmp_path / "out").iterdir()) == []
    assert not list(store.list(f"{RUN}/pins"))


def test_export_that_is_interrupted_leaves_nothing_behind(store, tmp_path):
    commit = save(store, make_state())

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_dcp(store, RUN, commit, tmp_path / "out" / "dcp", progress=interrupt)
    assert list((tmp_path / "out").iterdir()) == []


def test_export_overwrites_nothing(store, tmp_path):
    commit = save(store, make_state())
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / "mine").touch()
    with pytest.raises(CheckpointError, match="exists already"):
        export_dcp(store, RUN, commit, tmp_path / "dcp")
    assert [path.name for path in (tmp_path / "dcp").iterdir()] == ["mine"]


def test_checkpoint_that_was_pruned_in_the_meantime_is_refused(store, tmp_path):
    commit = save(store, make_state())
    RunLog(store, RUN).append(Pruned(uuid=commit.uuid, step=commit.step), epoch=None)
    with pytest.raises(CheckpointError, match="pruned in the meantime"):
        export_dcp(store, RUN, commit, tmp_path / "dcp")


# ---------------------------------------------------------------- import


def test_imported_directory_is_loaded_like_any_checkpoint(store, tmp_path):
    state = make_state()
    train(state, 3)
    export_dcp(store, RUN, save(store, state), tmp_path / "dcp")
    commit, left_out = import_dcp(tmp_path / "dcp", store, "copy", step=5)
    assert left_out == ["the random state: it begins anew"]
    assert verify(store, "copy", commit).damages == ()

    other = make_state()
    assert CheckpointSession(store, "copy").load(other) == 5
    torch.manual_seed(2)
    expected = train(state, 3)
    torch.manual_seed(2)
    assert train(other, 3) == expected


def test_bare_state_dict_is_imported_as_a_module(store, tmp_path):
    model = Net()
    dcp_save(model.state_dict(), checkpoint_id=str(tmp_path / "dcp"))
    import_dcp(tmp_path / "dcp", store, "copy", step=0, key="net")
    other = Net()
    CheckpointSession(store, "copy").load({"net": other})
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


def test_optimizer_with_numbers_for_names_is_left_out_with_the_cure(store, tmp_path):
    state = make_state()
    train(state)
    plain = {"model": state["model"].state_dict(), "optimizer": state["optimizer"].state_dict()}
    dcp_save(plain, checkpoint_id=str(tmp_path / "dcp"))
    _, left_out = import_dcp(tmp_path / "dcp", store, "copy", step=1)
    assert any("`optimizer`" in line and "get_optimizer_state_dict" in line for line in left_out)
    CheckpointSession(store, "copy").load({"model": Net()})


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('ran')",)


def test_metadata_that_names_code_is_refused(store, tmp_path):
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"`builtins\.exec`"):
        import_dcp(tmp_path / "dcp", store, "copy", step=0)
    assert not RunLog(store, "copy").refresh().all_commits


def test_value_that_is_code_is_refused(store, tmp_path):
    dcp_save({"a": torch.ones(3), "b": Evil()}, checkpoint_id=str(tmp_path / "dcp"))
    with pytest.raises(CheckpointError, match="`b` of the DCP checkpoint"):
        import_dcp(tmp_path / "dcp", store, "copy", step=0)


def test_metadata_that_leads_out_of_its_directory_is_refused(store, tmp_path):
    dcp_save({"a": torch.ones(3)}, checkpoint_id=str(tmp_path / "dcp"))
    path = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="not in its directory"):
        import_dcp(tmp_path / "dcp", store, "copy", step=0)


def test_folder_without_metadata_is_refused(store, tmp_path):
    with pytest.raises(CheckpointError, match="no complete DCP checkpoint"):
        import_dcp(tmp_path, store, "copy", step=0)


def test_import_into_a_run_with_checkpoints_is_refused(store, tmp_path):
    commit = save(store, make_state())
    export_dcp(store, RUN, commit, tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="has checkpoints already"):
        import_dcp(tmp_path / "dcp", store, RUN, step=9)
    assert RunLog(store, RUN).refresh().epoch == 1  # nobody was thrown out


# ---------------------------------------------------------------- consolidate


def test_safetensors_file_has_the_models_own_names_and_bits(store, tmp_path):
    state = make_state()
    train(state, 2)
    consolidate(store, RUN, save(store, state), tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    expected = state["model"].state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    assert all(loaded[name].dtype == value.dtype for name, value in expected.items())
    Net().load_state_dict(loaded)


def test_torch_file_is_read_with_weights_only(store, tmp_path):
    state = make_state()
    consolidate(store, RUN, save(store, state), tmp_path / "model.pt", format="torch")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    Net().load_state_dict(loaded)
    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()  # tied: stored once


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_optimizer_comes_along_when_it_is_asked_for(store, tmp_path, format):
    state = make_state()
    train(state)
    commit = save(store, state)
    left_out = consolidate(store, RUN, commit, tmp_path / "f", format=format, optimizer=True)
    moment = state["optimizer"].state[state["model"].embed.weight]["exp_avg"]
    if format == "torch":
        loaded = torch.load(tmp_path / "f", weights_only=True)
        found = loaded["optimizer"]["state"]["embed.weight"]["exp_avg"]
    else:
        loaded = load_file(tmp_path / "f")
        found = loaded["optimizer.state.embed.weight.exp_avg"]
        assert any("safetensors holds tensors only" in sentence for sentence in left_out)
        assert "model.embed.weight" in loaded
    assert torch.equal(found, moment)


def test_one_of_two_modules_has_its_own_names(store, tmp_path):
    state = {"student": nn.Linear(2, 2), "teacher": nn.Linear(2, 3)}
    commit = save(store, state)
    consolidate(store, RUN, commit, tmp_path / "one", key="teacher")
    assert load_file(tmp_path / "one").keys() == {"weight", "bias"}
    consolidate(store, RUN, commit, tmp_path / "both")
    assert load_file(tmp_path / "both").keys() == {
        *("student.weight", "student.bias", "teacher.weight", "teacher.bias")
    }


def test_unknown_entry_is_named_with_those_that_there_are(store, tmp_path):
    commit = save(store, make_state())
    with pytest.raises(CheckpointError, match=r"no entry `modle`. It has `model`, `optimizer`"):
        consolidate(store, RUN, commit, tmp_path / "f", key="modle")
    assert not (tmp_path / "f").exists()


def test_dtype_that_safetensors_does_not_know_is_refused_with_the_cure(store, tmp_path):
    model = nn.Module()
    model.register_buffer("phases", torch.ones(3, dtype=torch.complex128))
    commit = save(store, {"model": model})
    with pytest.raises(CheckpointError, match='format="torch"'):
        consolidate(store, RUN, commit, tmp_path / "f")
    consolidate(store, RUN, commit, tmp_path / "f", format="torch")
