"""The flows: what the data step promises, the figures beside the loss, and each body as a plain function."""

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FLOWS = Path(__file__).parent.parent / "flows"


@pytest.fixture(autouse=True)
def flows_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The flows import their siblings by name, as scripts do."""
    monkeypatch.syspath_prepend(str(FLOWS))
    yield
    for name in ("text", "gpt", "place", *(path.stem for path in FLOWS.glob("*.py"))):
        sys.modules.pop(name, None)


@pytest.fixture
def text() -> ModuleType:
    return import_module("text")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Sixty small files, one of them in a folder, beside what is left out."""
    folder = tmp_path / "corpus"
    for i in range(60):
        path = folder / ("package" if i == 0 else ".") / f"module_{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def f_{i}(x):\n    return x + {i}\n" * 20)
    for name in ("site-packages/other.py", "test/test_x.py", "data.txt"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("left out")
    return folder


def tokenize(corpus: Path, out: Path, **options: Any) -> Path:
    done = import_module("pretrain").tokenize.fn(str(corpus), str(out), validation_percent=20, **options)
    return Path(done["folder"])


def shards_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_corpus_is_python_files_without_packages_and_tests(text, corpus):
    names = text.read_corpus(corpus)
    assert len(names) == 60
    assert "package/module_0.py" in names


def test_standard_library_is_at_least_5_mb_and_has_both_splits(text):
    names = text.read_corpus(text.standard_library())
    assert sum(map(len, names.values())) >= 5_000_000
    share = sum(len(names[n]) for n in names if text.is_validation(n, validation_percent=5))
    assert 200_000 < share < 2_000_000


def test_tokenize_splits_by_file_without_overlap(text, corpus, tmp_path):
    folder = tokenize(corpus, tmp_path / "out")
    manifest = text.read_manifest(folder)
    train, validation = (set(manifest.files[split]) for split in ("train", "validation"))
    assert not train & validation
    assert train | validation == set(text.read_corpus(corpus))
    for split, names in manifest.files.items():
        expected = b"".join((corpus / name).read_bytes() for name in names)
        assert (folder / f"{split}.bin").read_bytes() == expected
        assert manifest.bytes[split] == len(expected)


def test_tokenize_reuses_the_shards_when_run_again(corpus, tmp_path, capsys):
    first = tokenize(corpus, tmp_path / "out")
    times = {path.name: path.stat().st_mtime_ns for path in first.iterdir()}
    assert capsys.readouterr().out.startswith("Wrote")
    second = tokenize(corpus, tmp_path / "out")
    assert capsys.readouterr().out.startswith("Reused")
    assert second == first
    assert {path.name: path.stat().st_mtime_ns for path in second.iterdir()} == times


def test_tokenize_writes_equal_shards_in_another_folder(corpus, tmp_path):
    assert shards_of(tokenize(corpus, tmp_path / "a")) == shards_of(tokenize(corpus, tmp_path / "b"))


def test_tokenize_takes_another_folder_when_the_text_changes(corpus, tmp_path):
    first = tokenize(corpus, tmp_path / "out")
    (corpus / "module_7.py").write_text("x = 1\n")
    assert tokenize(corpus, tmp_path / "out") != first


@pytest.mark.parametrize("damage", ["truncated", "missing", "no manifest"])
def test_tokenize_writes_again_when_the_shards_are_damaged(corpus, tmp_path, capsys, damage):
    folder = tokenize(corpus, tmp_path / "out")
    whole = shards_of(folder)
    match damage:
        case "truncated":
            os.truncate(folder / "train.bin", 10)
        case "missing":
            (folder / "validation.bin").unlink()
        case _:
            (folder / "manifest.json").write_text("{")
    capsys.readouterr()
    assert shards_of(tokenize(corpus, tmp_path / "out")) == whole
    assert capsys.readouterr().out.startswith("Wrote")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [folder.name]


def test_write_shards_leaves_one_whole_folder_when_runs_race(text, corpus, tmp_path):
    files = text.read_corpus(corpus)
    folder, errors = tmp_path / "out" / "shards", []
    gate = threading.Barrier(8)

    def write() -> None:
        gate.wait()
        try:
            text.write_shards(files, folder, validation_percent=20)
        except Exception as error:  # noqa: BLE001  (any error of any thread fails the test below)
            errors.append(error)

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert text.shards_are_intact(folder, digest=text.corpus_digest(files, validation_percent=20))
    assert [path.name for path in folder.parent.iterdir()] == ["shards"]


def test_write_shards_names_the_split_when_it_is_empty(text, tmp_path):
    with pytest.raises(ValueError, match=r"train split is empty: 0 files, `validation_percent=5`"):
        text.write_shards({}, tmp_path / "shards", validation_percent=5)


def test_entropy_is_right_on_known_texts(text):
    assert text.unigram_entropy(b"abab") == pytest.approx(1.0)
    assert text.unigram_entropy(b"aaab") == pytest.approx(0.75 * math.log2(4 / 3) + 0.25 * 2)
    # After a comes b, after b comes a: nothing is left to guess.
    assert text.bigram_entropy(b"ab" * 50) == pytest.approx(0.0)
    # Pairs aa, ab, ba: after a (2 of 3) one bit, after b (1 of 3) none.
    assert text.bigram_entropy(b"aaba") == pytest.approx(2 / 3)


def test_entropy_reads_a_mapped_shard(text, tmp_path):
    (tmp_path / "x.bin").write_bytes(b"aaba")
    assert text.bigram_entropy(text.map_shard(tmp_path / "x.bin")) == pytest.approx(2 / 3)


def test_batches_are_the_same_at_any_world_size():
    gpt, torch = import_module("gpt"), import_module("torch")
    tokens = torch.arange(1000) % 251
    draw = {"batch": 8, "seed": 3, "step": 5}
    whole = gpt.draw_starts(tokens, **draw, rank=0, world_size=1)
    halves = [gpt.draw_starts(tokens, **draw, rank=rank, world_size=2) for rank in (0, 1)]
    assert torch.equal(torch.stack(halves, dim=1).flatten(), whole)
    assert not torch.equal(whole, gpt.draw_starts(tokens, **draw | {"step": 6}, rank=0, world_size=1))


def test_gpt_does_not_see_the_future():
    gpt, torch = import_module("gpt"), import_module("torch")
    torch.manual_seed(0)
    model, tokens = gpt.GPT(), torch.randint(256, (1, gpt.CONTEXT))
    changed = tokens.clone()
    changed[0, 40] = (changed[0, 40] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.allclose(before[0, :40], after[0, :40], atol=1e-6)
    assert not torch.allclose(before[0, 40], after[0, 40], atol=1e-6)


def test_train_lowers_the_loss_when_called_as_a_plain_function(corpus, tmp_path):
    torch = import_module("torch")
    try:
        shards = tokenize(corpus, tmp_path / "out")
        report = import_module("pretrain").train.fn(str(shards), steps=12)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert 0 < report["val_bits_per_byte"] < 7.5  # 8 is knowing nothing
    assert (report["world_size"], report["restarts"]) == (1, 0)
    assert report["sample"].startswith("def ")
    json.dumps(report)


def test_fsdp_lowers_the_loss_when_called_as_a_plain_function():
    torch = import_module("torch")
    try:
        report = import_module("fsdp").train.fn(steps=40)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert report["last_loss"] < report["first_loss"]


def test_hello_checks_the_all_reduce_when_called_as_a_plain_function():
    torch = import_module("torch")
    try:
        report = import_module("hello_ranks").hello.fn([0.004])
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert [row["rank"] for row in report["ranks"]] == [0]
    assert list(report["bandwidth"]) == [0.004]


def test_gang_on_kueue_lowers_the_loss_when_called_as_a_plain_function():
    torch = import_module("torch")
    try:
        report = import_module("gang_on_kueue").train.fn(steps=12)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert report["val_bits_per_byte"] < 7.5  # 8 is knowing nothing
    assert (report["resumed_at_step"], report["preemptions"], report["world_size"]) == (0, 0, 1)


@pytest.mark.parametrize("name", ["pretrain", "hello_ranks", "fsdp", "failing", "gang_on_kueue"])
def test_flow_module_loads_no_torch(name):
    code = f"import sys; sys.path.insert(0, {str(FLOWS)!r}); import {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
