"""Changing keys of a configuration file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from statemgr import JobConfig
from statemgr.errors import AccessDenied
from statemgr.terminal.toml_edit import TomlEdit

_JOB = """\
[job]
name = "orders"  # never changes
tasks = 2
"""
_TWO_PLACES = """\
[stores.a]
key.serde = "string"

[state]
dir = "state"

[stores.a.rocksdb]
write.buffer.size.bytes = 1048576
"""


@pytest.mark.parametrize(
    "stores",
    ['[stores.a]\nkey.serde = "string"\n', '[stores]\na.key.serde = "string"\n', _TWO_PLACES],
    ids=["a table", "dotted keys", "in two places"],
)
def test_a_key_is_added_to_a_store_wherever_its_table_is(tmp_path: Path, stores: str) -> None:
    """An edit keeps the other keys and the comments."""
    file = tmp_path / "job.toml"
    file.write_text(_JOB + stores)
    before = JobConfig.from_file(file).to_mapping()
    changes = {"stores.a.changelog.topic": "a-g2", "job.tasks": 3}
    saved = TomlEdit(file, changes).write("before")
    assert saved.read_text() == _JOB + stores
    assert JobConfig.from_file(file).to_mapping() == {**before, **changes}
    assert "# never changes" in file.read_text()


def test_a_diff_shows_no_other_line(tmp_path: Path) -> None:
    """A line next to a change may have a secret."""
    file = tmp_path / "job.toml"
    file.write_text('kafka.sasl.password = "hunter22"\n' + _JOB)
    diff = TomlEdit(file, {"job.tasks": 3}).diff()
    assert [line for line in diff.splitlines()[2:] if line[0] != "@"] == ["-tasks = 2", "+tasks = 3"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_the_file_keeps_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `sudo`, the service must still be able to read its configuration. A command that may not give the new file
    to the owner of the old one is refused, and leaves nothing."""
    file = tmp_path / "job.toml"
    file.write_text(_JOB)
    os.chown(file, 4711, 4712)
    file.chmod(0o640)
    saved = TomlEdit(file, {"job.tasks": 3}).write("before")
    for path in (file, saved):
        found = path.stat()
        assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (4711, 4712, 0o640)
    there = sorted(tmp_path.iterdir())

    def refuse(*_: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchown", refuse)
    with pytest.raises(AccessDenied, match="as the owner of the file"):
        TomlEdit(file, {"job.tasks": 4}).write("again")
    assert sorted(tmp_path.iterdir()) == there
    assert JobConfig.from_file(file).tasks == 3
    os.chown(file, 0, 4712)  # its owner may not be in its group
    for path in TomlEdit(file, {"job.tasks": 5}).write("later"), file:
        assert (path.stat().st_uid, path.stat().st_mode & 0o7777) == (0, 0o600)
