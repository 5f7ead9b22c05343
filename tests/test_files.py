"""The files that ranks leave replace regular files only, and only in their folder."""

from __future__ import annotations

import os
import stat
from unittest import mock

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
    assert list(files.read(path.parent, "rank", [], dict)) == [{"rank": 37, "size": 41}]
    assert list(tmp_path.rglob("*")) == [path.parent, path]


def test_a_part_is_never_written_through_a_link(tmp_path, monkeypatch):
    """Others may write to a shared folder, and know a process's number."""
    path, theirs = files.path_of(tmp_path / "shared", "rank", 0), tmp_path / "theirs"
    path.parent.mkdir()
    theirs.write_text("theirs")
    (path.parent / f"rank-00000.{os.getpid()}.part").symlink_to(theirs)
    files.write(path, {})
    path.unlink()
    monkeypatch.setattr(os, "urandom", lambda count: b"abcd")
    (path.parent / f"rank-00000.{os.getpid()}.61626364.part").symlink_to(theirs)
    with pytest.raises(FileExistsError):
        files.write(path, {})
    assert theirs.read_text() == "theirs" and not path.exists()


def test_a_part_that_cannot_be_written_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "put", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        files.write(files.path_of(tmp_path, "rank", 0), {})
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_cannot_be_made_says_why(tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.Path, "open", full)
    with pytest.raises(OSError, match="No space left"):
        files.write(files.path_of(tmp_path, "rank", 0), {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('"began": Infinity', "Infinity is not a number"),
        ('"began": 1e400', "expected a time"),
        ('"began": "today"', "TypeError"),
        ('"facts": ' + "[" * 100_000, "RecursionError"),
        ("", "more than"),
    ],
)
def test_a_foreign_file_is_one_sentence(tmp_path, text, says):
    path = files.path_of(tmp_path, "rank", 0)
    path.write_text(f'{{"rank": 0, "size": 1, {text}}}')
    if not text:
        os.truncate(path, 2**32)  # sparse
    unreadable = []
    assert list(files.read(tmp_path, "rank", unreadable, dict)) == []
    (sentence,) = unreadable
    assert sentence.startswith(f"{path} cannot be read: ") and says in sentence


def test_a_device_is_no_folder():
    with pytest.raises(OSError, match=os.devnull):
        files.write(files.path_of(files.Path(os.devnull), "rank", 0), {})
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_ranks_of_one_attempt_need_not_begin_at_once():
    ended = [{"rank": rank, "began": began, "seconds": 5.0} for rank, began in enumerate((1, 2, 6.5, 12))]
    under_way = [{"rank": rank, "began": began} for rank, began in enumerate((1, 2, 1000))]
    assert files.attempts(ended) == [ended[:3], ended[3:]]
    assert files.attempts(under_way) == [under_way]
    uneven = [{**ended[0], "seconds": 20.0}, ended[1], ended[3]]
    assert files.attempts(uneven) == [uneven]
    again = {"rank": 1, "began": 1001}
    assert files.attempts([*under_way, again]) == [under_way, [again]]
