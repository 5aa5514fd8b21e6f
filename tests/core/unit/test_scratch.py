"""The scratch directory."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from statemgr.errors import InvalidError
from statemgr.local.machine import SystemClock, system_ids
from statemgr.local.shared_directories import Scratch

#: A process that creates its scratch directory, prints the path and waits.
_OTHER = """
import sys
from pathlib import Path
from statemgr.local.shared_directories import Scratch
from statemgr.local.machine import SystemClock, system_ids
scratch = Scratch(Path(sys.argv[1]), SystemClock(), system_ids())
own = scratch()
(own / "frame").write_bytes(b"x")
print(own, flush=True)
sys.stdin.read()
"""


def scratch_of(path: Path) -> Scratch:
    """Return a process's scratch directory."""
    return Scratch(path, SystemClock(), system_ids())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The parent of all processes' scratch directories."""
    return tmp_path / "state" / "scratch"


@pytest.fixture
def other(path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process, and its directory with a file."""
    process = subprocess.Popen(
        [sys.executable, "-c", _OTHER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield process, Path(process.stdout.readline().strip())
    process.kill()
    process.communicate()


@pytest.mark.parametrize("how", ["call", "tidy"])
def test_what_a_killed_process_left_goes_at_once(
    path: Path, tmp_path: Path, other: tuple[subprocess.Popen[str], Path], how: str
) -> None:
    """Invariants 13 and 16: the next process removes the directory of a dead process, and keeps those of living ones.
    It does not follow links, and keeps entries with other names."""
    process, theirs = other
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "rows").write_bytes(b"x")
    (path / "0123456789abcdef").symlink_to(outside)
    (path / "link").symlink_to(outside)
    (path / "photos").mkdir()
    mine = scratch_of(path)
    if how == "call":
        (mine() / "mine").write_bytes(b"x")
    else:
        mine.tidy()
    assert (theirs / "frame").exists()
    assert not os.path.lexists(path / "0123456789abcdef")
    assert os.path.lexists(path / "link")
    assert (path / "photos").is_dir()
    assert (outside / "rows").exists()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    scratch_of(path).tidy()
    assert not theirs.exists()
    assert how == "tidy" or (mine() / "mine").exists()


def test_nothing_is_made_before_it_is_needed(path: Path) -> None:
    """A clean-up creates no directory."""
    scratch_of(path).tidy()
    assert not path.exists()


def test_a_close_leaves_nothing(path: Path) -> None:
    """An orderly close removes the process's files. The process may use the directory again."""
    scratch = scratch_of(path)
    (scratch() / "spill").write_bytes(b"x")
    scratch.close()
    scratch.close()
    assert sorted(entry.name for entry in path.iterdir()) == ["lock", "owners"]
    assert list((path / "owners").iterdir()) == []
    assert scratch().is_dir()
    scratch.close()


@pytest.mark.parametrize("level", ["state", "state/scratch", "state/scratch/owners"])
def test_a_link_on_the_way_is_refused(tmp_path: Path, level: str) -> None:
    """FAULT 49, invariant 16: if any level is a link, nothing behind it is removed or created."""
    outside = tmp_path / "outside"
    (outside / "scratch" / "owners").mkdir(parents=True)
    (outside / "0123456789abcdef").mkdir()
    (outside / "0123456789abcdef" / "precious").write_bytes(b"x")
    before = sorted(outside.rglob("*"))
    planted = tmp_path / level
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.symlink_to(outside)
    scratch = Scratch(tmp_path / "state" / "scratch", SystemClock(), system_ids(), tmp_path)
    for call in (scratch, scratch.tidy):
        with pytest.raises(InvalidError, match="symbolic link"):
            call()
    scratch.close()
    assert sorted(outside.rglob("*")) == before


def test_it_is_made_again_when_it_was_removed(path: Path) -> None:
    """Local files are a cache, even while a process runs, so a removed directory is created again."""
    scratch = scratch_of(path)
    first = scratch()
    shutil.rmtree(path.parent)
    second = scratch()
    assert second.is_dir()
    assert second != first
    scratch_of(path).tidy()
    assert second.is_dir(), "its owner lives"


@pytest.mark.parametrize("vanished", ["directory", "file"])
def test_a_sign_of_life_that_was_removed_is_given_again(path: Path, vanished: str) -> None:
    """FAULT 47: the next call restores the sign of life, so that other processes do not take this one for dead."""
    scratch = scratch_of(path)
    first = scratch()
    signs = path / "owners"
    shutil.rmtree(signs) if vanished == "directory" else [sign.unlink() for sign in signs.iterdir()]
    assert scratch() == first
    scratch_of(path).tidy()
    assert first.is_dir(), "its owner lives"


def test_a_root_that_vanishes_while_its_lock_is_waited_for(path: Path) -> None:
    """The process that gets the lock of a removed directory makes the directory again, and locks what others see."""
    scratch_of(path)().joinpath("frame").write_bytes(b"x")
    holder = os.open(path / "lock", os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)

    class Removing(SystemClock):
        """Removes the directory as soon as somebody waits for its lock."""

        def sleep(self, seconds: float) -> None:
            if path.exists():
                shutil.rmtree(path)
                os.close(holder)

    own = Scratch(path, Removing(), system_ids())()
    assert own.is_dir()
    assert path.joinpath("lock").exists()
