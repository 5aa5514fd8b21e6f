"""The scratch directory."""

from __future__ import annotations

import os
from pathlib import Path

from statemgr.backends.scratch import Scratch
from statemgr.local.clock import SystemClock


def test_what_dead_processes_left_goes_after_a_day(tmp_path: Path) -> None:
    """Invariant 13: old entries go when it is first used; young ones may be in use; links are not followed."""
    path, outside = tmp_path / "scratch", tmp_path / "outside"
    for directory in (path / "attempt-old", path / "attempt-young", outside):
        directory.mkdir(parents=True)
        (directory / "rows").write_bytes(b"x")
    (path / "staged-old").write_bytes(b"x")
    (path / "link").symlink_to(outside)
    two_days_ago = SystemClock().time_ns() - 2 * 24 * 3600 * 10**9
    for name in ("attempt-old", "staged-old", "link"):
        os.utime(path / name, ns=(two_days_ago, two_days_ago), follow_symlinks=False)
    scratch = Scratch(path, SystemClock())
    assert scratch() == path
    assert [entry.name for entry in path.iterdir()] == ["attempt-young"]
    assert (outside / "rows").exists()


def test_it_is_made_again_when_it_was_removed(tmp_path: Path) -> None:
    """What is local is a cache, also while a process runs."""
    scratch = Scratch(tmp_path / "state" / "scratch", SystemClock())
    scratch().rmdir()
    assert scratch().is_dir()
