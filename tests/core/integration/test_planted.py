"""Links and odd files below ``state.dir``: a job never follows or waits for them, and leaves foreign files alone."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from statemgr import JobConfig, StateManager
from statemgr.engine.host import _host
from statemgr.errors import StatemgrError
from tests.commits import TASK, attempt, commit, totals, write
from tests.jobs import SEGMENTS, elsewhere, job_mapping
from tests.servers import KafkaServer

#: Levels and files below state.dir; ``{job}`` is the job's name.
LEVELS = (
    "{job}",
    "{job}/1",
    "{job}/1/scratch",
    "{job}/1/scratch/owners",
    "{job}/1/Partition_0",
    "{job}/1/Partition_0/totals",
    "{job}/1/Partition_0/totals/committed",
    "{job}/1/Partition_0/totals/live",
    "{job}/1/Partition_0/totals/staging",
    "{job}/1/Partition_0/totals/owners",
    "{job}/1/Partition_0/totals/aside",
    "{job}/1/Partition_0/totals/segments",
    "{job}/1/Partition_0/totals/snapshot.pending",
)
FILES = (
    "{job}/1/scratch/lock",
    "{job}/1/Partition_0/PUBLISHED",
    "{job}/1/Partition_0/totals/lock",
    "{job}/1/Partition_0/totals/snapshot.pending",
    "{job}/1/Partition_0/totals/snapshot.pending.lock",
)


def job(kafka: KafkaServer, directory: Path) -> JobConfig:
    """Create a job that uses every level and file below state.dir."""
    return JobConfig.from_mapping(
        job_mapping(
            kafka,
            directory,
            backup=("blob-store", "kafka-changelog"),
            kind=SEGMENTS,
            task__checkpoint__retained=2,
            blob__store__compression="zstd",
            stores__totals__write__batch__size=1,
        )
    )


def use(config: JobConfig, number: int) -> bool:
    """Open, write, commit and close, as a task and as an attempt. Returns whether all of it succeeded."""
    _host.cache_clear()
    try:
        with StateManager(config) as manager:
            with manager.open_task(TASK) as task:
                write(task, {b"%d" % number: bytes(os.urandom(20_000))})
                task.commit({"orders-0": number})
                task.commit({"orders-0": number}, materialize=True)
            epoch = manager.acquire()
            manager.publish([attempt(config, epoch, TASK, {b"a%d" % number: os.urandom(20_000)}, number)])
    except StatemgrError as error:
        if str(config.state_dir) not in str(error):
            raise
        return False
    finally:
        _host.cache_clear()
    return True


def contents(directory: Path) -> dict[str, bytes]:
    """Return everything below a foreign directory."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() if path.is_file() else b""
        for path in sorted(directory.rglob("*"))
    }


@pytest.mark.long
def test_a_link_in_place_of_any_level(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 49, invariant 16: a link leads to a directory with files that have our own names. The job refuses the link
    with an error that names the place, or does not use it. Nothing behind the link changes, and without it the job
    continues."""
    config = job(kafka, tmp_path)
    commit(config, {b"a": b"1"}, 0)
    outside = tmp_path / "outside"
    ours = "1700000000000-0123456789abcdef"
    for name in (
        f"{ours}-totals/000008.sst", f"{ours}-totals.manifest", f"{ours}.left/000008.sst", f"{ours}.0123456789abcdef/x",
        "0123456789abcdef/frame", f"{'ab' * 16}.segment", "owners/0123456789abcdef", "precious",
    ):  # fmt: skip
        (outside / name).parent.mkdir(parents=True, exist_ok=True)
        (outside / name).write_bytes(b"as it was")
    before = contents(outside)
    refused = 0
    for number, level in enumerate(LEVELS, 1):
        machine = tmp_path / f"machine-{number}"
        there = elsewhere(config, machine, "blob-store")
        planted = machine / level.format(job=config.job_name)
        planted.parent.mkdir(parents=True)
        planted.symlink_to(outside)
        refused += not use(there, number)
        assert contents(outside) == before, level
        if planted.is_symlink():
            planted.unlink()
        assert use(there, 100 + number), level
    assert refused > 6
    assert totals(config, "blob-store") == totals(config, "kafka-changelog")


def _huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 42)


@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        Path.mkdir,
        _huge,
        pytest.param(lambda path: path.symlink_to("/dev/zero"), id="device"),
    ],
)
def test_an_odd_file_in_place_of_ours(kafka: KafkaServer, tmp_path: Path, make: Callable[[Path], None]) -> None:
    """FAULT 49: in place of a file there is a FIFO, a directory, a file of 4 TiB or a link to a device. The job neither
    waits for it nor reads it to the end."""
    config = job(kafka, tmp_path)
    commit(config, {b"a": b"1"}, 0)
    for number, name in enumerate(FILES, 1):
        machine = tmp_path / f"machine-{number}"
        planted = machine / name.format(job=config.job_name)
        planted.parent.mkdir(parents=True)
        make(planted)
        there = elsewhere(config, machine, "blob-store")
        use(there, number)
        if os.path.lexists(planted):
            planted.rmdir() if planted.is_dir() and not planted.is_symlink() else planted.unlink()
        assert use(there, 100 + number), name
    assert totals(config, "blob-store") == totals(config, "kafka-changelog")


def test_what_a_job_writes_is_for_its_user_alone(kafka: KafkaServer, tmp_path: Path) -> None:
    """Invariant 16: state and blobs have the modes 0700 and 0600 after commits, whatever the umask is."""
    config = job(kafka, tmp_path)
    umask = os.umask(0)
    try:
        assert use(config, 1)
        with StateManager(config) as manager, manager.open_task(TASK):
            roots = (config.state_dir, tmp_path / "blobs")
            found = [*roots, *(path for root in roots for path in root.rglob("*"))]
            modes: dict[Path, int] = {}
            for path in found:
                with suppress(FileNotFoundError):  # what dead processes have left goes meanwhile
                    modes[path] = stat.S_IMODE(path.lstat().st_mode)
    finally:
        os.umask(umask)
    # RocksDB makes the files of an open store, in a directory that nobody else can enter
    wrong = {p: oct(mode) for p, mode in modes.items() if mode & 0o077 and "live" not in p.parts}
    assert not {p: mode for p, mode in wrong.items() if "staging" not in p.parts}
    assert {stat.S_IMODE(p.stat().st_mode) for p in config.state_dir.rglob("live")} == {0o700}
