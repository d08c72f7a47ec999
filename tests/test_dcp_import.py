"""What `import` refuses, and that a run which has begun without a checkpoint can still get its first one."""

from __future__ import annotations

import pickle

import pytest

from prefect_torch_elastic.errors import CheckpointError
from prefect_torch_elastic.runlog import RunLog
from prefect_torch_elastic.store.directory import DirectoryStore

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint.state_dict_saver import save as dcp_save  # noqa: E402

from prefect_torch_elastic.checkpoint.dcp_import import import_dcp  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def store(tmp_path) -> DirectoryStore:
    (tmp_path / "store").mkdir()
    return DirectoryStore(tmp_path / "store")


@pytest.fixture
def dcp(tmp_path):
    dcp_save({"model": {"weight": torch.ones(4, 4)}}, checkpoint_id=str(tmp_path / "dcp"))
    return tmp_path / "dcp"


@pytest.mark.parametrize("step", [-3, -1, 1 << 63, True], ids=str)
def test_step_that_no_log_can_hold_is_refused_before_anything_is_written(store, dcp, step):
    with pytest.raises(CheckpointError, match=rf"`step={step}` .* Pass 0 or more"):
        import_dcp(dcp, store, "new", step=step)
    assert store.list_folders("") == []


def test_run_that_has_begun_without_a_checkpoint_takes_the_import(store, dcp):
    RunLog(store, "begun").take_epoch(attempt=4, by="a flow that was killed")
    commit, _ = import_dcp(dcp, store, "begun", step=7)
    state = RunLog(store, "begun").refresh()
    assert (commit.step, commit.epoch, state.attempts) == (7, 2, 4)


@pytest.mark.parametrize(
    "size",
    [(1 << 60,), (1 << 40, 1 << 40), (-1,), (3, 1 << 20)],
    ids=["huge", "beyond-64-bits", "negative", "more-than-the-files"],
)
def test_tensor_that_claims_more_than_its_files_hold_is_refused(store, dcp, size):
    path = dcp / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["model.weight"].size = torch.Size(size)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"`model.weight`.*damaged"):
        import_dcp(dcp, store, "new", step=0)


@pytest.mark.parametrize("size", ["4", None, ("a",)], ids=repr)
def test_tensor_whose_size_is_no_size_is_refused(store, dcp, size):
    path = dcp / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["model.weight"].size = size
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"`model.weight`.*damaged"):
        import_dcp(dcp, store, "new", step=0)
