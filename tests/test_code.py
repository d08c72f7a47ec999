"""The archive of a call's code: packed by a script in one project, unpacked and imported where nothing is."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import textwrap
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from prefect_torch_elastic.dispatch import code
from prefect_torch_elastic.dispatch.code import pack_code, unpack_code
from prefect_torch_elastic.errors import SpecError, TransferError

# What a driver does with a call.
SEND = """
if __name__ == "__main__":
    import inspect, pathlib
    from prefect_torch_elastic import pickles
    from prefect_torch_elastic.dispatch.code import pack_code
    data, buffers = pickles.dump((work, globals().get("ARGS", ())))
    base = pathlib.Path(work.__globals__.get("__file__", "."))
    archive = pack_code(
        work,
        include_files=globals().get("INCLUDE", ()),
        base=base.parent,
        modules=pickles.list_modules(data),
    )
    sent = pathlib.Path({sent!r})
    sent.joinpath("call").write_bytes(data)
    if archive is not None:
        sent.joinpath("code").write_bytes(archive)
"""
# What a job in a pool does with it.
RECEIVE = """
import os, pathlib, sys
from prefect_torch_elastic import pickles
from prefect_torch_elastic.dispatch.code import unpack_code
sent, folder = map(pathlib.Path, sys.argv[1:])
if sent.joinpath("code").exists():
    unpack_code(sent.joinpath("code").read_bytes(), folder)
    sys.path.insert(0, str(folder))
    os.chdir(folder)
work, args = pickles.load(sent.joinpath("call").read_bytes(), [])
print(work(*args))
"""
LOADER = """
import sys
sys.path.pop(0)
{busy}
from prefect.utilities.importtools import load_script_as_module
work = load_script_as_module({file!r}).work
"""


@dataclass
class Project:
    """A user's project, and a place far from it."""

    here: Path
    sent: Path
    there: Path

    def call(self, *command: str, path: str = "") -> str:
        """Send the call of a script, hide the project, receive the call, and return what `work` returned."""
        environment = {**os.environ, "PYTHONPATH": path}
        self._run(self.here, *command, environment=environment)
        hidden = self.here.rename(self.here.with_name("hidden"))
        try:
            return self._run(
                self.sent, "-c", RECEIVE, str(self.sent), str(self.there), environment=os.environ
            )
        finally:
            hidden.rename(self.here)

    def script(self, text: str, tree: dict[str, str] | None = None, *, name: str = "main.py") -> str:
        """Call `work` of a script that runs as `__main__`."""
        write_tree(
            self.here, {**(tree or {}), name: textwrap.dedent(text) + SEND.format(sent=str(self.sent))}
        )
        return self.call(name)

    def typed(self, text: str) -> str:
        """Call `work` of an interpreter session."""
        return self.call("-c", textwrap.dedent(text) + SEND.format(sent=str(self.sent)))

    def files(self) -> list[str]:
        return sorted(
            path.relative_to(self.there).as_posix() for path in self.there.rglob("*") if path.is_file()
        )

    def _run(self, folder: Path, *command: str, environment) -> str:
        done = subprocess.run(
            [sys.executable, "-B", *command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def project(tmp_path) -> Project:
    made = Project(here=tmp_path / "project", sent=tmp_path / "sent", there=tmp_path / "there")
    made.here.mkdir()
    made.sent.mkdir()
    return made


def write_tree(folder: Path, tree: dict[str, str]) -> None:
    for name, text in tree.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


def pack(base: Path, *entries: str) -> bytes | None:
    return pack_code(print, include_files=entries, base=base)


def names_in(data: bytes | None) -> list[str]:
    assert data is not None
    return zipfile.ZipFile(io.BytesIO(data)).namelist()


def make_zip(name: str, *, mode: int = stat.S_IFREG | 0o644, text: str = "x", how: int = 0) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        entry = zipfile.ZipInfo(name)
        entry.external_attr = mode << 16
        archive.writestr(entry, text, how)
    return stream.getvalue()


# ---------------------------------------------------------------- calls that travel


def test_function_of_a_script_finds_its_modules(project):
    script = """
    import helper
    from pack.deep import net
    def work(n):
        import lazy
        return helper.double(n) + net.SIZE + lazy.ONE
    ARGS = (20,)
    """
    tree = {
        "helper.py": "def double(x): return 2 * x",
        "lazy.py": "ONE = 1",
        "pack/__init__.py": "",
        "pack/deep/__init__.py": "from .net import SIZE",
        "pack/deep/net.py": "from ..sizes import SIZE",
        "pack/sizes.py": "SIZE = 100",
    }
    assert project.script(script, tree) == "141"
    assert project.files() == sorted(tree)


def test_function_of_a_local_package_is_imported_there(project):
    tree = {
        "src/mine/__init__.py": "",
        "src/mine/job.py": "from .steps import step\ndef work():\n    return step(), __name__, __file__",
        "src/mine/steps.py": "from . import late\ndef step():\n    from .late import VALUE\n    return VALUE",
        "src/mine/late.py": "VALUE = 7",
    }
    write_tree(project.here, tree)
    driver = "from mine.job import work" + SEND.format(sent=str(project.sent))
    expected = f"(7, 'mine.job', '{project.there}/mine/job.py')"
    assert project.call("-c", driver, path=str(project.here / "src")) == expected


def test_package_that_runs_as_a_module_keeps_its_relative_imports(project):
    tree = {
        "mine/__init__.py": "",
        "mine/job.py": "def work():\n    from . import steps\n    return steps.VALUE",
        "mine/steps.py": "VALUE = 7",
    }
    tree["mine/job.py"] += SEND.format(sent=str(project.sent))
    write_tree(project.here, tree)
    assert project.call("-m", "mine.job") == "7"


def test_folder_without_init_is_imported_there(project):
    script = "from tools.io import read\ndef work():\n    return read()"
    assert project.script(script, {"tools/io.py": "def read(): return 'read'"}) == "read"


def test_argument_of_a_local_class_is_unpickled_there(project):
    script = """
    import importlib
    ARGS = (importlib.import_module("set" + "tings").Settings(3),)
    def work(settings):
        return settings.size
    """
    settings = "class Settings:\n    def __init__(self, size): self.size = size"
    assert project.script(script, {"settings.py": settings}) == "3"


def test_module_that_only_a_finder_of_an_editable_install_knows_is_found_there(project):
    finder = """
    import sys
    from importlib.util import spec_from_file_location
    class Finder:  # as setuptools installs
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            return spec_from_file_location(name, "code/__init__.py") if name == "mapped" else None
    sys.meta_path.append(Finder)
    from mapped import work
    """
    tree = {
        "code/__init__.py": "from .a import A\ndef work():\n    from .a import A as again\n    return again",
        "code/a.py": "A = 5",
    }
    assert project.script(finder, tree) == "5"


def test_function_typed_into_an_interpreter_finds_its_modules(project):
    write_tree(project.here, {"helper.py": "def double(x): return 2 * x", "lazy.py": "ONE = 1"})
    script = """
    from helper import double
    def work():
        import lazy
        return double(20) + lazy.ONE
    """
    assert project.typed(script) == "41"


def test_local_module_that_shadows_the_standard_library_is_the_one_that_is_imported(project):
    script = "def work():\n    import wave\n    return wave.LOCAL"
    assert project.script(script, {"wave.py": "LOCAL = 1"}) == "1"


def test_function_that_needs_no_code_travels_alone(project):
    assert project.script("import json\ndef work():\n    return json.dumps([1])", {"unused.py": ""}) == "[1]"
    assert not project.there.exists()


@pytest.mark.parametrize(
    ("busy", "name"),
    [
        pytest.param("", "job", id="own-name"),
        pytest.param("sys.modules['job'] = sys", "__prefect_loader", id="made-up-name"),
    ],
)
def test_flow_file_that_prefect_loads_finds_its_modules(project, busy, name):
    job = """
    import helper
    from .near import NEAR
    def work():
        import lazy
        from .pack import DEEP
        return work.__module__[:16].rstrip("_"), helper.double(NEAR), lazy.ONE, DEEP
    """
    tree = {
        "flows/job.py": job,
        "flows/helper.py": "def double(x): return 2 * x",
        "flows/lazy.py": "ONE = 1",
        "flows/near.py": "NEAR = 5",
        "flows/pack/__init__.py": "from .inside import DEEP",
        "flows/pack/inside.py": "from ..far import DEEP",
        "flows/far.py": "DEEP = 9",
    }
    write_tree(project.here, tree)
    driver = LOADER.format(busy=busy, file=str(project.here / "flows/job.py"))
    called = project.call("-c", driver + SEND.format(sent=str(project.sent)))
    assert called == f"('{name}', 10, 1, 9)"


# ---------------------------------------------------------------- files that are included


def test_included_files_are_found_from_the_working_directory_and_next_to_the_package(project):
    script = """
    import mine
    INCLUDE = ["mine/table.txt", "conf"]
    def work():
        return mine.read(), open("conf/deep/a.yaml").read()
    """
    mine = """
    import pathlib
    def read():
        return pathlib.Path(__file__).with_name("table.txt").read_text()
    """
    tree = {
        "mine/__init__.py": mine,
        "mine/table.txt": "table",
        "conf/deep/a.yaml": "a: 1",
    }
    assert project.script(script, tree) == "('table', 'a: 1')"


def test_included_file_of_a_package_lies_in_the_package_too(tmp_path, monkeypatch):
    write_tree(tmp_path, {"src/minetoo/__init__.py": "", "src/minetoo/data/a.json": "{}"})
    (tmp_path / "link").symlink_to(tmp_path / "src")
    monkeypatch.syspath_prepend(tmp_path / "link")
    data = pack_code(print, include_files=["src/minetoo/data"], base=tmp_path, modules=["minetoo"])
    assert names_in(data) == ["minetoo/__init__.py", "minetoo/data/a.json", "src/minetoo/data/a.json"]


def test_modules_that_only_an_included_file_imports_travel(project):
    script = """
    INCLUDE = ["plugins"]
    def work():
        import runpy
        return runpy.run_path("plugins/one.py")["VALUE"]
    """
    assert project.script(script, {"plugins/one.py": "from base import VALUE", "base.py": "VALUE = 4"}) == "4"


TREE = {
    "a.yaml": "",
    "b.yaml": "",
    "[c].yaml": "",
    ".env": "",
    "conf/x.json": "",
    "conf/deep/y.json": "",
    "conf/.secret": "",
    "conf/.git/config": "",
    "conf/__pycache__/z.json": "",
    "env/pyvenv.cfg": "",
    "env/lib/w.json": "",
}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        pytest.param(["a.yaml"], ["a.yaml"], id="file"),
        pytest.param(["conf"], ["conf/deep/y.json", "conf/x.json"], id="folder"),
        pytest.param(["conf/"], ["conf/deep/y.json", "conf/x.json"], id="folder-with-slash"),
        pytest.param(["*.yaml"], ["[c].yaml", "a.yaml", "b.yaml"], id="glob"),
        pytest.param(["[ab].yaml"], ["a.yaml", "b.yaml"], id="glob-of-letters"),
        pytest.param(["[c].yaml"], ["[c].yaml"], id="name-that-looks-like-a-glob"),
        pytest.param(["**/*.json"], ["conf/deep/y.json", "conf/x.json"], id="deep-glob"),
        pytest.param(["co*"], ["conf/deep/y.json", "conf/x.json"], id="glob-of-folders"),
        pytest.param([".env"], [".env"], id="hidden-file-by-name"),
        pytest.param(["conf/.git"], ["conf/.git/config"], id="hidden-folder-by-name"),
        pytest.param(["env/lib/*"], ["env/lib/w.json"], id="environment-by-name"),
        pytest.param(["conf/../a.yaml", "./a.yaml", "a.*"], ["a.yaml"], id="same-file-three-times"),
        pytest.param(["."], ["[c].yaml", "a.yaml", "b.yaml", "conf/deep/y.json", "conf/x.json"], id="all"),
    ],
)
def test_include_files_names_files(tmp_path, entries, expected):
    write_tree(tmp_path, TREE)
    assert names_in(pack(tmp_path, *entries)) == expected


def test_include_files_takes_an_absolute_path_inside(tmp_path):
    write_tree(tmp_path, TREE)
    assert names_in(pack(tmp_path, str(tmp_path / "conf/x.json"))) == ["conf/x.json"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        pytest.param("../other.txt", "is outside of", id="parent"),
        pytest.param("../*", "is outside of", id="glob-in-parent"),
        pytest.param("conf/../../other.txt", "is outside of", id="parent-in-between"),
        pytest.param("*/../../other.txt", "is outside of", id="parent-after-glob"),
        pytest.param("/etc/hostname", "is outside of", id="absolute"),
        pytest.param("missing.txt", "matches no file", id="missing"),
        pytest.param("*.none", "matches no file", id="glob-without-match"),
        pytest.param("empty", "matches no file", id="empty-folder"),
        pytest.param("dangling", "matches no file", id="link-to-nothing"),
        pytest.param(" ", "is empty", id="blank"),
    ],
)
def test_include_files_refuses_what_it_cannot_send(tmp_path, entry, message):
    base = tmp_path / "base"
    write_tree(base, TREE)
    (tmp_path / "other.txt").write_text("")
    (base / "empty").mkdir()
    (base / "dangling").symlink_to(base / "nowhere")
    with pytest.raises(SpecError, match=message) as caught:
        pack(base, entry)
    assert "include_files" in str(caught.value)
    assert entry.strip() in str(caught.value)


def test_links_in_included_folders_are_followed_once(tmp_path):
    write_tree(tmp_path, {"outside/data.txt": "far", "base/conf/a.txt": ""})
    base = tmp_path / "base"
    (base / "conf/far").symlink_to(tmp_path / "outside")
    (base / "conf/again").symlink_to(base / "conf")
    data = pack(base, "conf")
    assert names_in(data) == ["conf/a.txt", "conf/far/data.txt"]


def test_included_file_that_is_a_module_of_the_call_lies_there_once(project):
    assert (
        project.script("INCLUDE=['h.py']\ndef work():\n    import h\n    return h.X", {"h.py": "X=1"}) == "1"
    )
    assert project.files() == ["h.py"]


def test_included_file_in_the_place_of_another_module_is_refused(tmp_path, monkeypatch):
    write_tree(tmp_path, {"lib/clashing.py": "", "base/clashing.py": ""})
    monkeypatch.syspath_prepend(tmp_path / "lib")
    with pytest.raises(SpecError, match=r"would both be `clashing.py`") as caught:
        pack_code(print, include_files=["clashing.py"], base=tmp_path / "base", modules=["clashing"])
    assert str(tmp_path / "lib/clashing.py") in str(caught.value)
    assert str(tmp_path / "base/clashing.py") in str(caught.value)


def test_included_file_with_the_name_of_a_package_is_refused(tmp_path, monkeypatch):
    write_tree(tmp_path, {"lib/clashpack/__init__.py": "", "base/clashpack": ""})
    monkeypatch.syspath_prepend(tmp_path / "lib")
    with pytest.raises(SpecError, match="would both be `clashpack`"):
        pack_code(print, include_files=["clashpack"], base=tmp_path / "base", modules=["clashpack"])


def test_too_large_files_are_refused_by_name_before_they_are_read(tmp_path):
    (tmp_path / "small.txt").write_text("")
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(code.MAX_BYTES + 1)
    with pytest.raises(SpecError, match=r"larger than 256 MiB.*weights.bin` \(256 MiB\)"):
        pack(tmp_path, ".")


def test_name_that_is_no_text_is_refused(tmp_path):
    (tmp_path / os.fsdecode(b"bad\xff")).write_text("")
    with pytest.raises(SpecError, match="not valid text"):
        pack(tmp_path, ".")


def test_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "locked.txt").write_text("")

    def refuse(path):  # root may read everything
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(SpecError, match=r"locked.txt` cannot be read \(Permission denied\)"):
        pack(tmp_path, "locked.txt")


# ---------------------------------------------------------------- the archive


def test_same_files_give_the_same_bytes_on_another_day(tmp_path):
    write_tree(tmp_path, TREE)
    first = pack(tmp_path, ".")
    for path in tmp_path.rglob("*"):
        os.utime(path, (time.time() - 86400, time.time() - 86400))
        if path.is_file():
            path.chmod(0o600)
    assert pack(tmp_path, "conf", "*.yaml", "a.yaml") == first


def test_other_content_gives_other_bytes(tmp_path):
    write_tree(tmp_path, TREE)
    first = pack(tmp_path, ".")
    (tmp_path / "a.yaml").write_text("a: 1")
    assert pack(tmp_path, ".") != first


def test_included_script_stays_executable(tmp_path):
    write_tree(tmp_path, {"run.sh": "#!/bin/sh\necho ran", "plain.txt": ""})
    (tmp_path / "run.sh").chmod(0o755)
    unpack_code(pack(tmp_path, "run.sh", "plain.txt") or b"", tmp_path / "there")
    assert subprocess.check_output([tmp_path / "there/run.sh"]) == b"ran\n"
    assert stat.S_IMODE((tmp_path / "there/plain.txt").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "name",
    ["../evil.py", "/evil.py", "a/../../evil.py", "a/./b.py", "a//b.py", "folder/", ".."],
)
def test_archive_with_a_name_that_leaves_the_folder_is_refused(tmp_path, name):
    with pytest.raises(TransferError, match="is no file inside its folder"):
        unpack_code(make_zip(name), tmp_path / "there")
    assert not list(tmp_path.iterdir())


def test_archive_with_a_link_is_refused(tmp_path):
    with pytest.raises(TransferError, match="is no file inside its folder"):
        unpack_code(make_zip("link", mode=stat.S_IFLNK | 0o777, text="/etc"), tmp_path / "there")


def test_archive_does_not_write_through_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/a.py").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic"):
        unpack_code(make_zip("a.py"), tmp_path / "there")
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"no zip", id="no-zip"),
        pytest.param(make_zip("a.py", text="x" * 100)[:-30], id="cut"),
        pytest.param(make_zip("a.py", text="x" * 100).replace(b"xxx", b"xyx", 1), id="changed"),
        pytest.param(make_zip("ä.py").replace("ä".encode(), b"\xff\xff"), id="name-is-no-text"),
        pytest.param(make_zip("a.py", how=zipfile.ZIP_BZIP2), id="not-our-compression"),
    ],
)
def test_damaged_archive_is_refused(tmp_path, data):
    with pytest.raises(TransferError, match="cannot be unpacked"):
        unpack_code(data, tmp_path / "there")


def test_archive_that_grows_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(code, "MAX_BYTES", 1 << 20)
    with pytest.raises(TransferError, match="more than 1 MiB"):
        unpack_code(make_zip("a.txt", text="x" * (2 << 20)), tmp_path / "there")
