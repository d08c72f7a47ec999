"""The command line: what it says, to people and to programs, and how it ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_torch_elastic.aging import DAY_SECONDS
from prefect_torch_elastic.cli import checkpoints, pruning
from prefect_torch_elastic.cli import run as run_command
from prefect_torch_elastic.errors import StoreError
from prefect_torch_elastic.runlog import Bad, RunLog
from prefect_torch_elastic.store.directory import DirectoryStore

torch = pytest.importorskip("torch")

from prefect_torch_elastic.checkpoint.session import CheckpointSession  # noqa: E402

LIGHT = """
import sys
sys.argv = ["prefect-torch-elastic", *{arguments!r}]
from prefect_torch_elastic.cli import main
try:
    main()
except SystemExit as end:
    print([name for name in {heavy!r} if name in sys.modules], end.code)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A store with the runs `first` (steps 1, 2, 3) and `my run` (step 7)."""
    root = tmp_path_factory.mktemp("made")
    store = DirectoryStore(root)
    store.put("keep", b"")
    for key, steps in {"first": (1, 2, 3), "my-run-d33e7609": (7,)}.items():
        session = CheckpointSession(store, key)
        for step in steps:
            state = {"model": torch.nn.Linear(4, 4), "epoch": step}
            session.save(state, step=step, metrics={"loss": 1.0 / step}, wait=True)
        session.close()
    return root


@pytest.fixture
def copied(made, tmp_path) -> Path:
    """A store of its own for each test that changes something."""
    target = tmp_path / "store"
    subprocess.run(["cp", "-a", str(made), str(target)], check=True)
    return target


def call(capsys, *arguments: object) -> tuple[int, str, str]:
    code = run_command([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def call_json(capsys, *arguments: object):
    code, out, _ = call(capsys, *arguments, "--json")
    return code, json.loads(out)


def harm(root: Path, pattern: str) -> Path:
    path = sorted(root.glob(f"first/checkpoints/{pattern}"))[0]
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    return path


# ---------------------------------------------------------------- list and show


def test_list_shows_the_runs(made, capsys):
    code, out, _ = call(capsys, "checkpoints", "list", made)
    assert code == 0
    assert "first" in out
    _, rows = call_json(capsys, "checkpoints", "list", made)
    assert [(row["run"], row["checkpoints"], row["newest_step"]) for row in rows] == [
        ("first", 3, 3),
        ("my-run-d33e7609", 1, 7),
    ]
    assert all(row["epoch"] == 1 and row["world_size"] == 1 and row["size_bytes"] for row in rows)


def test_list_of_a_run_shows_its_checkpoints_newest_first(made, capsys):
    code, out, _ = call(capsys, "checkpoints", "list", made, "--run", "first")
    assert code == 0
    assert "loss 0.333333" in out
    _, rows = call_json(capsys, "checkpoints", "list", made, "--run", "first")
    assert [(row["step"], row["state"]) for row in rows] == [(3, "ok"), (2, "ok"), (1, "ok")]
    assert all(abs(row["saved"] - time.time()) < 3600 for row in rows)


def test_list_says_what_is_damaged(copied, capsys):
    condemn_newest(copied)
    _, rows = call_json(capsys, "checkpoints", "list", copied, "--run", "first")
    assert rows[0]["state"] == "damaged: rank 1's block was changed"
    _, runs = call_json(capsys, "checkpoints", "list", copied)
    assert (runs[0]["damaged"], runs[0]["checkpoints"]) == (1, 2)


def test_show_names_entries_and_versions(made, capsys):
    code, facts = call_json(capsys, "checkpoints", "show", made, "--run", "first", "--step", "2")
    assert code == 0
    assert (facts["step"], facts["metrics"]) == (2, {"loss": 0.5})
    assert facts["entries"][0] == {
        "entry": "model",
        "kind": "module",
        "tensors": 2,
        "elements": 20,
        "dtypes": ["float32"],
    }
    assert "torch" in facts["versions"]
    _, out, _ = call(capsys, "checkpoints", "show", made, "--run", "first")
    assert "Step 3 of first" in out


# ---------------------------------------------------------------- verify


def test_verify_of_whole_checkpoints_ends_with_0(made, capsys):
    code, out, _ = call(capsys, "checkpoints", "verify", made, "--run", "first")
    assert code == 0
    assert out.count("whole") == 3


def test_verify_of_a_damaged_checkpoint_ends_with_1_and_names_it(copied, capsys):
    path = harm(copied, "*2/*/r00000/000000")
    code, results = call_json(capsys, "checkpoints", "verify", copied, "--run", "first")
    assert code == 1
    assert [(result["step"], result["ok"]) for result in results] == [(3, True), (2, False), (1, True)]
    (damage,) = results[1]["damages"]
    assert (damage["rank"], damage["object"]) == (0, str(path.relative_to(copied)))
    code, out, _ = call(capsys, "checkpoints", "verify", copied, "--run", "first", "--step", "2")
    assert code == 1
    assert "rank 0's" in out


def condemn_newest(root: Path) -> str:
    """Mark step 3 of `first` as damaged, as a load does that finds it so; return its uuid."""
    log = RunLog(DirectoryStore(root), "first")
    newest = log.refresh().commits[0]
    log.append(Bad(uuid=newest.uuid, step=3, reason="rank 1's block was changed"), epoch=None)
    return newest.uuid


def test_verify_ends_with_1_when_a_load_has_found_damage_before(copied, capsys):
    uuid = condemn_newest(copied)
    code, results = call_json(capsys, "checkpoints", "verify", copied, "--run", "first")
    assert code == 1
    assert [(result["step"], result["ok"]) for result in results] == [(2, True), (1, True), (3, False)]
    assert (results[-1]["uuid"], results[-1]["reason"]) == (uuid, "rank 1's block was changed")
    code, out, _ = call(capsys, "checkpoints", "verify", copied, "--run", "first", "--step", "3")
    assert code == 1
    assert "step 3: damaged, as a load found: rank 1's block was changed" in out


def test_verify_ends_with_0_when_the_damaged_checkpoint_is_gone(copied, capsys):
    uuid = condemn_newest(copied)
    shutil.rmtree(copied / "first" / "checkpoints" / "000000000003" / uuid)
    code, results = call_json(capsys, "checkpoints", "verify", copied, "--run", "first")
    assert (code, [result["step"] for result in results]) == (0, [2, 1])


# ---------------------------------------------------------------- prune


def test_prune_removes_all_but_the_newest_and_says_so(copied, capsys):
    code, out, _ = call(capsys, "checkpoints", "prune", copied, "--run", "first", "--keep-last", "1")
    assert code == 0
    assert out.splitlines()[0].startswith("removed: step 1 of first")
    _, rows = call_json(capsys, "checkpoints", "list", copied, "--run", "first")
    assert [row["step"] for row in rows] == [3]
    assert [path.name for path in (copied / "first" / "checkpoints").iterdir()] == ["000000000003"]


def test_prune_keeps_the_best(copied, capsys):
    options = ("--keep-best", "1", "--metric", "loss", "--mode", "max")
    _, rows = call_json(capsys, "checkpoints", "prune", copied, "--run", "first", *options)
    assert [row["step"] for row in rows] == [2]


def test_dry_run_removes_nothing(copied, capsys):
    options = ("--run", "first", "--keep-last", "1", "--dry-run")
    _, rows = call_json(capsys, "checkpoints", "prune", copied, *options)
    assert [row["step"] for row in rows] == [1, 2]
    _, left = call_json(capsys, "checkpoints", "list", copied, "--run", "first")
    assert len(left) == 3


def test_old_runs_go_and_live_ones_stay(copied, capsys):
    when = time.time() - 40 * DAY_SECONDS
    for path in (copied / "first").rglob("*"):
        os.utime(path, (when, when))
    dry = ("--older-than", "30d", "--dry-run")
    _, would = call_json(capsys, "checkpoints", "prune", copied, *dry)
    _, gone = call_json(capsys, "checkpoints", "prune", copied, "--older-than", "30d")
    assert [row["run"] for row in would] == [row["run"] for row in gone] == ["first"]
    _, left = call_json(capsys, "checkpoints", "list", copied)
    assert [row["run"] for row in left] == ["my-run-d33e7609"]


def list_files(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in root.rglob("*")}


def test_dry_run_of_old_runs_writes_nothing_into_the_store(copied, capsys):
    before = list_files(copied)
    assert call(capsys, "checkpoints", "prune", copied, "--older-than", "30d", "--dry-run")[0] == 0
    assert list_files(copied) == before


def test_run_that_comes_alive_while_others_are_removed_stays(copied, capsys, monkeypatch):
    when = time.time() - 40 * DAY_SECONDS
    for path in copied.rglob("*"):
        os.utime(path, (when, when))
    remove_run = pruning.remove_run

    def remove_and_revive(store, folder):
        size = remove_run(store, folder)
        RunLog(store, "my-run-d33e7609").take_epoch(attempt=2, by="another flow")
        return size

    monkeypatch.setattr(pruning, "remove_run", remove_and_revive)
    _, gone = call_json(capsys, "checkpoints", "prune", copied, "--older-than", "30d")
    assert [row["run"] for row in gone] == ["first"]


def test_run_that_comes_alive_at_its_removal_is_named_and_the_others_go(copied, capsys, monkeypatch):
    when = time.time() - 40 * DAY_SECONDS
    for path in copied.rglob("*"):
        os.utime(path, (when, when))
    remove_run = pruning.remove_run

    def refuse_first(store, folder):
        if folder == "first":
            raise StoreError("the run `first` came alive.")
        return remove_run(store, folder)

    monkeypatch.setattr(pruning, "remove_run", refuse_first)
    code, out, _ = call(capsys, "checkpoints", "prune", copied, "--older-than", "30d")
    assert code == 1
    assert out.splitlines()[0] == "not removed: the run `first` came alive."
    assert out.splitlines()[1].startswith("removed: my-run-d33e7609")


# ---------------------------------------------------------------- damaged logs


def test_list_shows_the_other_runs_when_one_log_is_damaged(copied, capsys):
    entry = sorted((copied / "first" / "log").iterdir())[0]
    entry.write_bytes(b"{")
    code, rows = call_json(capsys, "checkpoints", "list", copied)
    assert code == 1
    assert [(row["run"], row["checkpoints"]) for row in rows] == [("first", 0), ("my-run-d33e7609", 1)]
    assert f"`first/log/{entry.name}`" in rows[0]["problem"]
    assert rows[1]["problem"] == ""
    code, out, _ = call(capsys, "checkpoints", "list", copied)
    assert code == 1
    assert "log damaged" in out
    assert f"first: `first/log/{entry.name}`" in out


def test_old_run_with_a_damaged_log_does_not_stop_a_dry_run(copied, capsys):
    sorted((copied / "first" / "log").iterdir())[0].write_bytes(b"{")
    when = time.time() - 40 * DAY_SECONDS
    for path in copied.rglob("*"):
        os.utime(path, (when, when))
    code, rows = call_json(capsys, "checkpoints", "prune", copied, "--older-than", "30d", "--dry-run")
    assert (code, [row["run"] for row in rows]) == (0, ["first", "my-run-d33e7609"])
    assert all(row["size_bytes"] for row in rows)


# ---------------------------------------------------------------- carrying


def test_checkpoint_goes_out_and_comes_in_again(made, copied, tmp_path, capsys):
    out = tmp_path / "dcp"
    code, said = call_json(capsys, "checkpoints", "export", made, "--run", "first", "--to", out)
    assert (code, said["step"]) == (0, 3)
    options = ("--from", out, "--run", "other", "--step", "9")
    assert call(capsys, "checkpoints", "import", copied, *options)[0] == 0
    _, rows = call_json(capsys, "checkpoints", "list", copied, "--run", "other")
    assert [row["step"] for row in rows] == [9]


def test_consolidate_writes_one_file(made, tmp_path, capsys):
    path = tmp_path / "model.pt"
    options = ("--run", "first", "--step", "2", "--to", path, "--format", "torch")
    assert call(capsys, "checkpoints", "consolidate", made, *options)[0] == 0
    torch.nn.Linear(4, 4).load_state_dict(torch.load(path, weights_only=True))


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        pytest.param(["list", "/no/such/store"], 1, "does not exist", id="no-store"),
        pytest.param(["list", "ftp://here"], 1, "unknown scheme", id="no-scheme"),
        pytest.param(["show", "STORE"], 2, "Name one with `--run`", id="several-runs"),
        pytest.param(["show", "STORE", "--run", "nope"], 2, "no run `nope`", id="no-run"),
        pytest.param(["show", "STORE", "--run", "first", "--step", "4"], 1, "It has: 3, 2, 1", id="no-step"),
        pytest.param(["prune", "STORE", "--run", "first"], 2, "say what stays", id="prune-nothing"),
        pytest.param(["prune", "STORE", "--older-than", "5"], 2, "is no age", id="age"),
        pytest.param(["prune", "STORE", "--older-than", "2h"], 2, "less than a day", id="live-age"),
        pytest.param(["prune", "STORE", "--keep-best", "1"], 2, "needs `--metric`", id="no-metric"),
        pytest.param(
            ["prune", "STORE", "--keep-best", "-1", "--metric", "loss"],
            *(2, "`--keep-best -1` is not accepted. Pass a whole number >= 0"),
            id="keep-best-below-0",
        ),
        pytest.param(["prune", "STORE", "--keep-last", "-5"], 2, "`--keep-last -5`", id="keep-last-below-1"),
        pytest.param(["prune", "STORE", "--keep-last", "0"], 2, "such as `--keep-last 3`", id="keep-last-0"),
        pytest.param(
            ["prune", "STORE", "--keep-every-steps", "0"], 2, "`--keep-every-steps 0`", id="keep-every-0"
        ),
        pytest.param(
            ["import", "STORE", "--from", "/no", "--run", "new", "--step", "-3"],
            *(1, "`step=-3`"),
            id="import-step-below-0",
        ),
    ],
)
def test_error_is_one_line_with_the_right_code(made, capsys, arguments, code, message):
    given = [str(made) if argument == "STORE" else argument for argument in arguments]
    found, _, err = call(capsys, "checkpoints", *given)
    assert found == code
    assert message in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments", [["checkpoints", "bogus"], ["checkpoints", "show", "--step", "x"], ["checkpoints", "export"]]
)
def test_command_that_cannot_be_understood_ends_with_2(capsys, arguments):
    assert call(capsys, *arguments)[0] == 2


def test_store_is_found_in_the_environment(made, capsys, monkeypatch):
    monkeypatch.setenv("PREFECT_INTEGRATIONS_TORCH_ELASTIC_STORE", str(made))
    assert call(capsys, "checkpoints", "verify", "--run", "first")[0] == 0


def test_run_is_found_by_its_key_and_by_its_folder(made, capsys):
    for key in ("my run", "my-run-d33e7609"):
        _, rows = call_json(capsys, "checkpoints", "list", made, "--run", key)
        assert [row["step"] for row in rows] == [7], key


def test_credentials_are_an_error_of_one_line_when_prefect_is_away(capsys):
    options = ("--credentials", "aws-credentials/training")
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        code, _, err = call(capsys, "checkpoints", "list", "s3://bucket/runs", *options)
    assert code == 1
    assert "`--credentials='aws-credentials/training'` cannot be loaded: ConnectError" in err
    assert "prefect config view" in err
    assert err.count("\n") == 1


def test_interrupt_ends_with_130_and_promises_no_more_than_is_true(copied, capsys, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "list_rows", interrupt)
    code, _, err = call(capsys, "checkpoints", "list", copied, "--run", "first")
    assert code == 130
    assert err.startswith("Error: interrupted.")
    assert "nothing is left" not in err


@pytest.mark.parametrize("options", [["--json"], []], ids=["json", "table"])
def test_reader_that_has_gone_is_no_traceback(made, options):
    command = [sys.executable, "-c", "from prefect_torch_elastic.cli import main; main()"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*command, "checkpoints", "list", str(made), *options], stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


# ---------------------------------------------------------------- weight


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        pytest.param(["--help"], ["torch", "numpy", "prefect", "obstore"], id="help"),
        pytest.param(["checkpoints", "list", "STORE"], ["torch", "prefect", "obstore"], id="list"),
        pytest.param(
            ["checkpoints", "verify", "STORE", "--run", "first"], ["torch", "prefect", "obstore"], id="verify"
        ),
    ],
)
def test_light_commands_import_no_framework(made, run_script, arguments, heavy):
    given = [str(made) if argument == "STORE" else argument for argument in arguments]
    result = run_script(LIGHT.format(arguments=given, heavy=heavy))
    assert result.stdout.splitlines()[-1] == "[] 0", result.stderr


def test_program_runs_as_a_process(made):
    command = [sys.executable, "-c", "from prefect_torch_elastic.cli import main; main()"]
    done = subprocess.run(
        [*command, "checkpoints", "list", str(made), "--json"], capture_output=True, text=True, check=True
    )
    assert len(json.loads(done.stdout)) == 2
