"""Text as bytes: which files are the corpus, how they become shards, and how many bits a byte is worth.

Needs only the standard library: the driver and the data step run where no torch is installed.
"""

import hashlib
import json
import mmap
import os
import shutil
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import log2
from pathlib import Path

FORMAT = 1  # raise it when the same corpus must give other shards
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What the folder of shards holds: `manifest.json`."""

    digest: str
    """SHA-256 over the corpus (names and bytes) and the parameters of the split."""
    validation_percent: int
    files: dict[str, list[str]]
    """Split to the names of its files, relative to the corpus."""
    bytes: dict[str, int]
    sha256: dict[str, str]


def standard_library() -> Path:
    """Return the folder of this machine's Python standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_corpus(folder: Path) -> dict[str, bytes]:
    """Read all `.py` files below `folder`, without installed packages and tests, sorted by name."""
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py") if path.is_file()}
    return {name: paths[name].read_bytes() for name in sorted(paths) if not LEFT_OUT & set(Path(name).parts)}


def corpus_digest(corpus: Mapping[str, bytes], *, validation_percent: int) -> str:
    """Return one digest of names, contents and parameters: equal digests mean equal shards."""
    digest = hashlib.sha256(f"{FORMAT} {validation_percent}".encode())
    for name, content in corpus.items():
        # The length keeps ("a", "bc") and ("ab", "c") apart.
        digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def is_validation(name: str, *, validation_percent: int) -> bool:
    """Return whether a file belongs to the validation split: by its name alone, the same on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % 100 < validation_percent


def write_shards(corpus: Mapping[str, bytes], folder: Path, *, validation_percent: int) -> bool:
    """Write `train.bin`, `validation.bin` and `manifest.json`; return False if they were there already.

    The folder appears at once, complete: a reader or a second writer never sees half of it.

    Raises:
        ValueError: If one of the splits is empty.
    """
    digest = corpus_digest(corpus, validation_percent=validation_percent)
    if shards_are_intact(folder, digest=digest):
        return False
    names: dict[str, list[str]] = {"train": [], "validation": []}
    for name in corpus:
        split = "validation" if is_validation(name, validation_percent=validation_percent) else "train"
        names[split].append(name)
    shards = {split: b"".join(corpus[name] for name in names[split]) for split in names}
    for split, content in shards.items():
        if not content:
            raise ValueError(
                f"The {split} split is empty: {len(corpus)} files, `{validation_percent=}`. "
                "Pass a folder with more `.py` files, or another percentage from 1 to 99."
            )
    manifest = Manifest(
        digest=digest,
        validation_percent=validation_percent,
        files=names,
        bytes={split: len(content) for split, content in shards.items()},
        sha256={split: hashlib.sha256(content).hexdigest() for split, content in shards.items()},
    )
    files = {f"{split}.bin": content for split, content in shards.items()}
    files["manifest.json"] = json.dumps(asdict(manifest), indent=1).encode()
    publish_folder(folder, files, is_complete=lambda: shards_are_intact(folder, digest=digest))
    return True


def shards_are_intact(folder: Path, *, digest: str) -> bool:
    """Return whether `folder` holds the complete shards of `digest`."""
    try:
        manifest = read_manifest(folder)
        sums = {
            split: hashlib.sha256((folder / f"{split}.bin").read_bytes()).hexdigest()
            for split in manifest.sha256
        }
    except (OSError, ValueError, TypeError):  # not there, or not readable as a manifest: write it again
        return False
    return manifest.digest == digest and sums == manifest.sha256


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder of shards."""
    return Manifest(**json.loads((folder / "manifest.json").read_text()))


def publish_folder(folder: Path, files: Mapping[str, bytes], *, is_complete: Callable[[], bool]) -> None:
    """Write the files aside, then rename, so that `folder` appears complete or not at all.

    Args:
        folder: Where the files shall be.
        files: Names and contents.
        is_complete: Says whether `folder` now holds the same content, written by somebody faster.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".writing-"))
    try:
        new = aside / "new"
        new.mkdir()
        for name, content in files.items():
            (new / name).write_bytes(content)
        if folder.exists() and not is_complete():
            os.rename(folder, aside / "damaged")
        try:
            os.rename(new, folder)
        except OSError:  # a folder that is not empty cannot be replaced: another run was faster
            if not is_complete():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def map_shard(path: Path) -> mmap.mmap:
    """Map one shard into memory, read-only."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def unigram_entropy(text: bytes | mmap.mmap) -> float:
    """Return the entropy of a byte on its own, in bits."""
    return entropy(Counter(bytes(text)).values())


def bigram_entropy(text: bytes | mmap.mmap) -> float:
    """Return the entropy of a byte when the byte before it is known, in bits: H(next | previous)."""
    content = bytes(text)
    pairs = Counter(pairwise(content))
    return entropy(pairs.values()) - entropy(Counter(content[:-1]).values())


def entropy(counts: Iterable[int]) -> float:
    """Return the entropy of a table of counts, in bits."""
    table = list(counts)
    total = sum(table)
    return -sum(count / total * log2(count / total) for count in table)
