"""States of a size, generated once a run as RocksDB directories. Writes below the run's directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from statemgr.bench import records
from statemgr.bench.seed import Files, seeded, write_hashes
from statemgr.bench.session import Session
from statemgr.local import bulk_writer
from statemgr.local.clock import SystemClock, system_ids
from statemgr.local.directories import StoreDirectories
from statemgr.model.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True)
class State:
    """A finished RocksDB directory with ``records`` keys, and its files' sizes and hashes."""

    directory: Path
    records: int
    value_size: int
    files: Files

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.files.values())

    @property
    def checkpoint(self) -> Checkpoint:
        """A checkpoint whose store is this state."""
        return seeded(self.directory)

    def paths(self) -> list[Path]:
        """Every file."""
        return [self.directory / name for name in self.files]


def state_of(session: Session, size: int, value_size: int = records.VALUE_SIZE) -> State:
    """A state of about ``size`` bytes in 16-byte keys and values of ``value_size``, made once a run."""
    return session.shared(f"state of {size} in {value_size}", lambda: _generate(session, size, value_size))


def _generate(session: Session, size: int, value_size: int) -> State:
    count = max(size // (records.KEY_SIZE + value_size), 1)
    session.report(f"generating a state of {size / 2**20:,.0f} MiB")
    directory = session.fresh("states") / f"{size}-{value_size}"
    # large values in smaller lists: as many bytes at a time
    batch = max(records.BATCH_BYTES // value_size, 1)
    with bulk_writer("rocksdb", directory, {}) as writer:
        for pairs in records.batches(count, value_size=value_size, size=batch):
            writer.write(pairs)
    return register(directory, count, value_size)


def register(directory: Path, count: int, value_size: int) -> State:
    """Take a finished directory as a state: hash its files, so that tasks can be started from it."""
    directories = StoreDirectories(directory.with_name("unused"), SystemClock(), system_ids())
    files = directories.hash_files(directory).files
    write_hashes(directory, files)
    return State(directory=directory, records=count, value_size=value_size, files=files)
