"""The files that ranks leave replace regular files only, and only in their folder."""

from __future__ import annotations

import os
import stat

import pytest

from megapatch._reporting import files


@pytest.mark.parametrize("kind", ["pipe", "link to a device"])
def test_what_is_not_a_regular_file_is_not_replaced(tmp_path, kind):
    path = files.path_of(tmp_path, "rank", 0)
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(os.devnull)
    before = path.lstat()
    with pytest.raises(FileExistsError, match="not a regular file"):
        files.write(path, {})
    assert path.lstat() == before and list(tmp_path.iterdir()) == [path]


def test_a_report_is_replaced_and_nothing_else_is_there(tmp_path):
    path = files.path_of(tmp_path / "made", "rank", 37)
    files.write(path, {"rank": 37, "size": 40})
    files.write(path, {"rank": 37, "size": 41})
    assert list(files.read(path.parent, "rank", [])) == [(path, {"rank": 37, "size": 41})]
    assert list(tmp_path.rglob("*")) == [path.parent, path]


def test_a_device_is_no_folder():
    with pytest.raises(OSError, match=os.devnull):
        files.write(files.path_of(files.Path(os.devnull), "rank", 0), {})
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
