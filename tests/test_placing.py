"""Files and folders that appear whole at their path, and what is said when they cannot."""

from __future__ import annotations

import errno
import os

import pytest

from prefect_torch_elastic.checkpoint.placing import place_file, place_folder
from prefect_torch_elastic.errors import CheckpointError

CURES = [
    pytest.param(errno.ENOSPC, "Free some space", id="disk-full"),
    pytest.param(errno.EDQUOT, "Free some space", id="quota"),
    pytest.param(errno.EACCES, "Name a path in a directory that you may write", id="no-right"),
    pytest.param(errno.EROFS, "Name a path in a directory that you may write", id="read-only"),
    pytest.param(errno.ENAMETOOLONG, "Name a shorter path", id="long-name"),
    pytest.param(errno.EIO, "Check the disk, or name a path on another one", id="disk-broken"),
]


@pytest.mark.parametrize("place", [place_file, place_folder])
@pytest.mark.parametrize(("number", "cure"), CURES)
def test_error_names_path_cause_and_its_own_cure(tmp_path, place, number, cure):
    with pytest.raises(CheckpointError) as caught, place(tmp_path / "out"):
        raise OSError(number, os.strerror(number))
    message = str(caught.value)
    assert message.startswith(f"`{tmp_path / 'out'}` cannot be written: {os.strerror(number)}.")
    assert cure in message
    assert list(tmp_path.iterdir()) == []


def test_file_in_the_place_of_a_parent_is_named(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(CheckpointError, match="Name a path whose parents are directories"),
        place_file(tmp_path / "file" / "x"),
    ):
        pytest.fail("nothing can be written there")


def test_file_is_there_when_it_is_whole(tmp_path):
    with place_file(tmp_path / "a" / "out") as temporary:
        temporary.write_bytes(b"whole")
        assert not (tmp_path / "a" / "out").exists()
    assert (tmp_path / "a" / "out").read_bytes() == b"whole"
